"""Cleaning of large models: what is looked at grows with the number of nodes, and not with its square."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import helper
from small_weights import drawn

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.clean import clean
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


@pytest.fixture
def inferences(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each inference of a model's shapes from now on, whether it propagates data."""
    calls: list[bool] = []
    infer = onnx.shape_inference.infer_shapes

    def noted(model: onnx.ModelProto, *, data_prop: bool, **options) -> onnx.ModelProto:
        calls.append(data_prop)
        return infer(model, data_prop=data_prop, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", noted)
    return calls


def test_shapes_that_onnx_does_not_propagate_are_inferred_layer_by_layer(make_model, inferences: list[bool]) -> None:
    nodes, value = [], "x"
    for i in range(20):
        nodes += [
            node("Shape", [value], [f"shape{i}"]),
            node("Slice", [f"shape{i}", "one", "two"], [f"width{i}"]),
            node("Div", [f"width{i}", "one"], [f"part{i}"]),
            node("Concat", ["minus", f"part{i}"], [f"target{i}"], axis=0),
            node("Reshape", [value, f"target{i}"], [f"reshaped{i}"]),
            node("Relu", [f"reshaped{i}"], [f"relu{i}"]),
        ]
        value = f"relu{i}"
    weights = {"one": np.array([1]), "two": np.array([2]), "minus": np.array([-1])}
    graph = clean(make_model(nodes, {"x": (2, 8)}, [value], weights), "small")
    assert [n.op_type for n in graph.nodes] == ["Reshape", "Relu"] * 20
    assert graph.shape(value) == (2, 8)
    assert len(inferences) == 3


def test_pools_beside_each_other_are_rewritten_at_once(make_model, inferences: list[bool]) -> None:
    def pool(value: str, result: str) -> onnx.NodeProto:
        window = dict(kernel_shape=[2, 2], strides=[2, 2], pads=[1] * 4)
        return node("MaxPool", [value], [result], ceil_mode=1, **window)

    nodes = [pool("x", f"a{i}") for i in range(20)] + [pool(f"a{i}", f"b{i}") for i in range(20)]
    graph = clean(make_model(nodes, {"x": (1, 1, 9, 9)}, [f"b{i}" for i in range(20)]), "small")
    assert {graph.shape(f"a{i}") for i in range(20)} == {(1, 1, 5, 5)}
    assert {graph.shape(f"b{i}") for i in range(20)} == {(1, 1, 3, 3)}
    assert len(inferences) == 4


def _range(make_model, end: int, given: str) -> onnx.ModelProto:
    """x + Range(0, end, 1), cast: its bounds are weights, nodes, or a product of weights."""
    bounds = {"start": np.array(0), "end": np.array(end), "step": np.array(1)}
    nodes = [
        node("Range", list(bounds), ["r"], name="it"),
        node("Cast", ["r"], ["c"], to=1),
        node("Add", ["x", "c"], ["y"]),
    ]
    if given == "nodes":
        nodes = [*(node("Constant", [], [name], value_int=int(value)) for name, value in bounds.items()), *nodes]
        return make_model(nodes, {"x": (1,)}, ["y"])
    if given == "product":
        bounds |= {"end": np.array(end // 4), "four": np.array(4)}
        nodes = [node("Mul", ["end", "four"], ["product"]), *nodes]
        nodes[1].input[1] = "product"
    return make_model(nodes, {"x": (1,)}, ["y"], bounds)


@pytest.mark.parametrize("given", ["weights", "nodes", "product"])
def test_a_range_that_would_fill_the_memory(given: str, make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    if given != "product":  # whose value ONNX does not propagate into the range
        monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *_, **__: pytest.fail("it was propagated"))
    with pytest.raises(FrontendError, match=rf"node 'it' \(Range\) makes a constant of shape \({2**62},\): more than"):
        clean(_range(make_model, 2**62, given), "small")


@pytest.mark.parametrize("given", ["weights", "nodes", "product"])
def test_a_long_range_is_not_propagated(given: str, make_model, inferences: list[bool]) -> None:
    graph = clean(_range(make_model, 2**17, given), "small")
    assert [n.op_type for n in graph.nodes] == ["Add"]
    assert graph.shape("y") == (2**17,)
    assert inferences[0] is (given == "product")


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_large_weights_of_integers_are_kept_aside(dtype: str, make_model, assert_imports_right) -> None:
    table = np.maximum(10 * drawn(2**21, 1), 0).astype(dtype)
    nodes = [node("Gather", ["w", "i"], ["g"]), node("Cast", ["g"], ["y"], to=1)]
    model = make_model(nodes, {"i": (5,)}, ["y"], {"w": table}, dtypes={"i": "int64"})
    skeleton, aside = clean(model, "small").skeleton()
    assert list(aside) == ["w"]
    assert skeleton.ByteSize() < 2**10
    assert_imports_right(model, given={"i": np.array([0, 1, 2, -1, 2**20])})
