"""Cleaning of large models: what is looked at grows with the number of nodes, and not with its square."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper
from small_weights import drawn

from rlflow_tvm.frontend.graph import split

node = helper.make_node


class _Watched(dict):
    """Counts how often all of it is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[str]:
        self.looks += 1
        return super().__iter__()


def test_names_are_collected_once(make_model) -> None:
    model = make_model(
        [node("Relu", ["x"], ["r"]), node("Add", ["r", "w"], ["y"])], {"x": (3,)}, ["y"], {"w": drawn(3)}
    )
    graph = split(model, "small")
    graph.constants = _Watched(graph.constants)
    assert [graph.fresh_name(stem) for stem in ("x", "r", "w", "z", "z", "x")] == [
        "x_1",
        "r_1",
        "w_1",
        "z",
        "z_1",
        "x_2",
    ]
    assert graph.constants.looks == 1
    graph.model = onnx.ModelProto.FromString(graph.model.SerializeToString().replace(b"r", b"s"))
    assert graph.fresh_name("s") == "s_1"
