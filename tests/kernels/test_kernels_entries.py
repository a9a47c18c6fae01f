"""Modules of more than `main`: several entries, PrimFuncs that they bring along, attributes, calls in place."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from kernel_checks import TARGET, graph, random_arrays
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from rlflow_tvm.errors import KernelError, UsageError
from rlflow_tvm.kernels import Lowering, as_target, explain, pipeline
from rlflow_tvm.passes import GraphState, default_rules

op = relax.op
CUDA = as_target({"kind": "cuda", "arch": "sm_90"})
X = np.linspace(-1, 1, 8, dtype="float32")


@I.ir_module
class Loops:
    """A PrimFunc without blocks, in C's manner; its extents have 32 bits."""

    @T.prim_func(private=True)
    def reversed(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        doubled = T.alloc_buffer((8,), "float32")
        for i in T.vectorized(8):
            doubled[i] = a[i] * T.float32(2)
        for i in range(8):
            b[i] = doubled[7 - i]

    @R.function
    def main(x: R.Tensor((8,), "float32")):
        cls = Loops
        with R.dataflow():
            y = R.exp(x)
            z = R.call_tir(cls.reversed, (y,), out_ty=R.Tensor((8,), "float32"))
            w = R.sqrt(z)
            R.output(w)
        return w


@I.ir_module
class Ragged:
    """Loops that run as far as others have come, and axes in another order than their loops, which a cut is in."""

    @T.prim_func(private=True, s_tir=True)
    def lower(a: T.Buffer((T.int64(64), T.int64(64)), "float32"), b: T.Buffer((T.int64(64), T.int64(64)), "float32")):
        for i in range(T.int64(64)):
            for j in range(i + T.int64(1)):
                with T.sblock("lower"):
                    vi = T.axis.spatial(T.int64(64), i)
                    vj = T.axis.spatial(T.int64(64), j)
                    b[vi, vj] = a[vi, vj]

    @T.prim_func(private=True, s_tir=True)
    def turned(a: T.Buffer((T.int64(64), T.int64(4)), "float32"), b: T.Buffer((T.int64(4), T.int64(64)), "float32")):
        for j, i in T.grid(T.int64(64), T.int64(4)):
            with T.sblock("turned"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = T.if_then_else(vj < T.int64(50), a[vj, vi], T.float32(0))

    @R.function
    def main(x: R.Tensor((64, 64), "float32"), y: R.Tensor((64, 4), "float32")):
        cls = Ragged
        with R.dataflow():
            z = R.call_tir(cls.lower, (x,), out_ty=R.Tensor((64, 64), "float32"))
            w = R.call_tir(cls.turned, (y,), out_ty=R.Tensor((4, 64), "float32"))
            both = (z, w)
            R.output(both)
        return both


@I.ir_module
class Named:
    """A PrimFunc whose name without its number is that of the entry, and one that is public with a number."""

    @T.prim_func(private=True, s_tir=True)
    def main1(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("plus"):
                v = T.axis.spatial(8, i)
                b[v] = a[v] + T.float32(1)

    @T.prim_func(s_tir=True)
    def twice2(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("twice"):
                v = T.axis.spatial(8, i)
                b[v] = a[v] * T.float32(2)

    @R.function
    def main(x: R.Tensor((8,), "float32")):
        cls = Named
        with R.dataflow():
            y = R.call_tir(cls.main1, (x,), out_ty=R.Tensor((8,), "float32"))
            z = R.exp(y)
            w = R.call_tir(cls.twice2, (z,), out_ty=R.Tensor((8,), "float32"))
            R.output(w)
        return w


@I.ir_module
class InPlace:
    """`y` is read before it is written to; what reads it could be fused with what reads the result."""

    @T.prim_func(private=True, s_tir=True)
    def add_to(a: T.Buffer((T.int64(8),), "float32"), b: T.Buffer((T.int64(8),), "float32")):
        for i in range(T.int64(8)):
            with T.sblock("add"):
                v = T.axis.spatial(T.int64(8), i)
                b[v] = a[v] + b[v]

    @R.function
    def main(x: R.Tensor((8,), "float32")):
        cls = InPlace
        with R.dataflow():
            y = R.exp(x)
            before = R.negative(y)
            z = R.call_tir_inplace(cls.add_to, (x, y), out_ty=R.Tensor((8,), "float32"), inplace_indices=[1])
            w = R.multiply(before, z)
            R.output(w)
        return w


@I.ir_module
class Scaled:
    """A PrimFunc that is called by its name alone, and takes a number."""

    @T.prim_func(s_tir=True)
    def rlflow_test_scale(a: T.Buffer((8,), "float32"), s: T.float32, b: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("scale"):
                v = T.axis.spatial(8, i)
                b[v] = a[v] * s

    @R.function
    def main(x: R.Tensor((8,), "float32")):
        with R.dataflow():
            z = R.exp(x)
            R.output(z)
        return z


@I.ir_module
class Unused:
    """A PrimFunc that is called by its name alone."""

    I.module_attrs({"mine": 7})

    @T.prim_func(s_tir=True)
    def rlflow_test_plus(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("plus"):
                v = T.axis.spatial(8, i)
                b[v] = a[v] + T.float32(1)

    @T.prim_func
    def rlflow_test_any(a: T.handle, b: T.handle, n: T.int64):
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        for i in range(n):
            B[i] = A[i]

    @R.function
    def main(x: R.Tensor((8,), "float32")):
        with R.dataflow():
            y = R.call_dps_packed("rlflow_test_plus", (x,), out_ty=R.Tensor((8,), "float32"))
            z = R.exp(y)
            R.output(z)
        return z


@I.ir_module
class Training:
    """A call with a gradient, which TVM's own pipelines cannot run either."""

    @T.prim_func(private=True, s_tir=True)
    def plus(a: T.Buffer((T.int64(8),), "float32"), b: T.Buffer((T.int64(8),), "float32")):
        for i in range(T.int64(8)):
            with T.sblock("plus"):
                v = T.axis.spatial(T.int64(8), i)
                b[v] = a[v] + T.float32(1)

    @R.function
    def main(x: R.Tensor((8,), "float32")):
        cls = Training
        with R.dataflow():
            y = R.call_tir_with_grad(cls.plus, (x,), out_ty=R.Tensor((8,), "float32"), te_grad_name="none")
            R.output(y)
        return y


def machine(mod: tvm.IRModule, how: object = None) -> relax.VirtualMachine:
    return relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=how or pipeline(TARGET)), tvm.cpu())


def run(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    return machine(mod)["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def two_entries(weights: list[np.ndarray], second: str = "decode") -> tvm.IRModule:
    """`main` and `second`: a dense layer each over weights of their own, transposed when they are compiled."""
    shapes = {"main": (16, 8), second: (1, 8)}
    mod = tvm.IRModule({}, attrs={"mine": 7})
    for (name, shape), weight in zip(shapes.items(), weights, strict=True):
        layer = graph(lambda x, w: op.exp(op.nn.relu(op.matmul(x, op.permute_dims(w)))), [shape, (4, 8)])["main"]
        layer = layer.bind_params({layer.params[1]: tvm.runtime.tensor(weight)}).without_attr("num_input")
        mod[name] = layer.with_attr("global_symbol", name)
    return mod


def expected(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.exp(np.maximum(x @ weight.T, 0))


def test_loops_without_blocks_run_as_they_were_written() -> None:
    np.testing.assert_allclose(run(Loops, X), np.sqrt(2 * np.exp(X))[::-1], rtol=1e-6)
    rows = {row.name: row.rule for row in explain(Loops, TARGET)}
    assert rows["reversed"] == "scheduled by its writer"


@pytest.mark.parametrize("target", [TARGET, CUDA], ids=["llvm", "cuda"])
def test_a_kernel_takes_no_name_of_an_entry(target: tvm.target.Target) -> None:
    functions = pipeline(target)(Named).functions_items()
    assert isinstance(Named["main"], relax.Function)
    names = [var.name_hint for var, _ in functions]
    assert names.count("main") == 1
    assert {"main1", "twice2"} <= set(names)
    tvm.compile(Named, target, relax_pipeline=pipeline(target))
    if target is TARGET:
        np.testing.assert_allclose(run(Named, X), 2 * np.exp(X + 1), rtol=1e-6)


@pytest.mark.parametrize("second", ["decode", "matmul", "main1"])
def test_all_entries_are_compiled(second: str) -> None:
    weights = random_arrays([(4, 8), (4, 8)], seed=1)
    mod = two_entries(weights, second)
    before = tvm_ffi.structural_hash(mod)
    compiled = machine(mod)
    for name, x, weight in zip(("main", second), random_arrays([(16, 8), (1, 8)]), weights, strict=True):
        got = compiled[name](tvm.runtime.tensor(x)).numpy()
        np.testing.assert_allclose(got, expected(x, weight), rtol=1e-5)
        theirs = machine(mod, relax.get_pipeline("default_build"))[name](tvm.runtime.tensor(x)).numpy()
        np.testing.assert_allclose(got, theirs, rtol=1e-5)
    assert tvm_ffi.structural_hash(mod) == before


def test_no_entry_need_be_called_main() -> None:
    weights = random_arrays([(4, 8), (4, 8)], seed=1)
    mod = two_entries(weights)
    mod = tvm.IRModule({"prefill": mod["main"].with_attr("global_symbol", "prefill"), "decode": mod["decode"]})
    compiled = machine(mod)
    for name, x, weight in zip(("prefill", "decode"), random_arrays([(16, 8), (1, 8)]), weights, strict=True):
        np.testing.assert_allclose(compiled[name](tvm.runtime.tensor(x)).numpy(), expected(x, weight), rtol=1e-5)
    private = tvm.IRModule({"prefill": mod["prefill"].without_attr("global_symbol")})
    with pytest.raises(UsageError, match="no function main"):
        pipeline(TARGET)(private)


def test_equal_kernels_of_several_entries_are_compiled_once() -> None:
    same = graph(lambda x: op.nn.softmax(x), [(3, 5)])
    mod = tvm.IRModule({name: same["main"].with_attr("global_symbol", name) for name in ("main", "again")})
    kernels = [var for var, func in pipeline(TARGET)(mod).functions_items() if isinstance(func, relax.ExternFunc)]
    assert len(kernels) == 1
    tvm.compile(mod, CUDA, relax_pipeline=pipeline(CUDA))


def test_entry_that_cannot_be_compiled_is_named() -> None:
    mod = two_entries(random_arrays([(4, 8), (4, 8)]))
    mod["decode"] = graph(lambda x: op.ewise_fma(x, x, x), [(2, 3)])["main"].with_attr("global_symbol", "decode")
    with pytest.raises(KernelError, match=r"function decode.*relax\.ewise_fma") as caught:
        pipeline(TARGET)(mod)
    assert "\n" not in str(caught.value)


def test_work_on_weights_divided_off_by_tvm_is_an_entry() -> None:
    """`LiftTransformParams` makes a second function, from a tuple of weights to a tuple."""
    mod = graph(lambda x, w: op.matmul(x, op.permute_dims(w)), [(2, 8), (4, 8)], weights=1)
    lifted = relax.transform.LiftTransformParams()(mod)
    assert "main_transform_params" in {var.name_hint for var in lifted.get_global_vars()}
    x, w = random_arrays([(2, 8), (4, 8)])
    compiled = machine(lifted)
    made = compiled["main_transform_params"]([tvm.runtime.tensor(w)])
    np.testing.assert_allclose(compiled["main"](tvm.runtime.tensor(x), *made).numpy(), x @ w.T, rtol=1e-4, atol=1e-5)


def test_attributes_and_functions_called_by_name_are_kept() -> None:
    built = pipeline(TARGET)(Unused)
    assert built.attrs["mine"] == 7
    names = {var.name_hint for var in built.get_global_vars()}
    assert {"rlflow_test_plus", "rlflow_test_any"} <= names
    np.testing.assert_allclose(run(Unused, X), np.exp(X + 1), rtol=1e-6)
    assert pipeline(CUDA)(two_entries(random_arrays([(4, 8), (4, 8)]))).attrs["mine"] == 7


def test_a_gpu_has_no_threads_for_them() -> None:
    with pytest.raises(KernelError, match=r"rlflow_test_any has symbolic extents .* schedule it"):
        pipeline(CUDA)(Unused)


def test_a_number_among_the_parameters() -> None:
    built = pipeline(TARGET)(Scaled)
    assert "rlflow_test_scale" in {var.name_hint for var in built.get_global_vars()}
    np.testing.assert_allclose(run(Scaled, X), np.exp(X), rtol=1e-6)


def test_nothing_is_rewritten_round_a_call_in_place() -> None:
    with pytest.raises(UsageError, match=r"written in place .* call_tir while searching"):
        GraphState.from_module(InPlace, default_rules(16))


def test_code_that_was_linked_before_is_kept() -> None:
    inner = pipeline(TARGET)(graph(op.nn.softmax, [(3, 5)]))
    mod = graph(op.exp, [(3, 5)]).with_attr("external_mods", list(inner.attrs["external_mods"]))
    assert len(pipeline(TARGET)(mod).attrs["external_mods"]) == len(inner.attrs["external_mods"]) + 1


def test_call_in_place() -> None:
    np.testing.assert_allclose(run(InPlace, X), -np.exp(X) * (X + np.exp(X)), rtol=1e-6)
    (launch,) = [each for each in Lowering(TARGET).launches(InPlace).launches if each.name == "add_to"]
    assert len(launch.operands) == 2


def test_call_in_place_does_not_write_to_weights() -> None:
    main = InPlace["main"].with_attr("num_input", 0)
    mod = tvm.IRModule({**dict(InPlace.functions_items())})
    mod["main"] = main.bind_params({main.params[0]: tvm.runtime.tensor(X)})
    np.testing.assert_allclose(run(mod), -np.exp(X) * (X + np.exp(X)), rtol=1e-6)
    shifted = InPlace.clone()
    x, y = (relax.Var(name, relax.TensorType((8,), "float32")) for name in "xy")
    builder = relax.BlockBuilder(shifted)
    with builder.function("other", [x, y], {"num_input": 1}):
        with builder.dataflow():
            call = op.call_tir_inplace(shifted.get_global_var("add_to"), [x, y], [1], [x.ty])
            output = builder.emit_output(call)
        builder.emit_func_output(output)
    shifted = builder.get()
    shifted = tvm.IRModule({"add_to": shifted["add_to"], "main": shifted["other"].with_attr("global_symbol", "main")})
    with pytest.raises(KernelError, match="add_to writes in place to a weight"):
        Lowering(TARGET).lower(shifted)


def test_calls_that_differ_in_their_results_type_alone_stay_apart() -> None:
    @tvm.register_global_func("rlflow_test_count", override=True)
    def count(_x, out):
        out.copyfrom(np.arange(out.shape[0], dtype="float32"))

    def counted(x):
        found = [op.call_dps_packed("rlflow_test_count", relax.Tuple([x]), relax.TensorType((n,), "float32"))
                 for n in (3, 8)]  # fmt: skip
        return relax.Tuple(found)

    few, many = machine(graph(counted, [(8,)]))["main"](tvm.runtime.tensor(X))
    assert few.numpy().tolist() == [0, 1, 2]
    assert many.numpy().tolist() == list(range(8))


def test_call_for_training_is_refused() -> None:
    with pytest.raises(KernelError, match="call_tir_with_grad"):
        pipeline(TARGET)(Training)


def test_loops_that_hang_on_others_are_left_as_they_are() -> None:
    x, y = random_arrays([(64, 64), (64, 4)])
    executable = tvm.compile(Ragged, TARGET, relax_pipeline=pipeline(TARGET))
    lower, turned = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, (x, y)))
    rows, columns = np.tril_indices(64)  # the others are written by nobody
    np.testing.assert_array_equal(lower.numpy()[rows, columns], x[rows, columns])
    np.testing.assert_array_equal(turned.numpy(), np.where(np.arange(64) < 50, y.T, 0))
