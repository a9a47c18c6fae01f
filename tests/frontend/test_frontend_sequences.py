"""Sequences of tensors: where it is known what they hold, nothing of them is left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from frontend_error import message
from onnx import TensorProto, helper
from small_weights import drawn

from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs

node = helper.make_node
_SPLIT = node("SplitToSequence", ["x"], ["s"], axis=1)
_PLACES = {"zero": np.array(0), "one": np.array(1), "last": np.array(-1), "first": np.array(-3)}
_CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    "at": ([_SPLIT, node("SequenceAt", ["s", "one"], ["y"])], {}),
    "at-from-the-end": ([_SPLIT, node("SequenceAt", ["s", "first"], ["y"])], {}),
    "unbound": (
        [node("SplitToSequence", ["x"], ["s"], axis=-2, keepdims=0), node("SequenceAt", ["s", "last"], ["y"])], {}
    ),
    "by-size": (
        [node("SplitToSequence", ["x", "n"], ["s"], axis=2), node("SequenceAt", ["s", "last"], ["y"])],
        {"n": np.array(3)},
    ),
    "by-sizes": (
        [node("SplitToSequence", ["x", "n"], ["s"], axis=-1), node("SequenceAt", ["s", "one"], ["y"])],
        {"n": np.array([1, 3, 0])},
    ),
    "whole": (
        [node("SplitToSequence", ["x", "n"], ["s"]), node("SequenceAt", ["s", "zero"], ["y"])], {"n": np.array([2])}
    ),
    "joined": ([_SPLIT, node("ConcatFromSequence", ["s"], ["y"], axis=-1)], {}),
    "stacked": (
        [
            node("SplitToSequence", ["x"], ["s"], axis=1, keepdims=0),
            node("ConcatFromSequence", ["s"], ["y"], axis=-1, new_axis=1),
        ],
        {},
    ),
    "twice": (
        [
            _SPLIT,
            node("SequenceAt", ["s", "last"], ["a"]),
            node("SplitToSequence", ["a"], ["t"], axis=2),
            node("ConcatFromSequence", ["t"], ["b"], axis=1),
            node("SequenceAt", ["s", "zero"], ["c"]),
            node("MatMul", ["c", "b"], ["y"]),
        ],
        {},
    ),
    "constructed": (
        [
            node("Relu", ["x"], ["r"]),
            node("SequenceConstruct", ["x", "r", "x"], ["s"]),
            node("ConcatFromSequence", ["s"], ["y"], axis=0, new_axis=1),
        ],
        {},
    ),
    "counted": (
        [
            _SPLIT,
            node("SequenceLength", ["s"], ["n"]),
            node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
            node("Mul", ["x", "f"], ["y"]),
        ],
        {},
    ),
    "inserted-and-erased": (
        [
            node("Relu", ["x"], ["r"]),
            node("Neg", ["x"], ["m"]),
            node("SequenceEmpty", [], ["s0"]),
            node("SequenceInsert", ["s0", "x"], ["s1"]),
            node("SequenceInsert", ["s1", "r"], ["s2"]),
            node("SequenceInsert", ["s2", "m", "last"], ["s3"]),
            node("SequenceInsert", ["s3", "r", "zero"], ["s4"]),
            node("SequenceErase", ["s4", "one"], ["s5"]),
            node("SequenceErase", ["s5"], ["s6"]),
            node("SequenceInsert", ["s6", "x"], ["s7"]),
            node("ConcatFromSequence", ["s7"], ["y"], axis=0),
        ],
        {},
    ),
}  # fmt: skip


def _read(nodes: Sequence[onnx.NodeProto], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in (_PLACES | weights).items() if any(name in n.input for n in nodes)}


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("name", sorted(_CASES))
def test_sequences(name: str, opset: int, make_model, run) -> None:
    nodes, weights = _CASES[name]
    model = make_model(nodes, {"x": (2, 3, 4)}, ["y"], _read(nodes, weights), opset)
    x = drawn(2, 3, 4)
    (expected,) = onnxruntime_outputs(model, {"x": x})
    for ours in (False, True):
        (found,) = run(from_onnx(model), {"x": x}, ours)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_list_that_a_loop_fills(make_model, run) -> None:
    """As TorchScript exports `append`."""
    tensors = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    body = helper.make_graph(
        [
            node("Gather", ["x", "i"], ["row"], axis=1),
            node("Exp", ["row"], ["e"]),
            node("SequenceInsert", ["before", "e"], ["after"]),
            node("Identity", ["on"], ["goes_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_value_info("before", tensors),
        ],
        [helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []), helper.make_value_info("after", tensors)],
    )
    nodes = [
        node("SequenceEmpty", [], ["s"]),
        node("Loop", ["n", "", "s"], ["t"], body=body),
        node("ConcatFromSequence", ["t"], ["y"], axis=1, new_axis=1),
    ]
    model = make_model(nodes, {"x": (2, 3, 4)}, ["y"], {"n": np.array(3)})
    x = drawn(2, 3, 4)
    (found,) = run(from_onnx(model), {"x": x})
    np.testing.assert_allclose(found, np.exp(x), rtol=1e-5)


_REFUSED = {
    "node 'it' (SequenceAt) uses place 3 of a sequence of 3": [
        _SPLIT, node("SequenceAt", ["s", "three"], ["y"], name="it")
    ],
    "node 'it' uses the operator SplitToSequence, which TVM cannot import": [
        node("SplitToSequence", ["x"], ["s"], name="it"),
        node("ArgMax", ["x"], ["a"], axis=0, keepdims=0),
        node("Slice", ["a", "zero1", "one1"], ["b"]),
        node("Slice", ["b", "zero1", "one1", "one1"], ["c"]),
        node("Squeeze", ["c"], ["d"]),
        node("SequenceAt", ["s", "d"], ["y"]),
    ],
    "node 'it' uses the operator SplitToSequence with parts of 4 in all of the 3 along axis 1": [
        node("Mul", ["two_two", "one1"], ["n"]),
        node("SplitToSequence", ["x", "n"], ["s"], axis=1, name="it"),
        node("SequenceAt", ["s", "zero"], ["y"]),
    ],
    "node 'it' uses the operator ConcatFromSequence of no tensors": [
        node("SequenceEmpty", [], ["s"]), node("ConcatFromSequence", ["s"], ["y"], axis=0, name="it")
    ],
}  # fmt: skip


@pytest.mark.parametrize("expected", sorted(_REFUSED))
def test_what_is_refused(expected: str, make_model) -> None:
    nodes = _REFUSED[expected]
    numbers = {"three": np.array(3), "two_two": np.array([2, 2]), "zero1": np.array([0]), "one1": np.array([1])}
    model = make_model(nodes, {"x": (2, 3, 4)}, ["y"], _read(nodes, numbers))
    assert expected in message(lambda: from_onnx(model))


def test_a_sequence_of_many_parts_is_refused(make_model) -> None:
    nodes = [node("SplitToSequence", ["x"], ["s"], name="it"), node("SequenceAt", ["s", "zero"], ["y"])]
    model = make_model(nodes, {"x": (1025, 1)}, ["y"], _read(nodes, {}))
    assert "node 'it' uses the operator SplitToSequence with 1025 parts" in message(lambda: from_onnx(model))
