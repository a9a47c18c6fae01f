"""Control flow that depends on no data: the outputs that ONNX Runtime gives, without branches and loops."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_weights import drawn

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs
from rlflow_tvm.frontend.clean import clean
from rlflow_tvm.ir import detach

node = helper.make_node


def _graph(nodes: list[onnx.NodeProto], inputs: list, outputs: list, **weights: np.ndarray) -> onnx.GraphProto:
    """A branch or body; inputs and outputs: names of floats, or names and types of scalars."""

    def info(each: str | tuple[str, int]) -> onnx.ValueInfoProto:
        named = (each, TensorProto.FLOAT, None) if isinstance(each, str) else (*each, ())
        return helper.make_tensor_value_info(*named)

    infos = [[info(each) for each in names] for names in (inputs, outputs)]
    return helper.make_graph(nodes, "part", *infos, [numpy_helper.from_array(w, name) for name, w in weights.items()])


def _squeezed(value: str, result: str, stem: str) -> list[onnx.NodeProto]:
    """As TorchScript exports `value.squeeze(1)`."""
    taken = _graph([node("Squeeze", [value, "axis"], ["s"])], [], ["s"])
    other = _graph([node("Identity", [value], ["s"])], [], ["s"])
    return [
        node("Shape", [value], [f"{stem}.shape"]),
        node("Gather", [f"{stem}.shape", "axis"], [f"{stem}.extent"]),
        node("Equal", [f"{stem}.extent", "axis"], [f"{stem}.condition"]),
        node("If", [f"{stem}.condition"], [result], then_branch=taken, else_branch=other),
    ]


@pytest.mark.parametrize("extent", [1, 3])
def test_squeezes_of_torchscript(extent: int, make_model, run, operators) -> None:
    nodes = [*_squeezed("x", "a", "first"), node("Exp", ["a"], ["b"]), *_squeezed("b", "c", "second")]
    nodes.append(node("Relu", ["c"], ["y"]))
    # of a shape that it knows ONNX Runtime infers the branch that is not taken, and refuses it
    model = make_model(nodes, {"x": (2, "n", 4, 5)}, ["y"], {"axis": np.array([1])})
    mod = from_onnx(model, {"x": (2, extent, 4, 5)})
    assert operators(mod) == ["squeeze"] * (extent == 1) + ["exp", "nn.relu"]
    x = drawn(2, extent, 4, 5)
    for ours in (False, True):
        (found,), (expected,) = run(mod, {"x": x}, ours), onnxruntime_outputs(model, {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_branches_one_behind_the_other_are_taken_in_one_round(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    infer, calls = onnx.shape_inference.infer_shapes, []
    monkeypatch.setattr(
        onnx.shape_inference, "infer_shapes", lambda *args, **options: calls.append(1) or infer(*args, **options)
    )
    nodes = [each for i in range(20) for each in _squeezed(f"v{i}", f"v{i + 1}", f"s{i}")]
    model = make_model(nodes, {"v0": (2, 3, 4)}, ["v20"], {"axis": np.array([1])})
    assert not clean(model, "small").nodes
    assert len(calls) == 3


@pytest.mark.parametrize("chosen", [(True, True), (True, False), (False, True)])
def test_branches_within_branches_keep_their_names_apart(chosen, make_model, assert_imports_right) -> None:
    inner = {
        "then_branch": _graph([node("Mul", ["r", "w"], ["t"])], [], ["t"], w=drawn(3)),
        "else_branch": _graph([node("Sub", ["r", "w"], ["t1"])], [], ["t1"], w=drawn(3, seed=1)),
    }
    outer = {
        "then_branch": _graph([node("Exp", ["x"], ["r"]), node("If", ["d"], ["u"], **inner)], [], ["u"]),
        "else_branch": _graph([node("Neg", ["x"], ["r"])], [], ["r"]),
    }
    nodes = [
        node("If", ["c"], ["a"], **outer),
        node("If", ["c"], ["b"], **outer),
        node("Add", ["a", "b"], ["y"]),
    ]
    assert_imports_right(make_model(nodes, {"x": (3,)}, ["y"], {"c": np.array(chosen[0]), "d": np.array(chosen[1])}))


def test_a_branch_that_is_a_constant(make_model, assert_imports_right, operators) -> None:
    branch = {
        "then_branch": _graph([], [], ["w"], w=drawn(3)),
        "else_branch": _graph([node("Neg", ["x"], ["n"])], [], ["n"]),
    }
    nodes = [node("If", ["c"], ["a"], **branch), node("Mul", ["x", "a"], ["y"])]
    assert operators(assert_imports_right(make_model(nodes, {"x": (3,)}, ["y"], {"c": np.array(True)}))) == ["multiply"]


def _loop(condition: list[onnx.NodeProto], going: str, **weights: np.ndarray) -> onnx.NodeProto:
    """The state is scaled by 1 + the iteration's number; each is given beside the last."""
    nodes = [
        node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        node("Add", ["f", "one"], ["scale"]),
        node("Mul", ["state", "scale"], ["next"]),
        node("Neg", ["next"], ["turned"]),
        *condition,
    ]
    parameters = [("i", TensorProto.INT64), ("going", TensorProto.BOOL), "state"]
    body = _graph(nodes, parameters, [(going, TensorProto.BOOL), "next", "turned"], **weights)
    return node("Loop", ["count", "begin", "x"], ["y", "all"], body=body, name="loop")


_CONDITIONS = {
    "passed-on": ([node("Identity", ["going"], ["on"])], "on", {}),
    "cast": ([node("Cast", ["going"], ["on"], to=TensorProto.BOOL)], "on", {}),
    "constant": ([node("Constant", [], ["on"], value=numpy_helper.from_array(np.array(True)))], "on", {}),
    "weight": ([], "on", {"on": np.array(True)}),
    "outside": ([node("Identity", ["begin"], ["on"])], "on", {}),
}


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("name", sorted(_CONDITIONS))
def test_loops_are_unrolled(name: str, opset: int, make_model, assert_imports_right) -> None:
    condition, going, weights = _CONDITIONS[name]
    model = make_model(
        [_loop(condition, going, **weights)],
        {"x": (2, 3)},
        ["y", "all"],
        {"count": np.array(3), "begin": np.array(True), "one": np.float32(1)},
        opset,
    )
    assert_imports_right(model)


def test_a_loop_that_is_never_entered(make_model, assert_imports_right, operators) -> None:
    body = _graph(
        [node("Exp", ["s"], ["t"])],
        [("i", TensorProto.INT64), ("going", TensorProto.BOOL), "s"],
        [("going", TensorProto.BOOL), "t"],
    )
    nodes = [node("Loop", ["count", "begin", "x"], ["a"], body=body), node("Relu", ["a"], ["y"])]
    for count, begin in ((0, True), (3, False)):
        weights = {"count": np.array(count), "begin": np.array(begin)}
        assert operators(assert_imports_right(make_model(nodes, {"x": (3,)}, ["y"], weights))) == ["nn.relu"]


def test_a_loop_that_would_fill_the_memory(make_model) -> None:
    weights = {"count": np.array(2**40), "begin": np.array(True), "one": np.float32(1)}
    loop = _loop([node("Identity", ["going"], ["on"])], "on")
    with pytest.raises(FrontendError, match=rf"node 'loop' \(Loop\) is {2**40} times 5 nodes: more than 10000 are ref"):
        from_onnx(make_model([loop], {"x": (3,)}, ["y", "all"], weights))


def test_a_loop_that_hands_on_less_than_its_body_takes(make_model) -> None:
    loop = _loop([node("Identity", ["going"], ["on"])], "on")
    del loop.input[2:]
    weights = {"count": np.array(2), "begin": np.array(True), "one": np.float32(1)}
    with pytest.raises(FrontendError, match=r"\(Loop\) hands 0 values on to a body of .* the model is damaged"):
        from_onnx(make_model([loop], {"x": (3,)}, ["y", "all"], weights))


def test_a_long_loop_without_nodes(make_model) -> None:
    """It hands its state on; to do so for ever is refused too."""
    body = _graph([], [("i", TensorProto.INT64), ("going", TensorProto.BOOL), "s"], [("going", TensorProto.BOOL), "s"])
    loop = node("Loop", ["count", "begin", "x"], ["y"], body=body, name="loop")
    weights = {"count": np.array(2**40), "begin": np.array(True)}
    with pytest.raises(FrontendError, match=rf"\(Loop\) is {2**40} times 0 nodes: more than 10000 are refused"):
        from_onnx(make_model([loop], {"x": (3,)}, ["y"], weights))


def test_a_loop_that_data_end(make_model) -> None:
    ending = [node("ReduceMax", ["next"], ["most"], keepdims=0), node("Less", ["most", "one"], ["on"])]
    weights = {"count": np.array(3), "begin": np.array(True), "one": np.float32(1)}
    with pytest.raises(FrontendError, match="node 'loop' uses the operator Loop, control flow that depends on data"):
        from_onnx(make_model([_loop(ending, "on")], {"x": (3,)}, ["y", "all"], weights))


def test_branches_of_old_operator_sets_are_not_converted(make_model) -> None:
    branch = {
        "then_branch": _graph([node("Exp", ["x"], ["e"])], [], ["e"]),
        "else_branch": _graph([node("Neg", ["x"], ["n"])], [], ["n"]),
    }
    model = make_model([node("If", ["c"], ["y"], name="it", **branch)], {"x": (3,)}, ["y"], {"c": np.array(False)}, 10)
    with pytest.raises(FrontendError, match=r"node 'it' \(If\) holds a graph of operator set 10, which is not conv"):
        from_onnx(model)


def test_a_loops_weights_are_there_once(make_model, run) -> None:
    """Not once for each time that it goes round."""
    body = helper.make_graph(
        [node("MatMul", ["h", "w"], ["p"]), node("Tanh", ["p"], ["t"]), node("Identity", ["c"], ["d"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, ()),
            helper.make_tensor_value_info("c", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, (2, 40)),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, (2, 40)),
        ],
        [numpy_helper.from_array(drawn(40, 40), "w")],
    )
    weights = {"times": np.array(5), "on": np.array(True)}
    model = make_model([node("Loop", ["times", "on", "x"], ["y"], body=body)], {"x": (2, 40)}, ["y"], weights)
    mod = from_onnx(model)
    assert len(detach(mod).weights) == 1
    x = {"x": drawn(2, 40)}
    (found,), (expected,) = run(mod, x, ours=True), onnxruntime_outputs(model, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
