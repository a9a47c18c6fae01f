"""A model in half precision: for kernels on tensor cores. Not part of the pipeline: it changes what is computed."""

from __future__ import annotations

import ml_dtypes  # comes with onnx; registers bfloat16 with numpy
import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from rlflow_tvm.dataflow import variables_of
from rlflow_tvm.errors import KernelError

from .half import PRODUCTS, SUMS

DTYPES = ("float16", "bfloat16")

# Computed in float32 and rounded: they sum many terms, or leave the range of float16 on the way.
_WIDE = SUMS | {
    "relax.nn.batch_norm", "relax.exp", "relax.log", "relax.erf", "relax.power", "relax.nn.gelu", "relax.nn.gelu_tanh",
}  # fmt: skip
_WIDE_DTYPE = "float32"


def to_half(mod: tvm.IRModule, dtype: str) -> tvm.IRModule:
    """`mod` (bound or working form, float32) with its activations and weights in `dtype`.

    Inputs and outputs keep their types. Operators that sum many terms or leave the range are computed in float32, and
    so is what becomes an integer. KernelError for a `dtype` other than "float16" and "bfloat16", and for a module that
    holds float64.
    """
    if dtype not in DTYPES:
        raise KernelError(f"{dtype} is no half precision: there are {', '.join(DTYPES)}")
    if _holds_float64(mod["main"]):
        raise KernelError("the module holds float64, which nobody chooses for speed: cast it to float32 first")
    main = mod["main"]
    out = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    out["main"] = _Caster(dtype).cast(main)
    return out


class _Caster:
    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._builder = relax.BlockBuilder()
        self._values: dict[relax.Var, relax.Expr] = {}
        self._cast: dict[tuple[relax.Expr, str], relax.Expr] = {}
        self._exact: set[relax.Var] = set()

    def cast(self, func: relax.Function) -> relax.Function:
        self._exact = _become_integers(func)
        params = [relax.Var(param.name, param.ty) for param in func.params]
        self._values.update(zip(func.params, params, strict=True))
        with self._builder.function("main", params):
            with self._builder.dataflow():
                for block in func.body.blocks:
                    for binding in block.bindings:
                        self._values[binding.var] = self._emit(binding.value, binding.var in self._exact)
                output = self._builder.emit_output(self._like(func.body.body))
            self._builder.emit_func_output(output)
        return self._builder.finalize()["main"].with_attrs(func.attrs)

    def _emit(self, value: relax.Expr, exact: bool) -> relax.Expr:
        """`exact`: in float32, and left so."""
        if not isinstance(value, relax.Call):
            return self._builder.emit(self._argument(value, _WIDE_DTYPE if exact else self._dtype))
        wide = exact or value.op.name in _WIDE or _is_integer_cast(value)
        if value.op.name.startswith("relax.call_"):  # a kernel that the module brings along takes what it was made for
            args = [self._like(arg) for arg in value.args]
        else:
            args = [self._argument(arg, _WIDE_DTYPE if wide else self._dtype) for arg in value.args]
        if value.op.name == "relax.astype" and str(value.attrs.dtype) == _WIDE_DTYPE and not exact:
            return self._builder.emit(relax.op.astype(args[0], self._dtype))
        call = self._builder.emit(relax.Call(value.op, args, value.attrs, value.ty_args))
        return call if exact else self._to(call, self._dtype)

    def _argument(self, arg: relax.Expr, dtype: str) -> relax.Expr:
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([self._argument(field, dtype) for field in arg.fields])
        if isinstance(arg, relax.TupleGetItem):
            return relax.TupleGetItem(self._argument(arg.tuple_value, dtype), arg.index)
        if isinstance(arg, relax.Var) and not isinstance(arg, tvm.ir.GlobalVar):
            return self._to(self._values[arg], dtype)
        if isinstance(arg, tvm.ir.GenericConst):
            return _constant(arg, dtype)
        return arg

    def _to(self, value: relax.Expr, dtype: str) -> relax.Expr:
        """`value` in `dtype` if it is a tensor of floats, cast once."""
        if not _holds_floats(value) or str(value.ty.dtype) == dtype:
            return value
        key = (value, dtype)
        if key not in self._cast:
            self._cast[key] = self._builder.emit(relax.op.astype(value, dtype))
        return self._cast[key]

    def _like(self, expr: relax.Expr) -> relax.Expr:
        """What was `expr`, a result or an argument, in the types that it had."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._like(field) for field in expr.fields])
        known = isinstance(expr, relax.Var) and not isinstance(expr, tvm.ir.GlobalVar)
        return self._with_type(self._values[expr], expr.ty) if known else expr

    def _with_type(self, value: relax.Expr, ty: relax.Type) -> relax.Expr:
        """`value` in a type that differs from its own in kinds of floats alone."""
        if isinstance(ty, relax.TupleType) and not tvm_ffi.structural_equal(ty, value.ty):
            fields = (self._builder.emit(relax.TupleGetItem(value, i)) for i in range(len(ty.fields)))
            return relax.Tuple([self._with_type(*each) for each in zip(fields, ty.fields, strict=True)])
        return self._to(value, str(ty.dtype)) if isinstance(ty, relax.TensorType) else value


def _is_integer_cast(value: relax.Expr) -> bool:
    """Whether floats become integers: numbers of positions and buckets, of which half precision knows few."""
    if not isinstance(value, relax.Call) or value.op.name != "relax.astype" or not _holds_floats(value.args[0]):
        return False
    return "int" in str(value.attrs.dtype)


def _become_integers(func: relax.Function) -> set[relax.Var]:
    """The variables of floats that are cast to integers, and those (tuples too) that they are computed from, up to
    products."""
    found: set[relax.Var] = set()
    for block in reversed(func.body.blocks):
        for binding in reversed(block.bindings):
            value = binding.value
            product = isinstance(value, relax.Call) and value.op.name in PRODUCTS
            if _is_integer_cast(value) or (binding.var in found and not product):
                found.update(
                    arg for arg in variables_of(value) if _holds_floats(arg) or isinstance(arg.ty, relax.TupleType)
                )
    return found


def _holds_float64(func: relax.Function) -> bool:
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    tensors = [*func.params, *(binding.var for binding in bindings)]
    return any(isinstance(each.ty, relax.TensorType) and str(each.ty.dtype) == "float64" for each in tensors)


def _holds_floats(value: relax.Expr) -> bool:
    return isinstance(value.ty, relax.TensorType) and str(value.ty.dtype).startswith(("float", "bfloat"))


def _constant(constant: tvm.ir.GenericConst, dtype: str) -> tvm.ir.GenericConst:
    """A constant of floats in `dtype`; what is out of its range becomes its greatest number, as masks need."""
    if not _holds_floats(constant) or str(constant.ty.dtype) == dtype:
        return constant
    limit = float(ml_dtypes.finfo(dtype).max)
    values = np.clip(constant.value.numpy(), -limit, limit).astype(np.dtype(dtype))
    return relax.const(tvm.runtime.tensor(values), dtype)
