"""What is made of a model is held against it before it is written."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from small_models import TARGET

from rlflow_tvm.differences import TOLERANCE
from rlflow_tvm.errors import FrontendError, RewriteError
from rlflow_tvm.exporting import check_original, export, save_library
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.replay import compile


def test_a_wrong_model_is_not_written(make_model, tmp_path) -> None:
    original, weight = tmp_path / "original.onnx", np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Relu", ["t"], ["y"])]
    model = make_model(nodes, {"x": (2, 8)}, ["y"], {"w": weight})
    onnx.save(model, original)
    assert export(from_onnx(model), tmp_path / "right.onnx", original) < TOLERANCE
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight + 1, "w"))
    wrong = from_onnx(model)
    with pytest.raises(RewriteError, match="it was not written"):
        export(wrong, tmp_path / "wrong.onnx", original)
    with pytest.raises(RewriteError, match="it was not written"):
        save_library(compile(wrong, TARGET), wrong, tmp_path / "wrong.so", original)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["original.onnx", "right.onnx"]


def test_a_single_number_is_compared_for_many_inputs(make_model, tmp_path) -> None:
    """Nobody knows the range of one; a rewrite that rounds otherwise is right."""

    def made(shift: float, factor: float = 1.0) -> onnx.ModelProto:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["t"]),
            helper.make_node("Add", ["t", "b"], ["u"]),
            helper.make_node("Sub", ["u", "b"], ["y"]),
        ]
        weights = {"w": np.full((64, 1), factor, np.float32), "b": np.full(1, shift, np.float32)}
        return make_model(nodes, {"x": (1, 64)}, ["y"], weights)

    original = tmp_path / "original.onnx"
    onnx.save(made(0.0), original)
    assert 0 < export(from_onnx(made(1e4)), tmp_path / "right.onnx", original) < TOLERANCE
    with pytest.raises(RewriteError, match="it was not written"):
        export(from_onnx(made(0.0, 1.01)), tmp_path / "wrong.onnx", original)


@pytest.mark.parametrize("first", ["Log", "Sqrt"])
def test_outputs_that_are_not_finite_are_compared_on_other_inputs(first: str, make_model, tmp_path) -> None:
    """The root of a negative number is NaN, and a product spreads it: any two models would be equal."""

    def made(factor: float) -> onnx.ModelProto:
        nodes = [helper.make_node(first, ["x"], ["l"]), helper.make_node("MatMul", ["l", "w"], ["y"])]
        return make_model(nodes, {"x": (8, 64)}, ["y"], {"w": np.full((64, 2), factor, np.float32)})

    original = tmp_path / "original.onnx"
    onnx.save(made(1.0), original)
    assert export(from_onnx(made(1.0)), tmp_path / "right.onnx", original) < TOLERANCE
    with pytest.raises(RewriteError, match="it was not written"):
        export(from_onnx(made(7.0)), tmp_path / "wrong.onnx", original)


def test_what_is_never_finite_cannot_be_compared(make_model, tmp_path) -> None:
    nodes = [helper.make_node("Sub", ["x", "x"], ["z"]), helper.make_node("Div", ["z", "z"], ["y"])]
    model, original = make_model(nodes, {"x": (2, 3)}, ["y"]), tmp_path / "original.onnx"
    onnx.save(model, original)
    with pytest.raises(RewriteError, match=r"original\.onnx: 100 % of an output is NaN or infinite on random inputs"):
        export(from_onnx(model), tmp_path / "again.onnx", original)
    assert list(tmp_path.iterdir()) == [original]


def test_a_model_that_onnxruntime_refuses_is_named_before_anything_is_made_of_it(make_model, tmp_path) -> None:
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], kernel_shape=[2, 2], strides=[2, 2], pads=[1] * 4, ceil_mode=1),
        helper.make_node("Add", ["p", "w"], ["y"]),
    ]
    model = make_model(nodes, {"x": (1, 4, 3, 3)}, ["y"], {"w": np.zeros((4, 2, 2), np.float32)})
    mod, original = from_onnx(model), tmp_path / "original.onnx"
    onnx.save(model, original)
    with pytest.raises(FrontendError, match=r"ONNX Runtime cannot run .*original\.onnx"):
        check_original(mod, original)
