"""Legalisation: PrimFuncs that a module brings along, extrema of infinities, and operators without a kernel."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from small_models import TARGET, module
from tvm import relax, te
from tvm.relax import op as rx

from rlflow_tvm.errors import KernelError
from rlflow_tvm.kernels import Choice, Lowering, explain, extract_kernels, pipeline

_VECTOR = relax.TensorType((40,), "float32")


def _module(body, ty: relax.TensorType = _VECTOR) -> tvm.IRModule:
    x = relax.Var("x", ty)
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(body(builder, x))
        builder.emit_func_output(output)
    return builder.finalize()


def _run(mod: tvm.IRModule, x: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


def _plus(number: float):
    return lambda a: te.compute(a.shape, lambda i: a[i] + number, name="plus")


def test_a_modules_own_functions_are_kept_whatever_their_names() -> None:
    def body(builder, x):
        y = builder.emit_te(_plus(1.0), x, primfunc_name_hint="multiply")  # as our own is called
        y = builder.emit(rx.multiply(y, y))
        return builder.emit_te(_plus(2.0), y, primfunc_name_hint="multiply")

    mod = _module(body)
    x = np.random.default_rng(0).standard_normal(40).astype("float32")
    np.testing.assert_allclose(_run(mod, x), (x + 1) ** 2 + 2, rtol=1e-6)
    (kernel,) = extract_kernels(mod, TARGET)
    assert kernel.name == "fused_multiply_multiply_multiply", "they fuse like operators"


def test_functions_that_are_scheduled_are_left_alone() -> None:
    mod = _module(lambda builder, x: rx.exp(builder.emit_te(_plus(1.0), x, primfunc_name_hint="plus")))
    (name,) = {gv.name_hint for gv in mod.get_global_vars()} - {"main"}
    mod[name] = mod[name].with_attr("tirx.is_scheduled", True)
    assert [kernel.name for kernel in extract_kernels(mod, TARGET)] == ["plus", "tir_exp"]
    assert [row.rule for row in explain(mod, TARGET)] == ["scheduled by its writer", "elementwise"]


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_of_infinities(name: str, axis: int | None) -> None:
    sign = 1 if name == "max" else -1
    mod = _module(lambda _, x: getattr(rx, name)(x, axis), relax.TensorType((4, 70), "float32"))
    x = np.random.default_rng(0).standard_normal((4, 70)).astype("float32")
    x[1] = x[:, 3] = -sign * np.inf
    np.testing.assert_array_equal(_run(mod, x), getattr(np, name)(x, axis))
    np.testing.assert_array_equal(
        _run(mod, np.full_like(x, -sign * np.inf)), getattr(np, name)(np.full_like(x, -sign * np.inf), axis)
    )
    lowest = np.full_like(x, -sign * np.finfo("float32").max)
    np.testing.assert_array_equal(_run(mod, lowest), getattr(np, name)(lowest, axis))


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_extrema_keep_nan_wherever_it_stands(name: str, axis: int | None, dtype: str) -> None:
    mod = _module(lambda _, x: getattr(rx, name)(x, axis), relax.TensorType((4, 70), dtype))
    for column in (0, 31, 69):
        x = np.random.default_rng(0).standard_normal((4, 70)).astype(dtype)
        x[2, column] = np.nan
        np.testing.assert_array_equal(_run(mod, x), getattr(np, name)(x, axis))


def test_what_tvm_gives_in_another_type_is_cast() -> None:
    """Its mean of int32 is int64, where Relax says int32."""
    x = np.arange(12, dtype="int32").reshape(3, 4) - 3
    mean = np.array([-1, 2, 6], "int32")  # to zero
    ty = relax.TensorType((3, 4), "int32")
    for body, wanted in (
        (lambda _, x: rx.mean(x, axis=[1]), mean),
        (lambda builder, x: rx.multiply(y := builder.emit(rx.mean(x, axis=[1])), y), mean * mean),
    ):
        result = _run(_module(body, ty), x)
        assert result.dtype == np.int32
        np.testing.assert_array_equal(result, wanted)


def test_what_goes_wrong_in_a_choice_is_not_blamed_on_the_operator() -> None:
    def choose(_: Choice) -> str:
        raise BrokenPipeError("the worker is gone")

    given = module({"x": (1, 32, 28, 28), "w": (32, 32, 3, 3)}, {}, lambda _, x, w: rx.nn.conv2d(x, w, padding=1))
    known = tvm.IRModule({"main": given["main"].with_attr("num_input", 1)})
    with pytest.raises(BrokenPipeError, match="the worker is gone"):
        Lowering(TARGET, choose).launches(known)


def test_64_bit_numbers_are_not_narrowed_with_the_indices() -> None:
    def body(builder, x):
        whole = builder.emit(rx.astype(x, "int64"))
        return rx.astype(builder.emit(rx.floor_mod(whole, relax.const(2**32, "int64"))), "float32")

    x = np.array([1.5, -1.5, 2.0**33 + 2048.0, 7], "float32").repeat(10)
    np.testing.assert_array_equal(_run(_module(body), x), np.mod(x.astype("int64"), 2**32).astype("float32"))


def test_an_operator_without_a_kernel_is_named() -> None:
    mod = _module(lambda _, x: rx.power(x, x), relax.TensorType((4,), "int32"))
    with pytest.raises(
        KernelError, match=r"no kernel of relax\.power with operands \('int32', 4\).*power only applies"
    ):
        extract_kernels(mod, TARGET)


def test_an_operand_that_has_become_a_weight_is_asked_about_again() -> None:
    """One and the same binding: a rewrite elsewhere can turn what it reads into work on weights."""
    asked: list[bool] = []

    def choose(choice: Choice) -> str:
        asked.append(choice.weight)
        return choice.options[0].name

    def body(emit, x, w):
        return rx.nn.conv2d(x, w, padding=1)

    given = module({"x": (1, 32, 28, 28), "w": (32, 32, 3, 3)}, {}, body)
    known = tvm.IRModule({"main": given["main"].with_attr("num_input", 1)})
    lowering = Lowering(TARGET, choose)
    lowering.launches(given)
    assert True not in asked
    lowering.launches(known)
    assert True in asked
