"""Models out: names, numbers of outputs, shared constants, files; and whole models after random rewrites."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from small_models import LANES, MODELS, TARGET, bound, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm import comparison, ir
from rlflow_tvm.differences import range_error
from rlflow_tvm.errors import FrontendError, RewriteError, UsageError
from rlflow_tvm.exporting import export
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs, random_inputs, save_onnx, saved, to_onnx, zoo
from rlflow_tvm.frontend.random_network import random_network
from rlflow_tvm.kernels import as_target
from rlflow_tvm.kernels.precision import to_half
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search import random_action
from rlflow_tvm.search.settled import exhausted
from rlflow_tvm.verify import run_module

node = helper.make_node
TOLERANCE = 1e-4


def _rewritten(mod: tvm.IRModule, steps: int, seed: int = 0, lanes: int = LANES) -> GraphState:
    """After up to `steps` random moves."""
    rng = np.random.default_rng(seed)
    state = GraphState.from_module(mod, default_rules(lanes))
    for _ in range(steps):
        action = random_action(state, rng)
        try:
            state = state if action is None else state.apply(action)
        except RewriteError:
            continue
    return state


def _interface(model: onnx.ModelProto) -> tuple[list[tuple], list[tuple]]:
    def read(infos) -> list[tuple]:
        tensors = [(info.name, info.type.tensor_type) for info in infos]
        return [(name, ty.elem_type, tuple(d.dim_value for d in ty.shape.dim)) for name, ty in tensors]

    weights = {tensor.name for tensor in model.graph.initializer}
    return read(i for i in model.graph.input if i.name not in weights), read(model.graph.output)


def _assert_same_model(original: onnx.ModelProto, exported: onnx.ModelProto, seed: int = 0) -> None:
    """The interface of the original, and its outputs by ONNX Runtime; and imported again those by TVM."""
    onnx.checker.check_model(exported, full_check=True)
    inputs, outputs = _interface(exported)
    assert [name for name, *_ in outputs] == [info.name for info in original.graph.output]
    assert inputs == _interface(original)[0]
    drawn = random_inputs(from_onnx(original), seed)
    expected = onnxruntime_outputs(original, drawn)
    assert [(kind, shape) for _, kind, shape in outputs] == [
        (helper.np_dtype_to_tensor_dtype(array.dtype), array.shape) for array in map(np.asarray, expected)
    ]
    assert range_error(onnxruntime_outputs(exported, drawn), expected) < TOLERANCE
    again = from_onnx(exported)
    assert [p.name for p in again["main"].params] == list(drawn)
    assert range_error(run_module(again, as_target("llvm"), list(drawn.values())), expected) < TOLERANCE


_X, _W = (2, 8), np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
_GRAPHS: dict[str, tuple[list[onnx.NodeProto], list[str]]] = {
    "one": ([node("MatMul", ["gpu_0/x:0", "w"], ["t"]), node("Relu", ["t"], ["soft/max:0"])], ["soft/max:0"]),
    "behind an identity": ([node("Relu", ["gpu_0/x:0"], ["t"]), node("Identity", ["t"], ["y"])], ["y"]),
    "read inside too": ([node("Relu", ["gpu_0/x:0"], ["b"]), node("Exp", ["b"], ["a"])], ["b", "a"]),
    "twice": (
        [node("Relu", ["gpu_0/x:0"], ["a"]), node("Identity", ["a"], ["b"]), node("Identity", ["a"], ["c"])],
        ["b", "a", "c"],
    ),
    "equal": ([node("Relu", ["gpu_0/x:0"], ["a"]), node("Relu", ["gpu_0/x:0"], ["b"])], ["a", "b"]),
    "an input": ([node("Relu", ["gpu_0/x:0"], ["a"])], ["a", "gpu_0/x:0"]),
    "an input by another name": (
        [node("Relu", ["gpu_0/x:0"], ["a"]), node("Identity", ["gpu_0/x:0"], ["b"])],
        ["b", "a"],
    ),
    "nothing but inputs": ([node("Identity", ["gpu_0/x:0"], ["b"])], ["b"]),
    "a weight": ([node("Relu", ["gpu_0/x:0"], ["a"]), node("Identity", ["w"], ["b"])], ["a", "b"]),
    "of weights": ([node("Relu", ["gpu_0/x:0"], ["a"]), node("Softmax", ["w"], ["b"])], ["a", "b"]),
    "a number": ([node("ReduceSum", ["gpu_0/x:0"], ["a"], keepdims=0)], ["a"]),
    "some of a split": (
        [node("Split", ["gpu_0/x:0"], ["a", "b", "c", "d"], axis=1, num_outputs=4), node("Relu", ["c"], ["y"])],
        ["y", "b"],
    ),
    "named as nodes are": (
        [node("MatMul", ["gpu_0/x:0", "w"], ["constant0"]), node("Relu", ["constant0"], ["lv.nn.relu.Relu"])],
        ["lv.nn.relu.Relu", "constant0"],
    ),
}  # fmt: skip


def _model(nodes: list[onnx.NodeProto], outputs: list[str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("gpu_0/x:0", TensorProto.FLOAT, _X)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(_W, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("name", _GRAPHS)
def test_inputs_and_outputs_are_those_of_the_file(name: str) -> None:
    model = _model(*_GRAPHS[name])
    mod = from_onnx(model)
    exported = to_onnx(mod)
    _assert_same_model(model, exported)
    (opset,) = exported.opset_import
    assert (opset.domain, opset.version) == ("", 18)
    assert (exported.producer_name, exported.producer_version) == ("rlflow_tvm", "0.1.0")
    assert [output.name for output in exported.graph.output] == _GRAPHS[name][1]


@pytest.mark.parametrize("name", ["one", "twice", "some of a split"])
def test_names_outlive_rewriting_and_passes(name: str) -> None:
    model = _model(*_GRAPHS[name])
    for mod in (
        _rewritten(from_onnx(model), 6).bound(),
        comparison.cleaned(from_onnx(model)),
        comparison.cleaned(_rewritten(from_onnx(model), 6).bound()),
    ):
        _assert_same_model(model, to_onnx(mod))


def test_names_change_no_hash_and_no_plan() -> None:
    mod = from_onnx(zoo.load("demo"))
    plain = tvm.IRModule({"main": mod["main"]})
    assert mod.attrs is not None
    assert not plain.attrs
    rules = default_rules(LANES)
    assert GraphState.from_module(mod, rules).structural_hash == GraphState.from_module(plain, rules).structural_hash
    assert set(dict(mod["main"].attrs)) == {"global_symbol", "num_input"}
    state = _rewritten(mod, 5)
    assert GraphState.from_module(plain, rules).replay(state.plan).structural_hash == state.structural_hash


def test_module_of_another_origin() -> None:
    one = to_onnx(bound(module({"output": (3,)}, {}, lambda emit, output: rx.tanh(output))))
    assert [o.name for o in one.graph.output] == ["output_"]
    two = to_onnx(bound(module({"x": (3,)}, {}, lambda emit, x: (rx.tanh(x), rx.exp(x)))))
    assert [o.name for o in two.graph.output] == ["output_0", "output_1"]
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_allclose(onnxruntime_outputs(two, {"x": x}), [np.tanh(x), np.exp(x)], rtol=1e-6)


def test_a_constant_is_stored_once() -> None:
    def body(emit, x, w):
        y = emit(rx.matmul(x, w))
        half = relax.const(0.5)
        return rx.multiply(emit(rx.matmul(emit(rx.multiply(y, half)), w)), relax.const(0.5))

    model = to_onnx(bound(module({"x": (2, 8)}, {"w": (8, 8)}, body)))
    assert sorted(tuple(t.dims) for t in model.graph.initializer) == [(), (8, 8)]


def _outputs(mod: tvm.IRModule, seed: int) -> tuple[list[np.ndarray], list[np.ndarray], onnx.ModelProto]:
    model = to_onnx(mod)
    inputs = random_inputs(mod, seed)
    return onnxruntime_outputs(model, inputs), run_module(mod, TARGET, list(inputs.values())), model


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_small_models_after_random_rewrites(name: str, seed: int) -> None:
    mod = bound(MODELS[name](), seed)
    state = _rewritten(mod, 25, seed)
    assert len(state.actions) > 10
    found, expected, model = _outputs(mod, seed)
    after = onnxruntime_outputs(to_onnx(state.bound()), random_inputs(mod, seed))
    assert range_error(found, expected) < TOLERANCE
    assert range_error(after, expected) < TOLERANCE
    again = run_module(from_onnx(model), TARGET, list(random_inputs(mod, seed).values()))
    assert range_error(again, expected) < TOLERANCE


@pytest.mark.parametrize("seed", [2, 11])
def test_random_networks_after_random_rewrites(seed: int) -> None:
    model = random_network(seed)
    _assert_same_model(model, to_onnx(_rewritten(from_onnx(model), 12, seed).bound()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_types(dtype: str) -> None:
    mod = bound(MODELS["transformer_block"]())
    model = to_onnx(to_half(mod, dtype))
    kinds = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2}
    assert kinds == {helper.np_dtype_to_tensor_dtype(np.dtype(getattr(ml_dtypes, dtype, dtype)))}
    if dtype == "float16":  # ONNX Runtime has no kernels for the other
        inputs = random_inputs(mod, 0)
        expected = onnxruntime_outputs(to_onnx(mod), inputs)
        assert range_error(onnxruntime_outputs(model, inputs), expected) < 1e-2


def test_light_model_keeps_its_names_and_outputs() -> None:
    model = zoo.load("light_squeezenet")
    assert [name for name, *_ in _interface(model)[0]] == ["data_0"]
    _assert_same_model(model, to_onnx(_rewritten(from_onnx(model), 15, lanes=16).bound()))


@pytest.mark.parametrize("name", ["demo", "light_squeezenet"])
def test_network_in_blocks_is_written_without_them(name: str) -> None:
    model = zoo.load(name)
    start = GraphState.from_module(from_onnx(model), default_rules(16))
    state = exhausted(start, TERMINATING_FAMILIES["layout"])
    blocked = [b.value for b in ir.single_block(state.mod["main"]) if "conv2d" in str(getattr(b.value, "op", ""))]
    assert all("16c" in str(call.attrs.out_layout) for call in blocked[:-1])
    exported = to_onnx(state.bound())
    assert [n.op_type for n in exported.graph.node].count("Transpose") <= 1
    inputs = random_inputs(from_onnx(model), 0)
    assert range_error(onnxruntime_outputs(exported, inputs), onnxruntime_outputs(model, inputs)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", zoo.names())
def test_evaluation_models_after_random_rewrites(name: str, capsys) -> None:
    if name in zoo.TORCH_MODELS:
        pytest.importorskip("onnxscript")
        pytest.importorskip("transformers")
    path = zoo.path(name)
    model, mod = onnx.load(path, load_external_data=False), from_onnx(path)
    state = _rewritten(mod, 30, lanes=16)
    exported = to_onnx(state.bound())
    assert [o.name for o in exported.graph.output] == [o.name for o in model.graph.output]
    assert [i.name for i in exported.graph.input] == [name for name, *_ in _interface(model)[0]]
    inputs = random_inputs(mod, 0)
    expected = onnxruntime_outputs(str(path), inputs)
    error = range_error(onnxruntime_outputs(exported, inputs), expected)
    again = range_error(run_module(from_onnx(exported), as_target("llvm"), list(inputs.values())), expected)
    with capsys.disabled():
        operators = len(exported.graph.node)
        print(f"\n{name}: {len(state.actions)} rewrites, {operators} nodes, {error:.1e}, again {again:.1e}")
    assert error < TOLERANCE
    assert again < TOLERANCE


def test_large_weights_lie_beside(tmp_path) -> None:
    model = to_onnx(from_onnx(_model(*_GRAPHS["one"])))
    x = {"gpu_0/x:0": np.ones(_X, np.float32)}
    expected = onnxruntime_outputs(model, x)
    before = model.SerializeToString()
    save_onnx(model, tmp_path / "whole.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["whole.onnx"]
    path = tmp_path / "apart.onnx"
    path.write_text("an older one")
    large = helper.make_model(
        helper.make_graph(
            [node("Add", ["x", "a"], ["t"]), node("Add", ["t", "b"], ["u"]), node("Add", ["u", "c"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (700,))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, (700,))],
            [numpy_helper.from_array(np.arange(700, dtype=np.float32) + i, name) for i, name in enumerate("abc")],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    save_onnx(large, path, most_bytes=5000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["apart.onnx", "apart.onnx.data", "whole.onnx"]
    light = onnx.load(path, load_external_data=False)
    assert all(tensor.data_location == TensorProto.EXTERNAL for tensor in light.graph.initializer)
    onnx.checker.check_model(str(path))
    x700 = {"x": np.ones(700, np.float32)}
    np.testing.assert_array_equal(onnxruntime_outputs(str(path), x700), onnxruntime_outputs(large, x700))
    np.testing.assert_array_equal(run_module(from_onnx(path), TARGET, list(x700.values())), [3 * np.arange(700.0) + 4])
    assert model.SerializeToString() == before
    np.testing.assert_array_equal(onnxruntime_outputs(str(tmp_path / "whole.onnx"), x), expected)


def test_files_are_written_whole_or_not_at_all(tmp_path) -> None:
    model = to_onnx(from_onnx(_model(*_GRAPHS["one"])))
    path = tmp_path / "model.onnx"
    path.write_text("an older one")
    seen = []

    def refused() -> None:
        with saved(model, path) as temporary:
            seen.append(onnx.load(temporary))
            raise RewriteError("wrong")

    with pytest.raises(RewriteError, match="wrong"):
        refused()
    assert seen == [model]
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_text() == "an older one"
    with pytest.raises(FrontendError, match="cannot be written"):
        save_onnx(model, tmp_path / "nowhere" / "model.onnx")


def test_an_output_that_is_listed_twice(make_model, tmp_path) -> None:
    nodes = [helper.make_node(*each) for each in (("Relu", ["x"], ["a"]), ("Sigmoid", ["x"], ["b"]),
                                                  ("Identity", ["b"], ["c"]), ("Identity", ["x"], ["y"]))]  # fmt: skip
    names = ["b", "a", "c", "b", "y", "c", "y"]
    model, original = make_model(nodes, {"x": (2, 3)}, names), tmp_path / "original.onnx"
    onnx.save(model, original)
    assert export(from_onnx(model), tmp_path / "again.onnx", original) < TOLERANCE
    assert [output.name for output in onnx.load(tmp_path / "again.onnx").graph.output] == names


def _dynamic() -> tvm.IRModule:
    return module({"x": (tvm.tirx.Var("n", "int64"), 4)}, {}, lambda emit, x: rx.tanh(x))


def _prim_func() -> tvm.IRModule:
    return relax.transform.LegalizeOps()(bound(module({"x": (2, 3)}, {}, lambda emit, x: rx.tanh(x))))


def _nameless() -> tvm.IRModule:
    mod = tvm.IRModule()
    mod["other"] = module({"x": (3,)}, {}, lambda emit, x: rx.tanh(x))["main"].with_attr("global_symbol", "other")
    return mod


def _branching() -> tvm.IRModule:
    flag = relax.Var("flag", relax.TensorType((), "bool"))
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [flag, x]):
        builder.emit_func_output(builder.emit(relax.If(flag, rx.exp(x), rx.tanh(x))))
    return builder.get()


_REFUSED: dict[str, tuple[Callable[[], tvm.IRModule], type[Exception]]] = {
    "parameter w is a weight without a value": (
        lambda: module({"x": (2, 8)}, {"w": (8, 8)}, lambda emit, x, w: rx.matmul(x, w)), FrontendError,
    ),
    r"x is of type .*: only static shapes are exported": (_dynamic, FrontendError),
    "there is no exporter for call_tir of tir_tanh": (_prim_func, FrontendError),
    "the module has no function main": (_nameless, UsageError),
    "it holds If: only calls of operators": (_branching, FrontendError),
}  # fmt: skip


@pytest.mark.parametrize("message", _REFUSED)
def test_modules_that_cannot_be_exported(message: str) -> None:
    make, error = _REFUSED[message]
    with pytest.raises(error, match=message):
        to_onnx(make())


def test_operator_sets_that_there_are() -> None:
    mod = from_onnx(_model(*_GRAPHS["one"]))
    for opset in (17, 24):
        with pytest.raises(FrontendError, match=f"opset {opset}: models are exported at opset 18 to 23"):
            to_onnx(mod, opset=opset)
    assert ir.num_inputs(mod["main"]) == 1
