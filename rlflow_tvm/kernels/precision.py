"""A model in half precision: for kernels on tensor cores. Not part of the pipeline: it changes what is computed."""

from __future__ import annotations

import ml_dtypes  # comes with onnx; registers bfloat16 with numpy
import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.errors import KernelError

DTYPES = ("float16", "bfloat16")

# Computed in float32 and rounded: they sum many terms, or leave the range of float16 on the way.
_WIDE = frozenset(
    {
        "relax.nn.softmax", "relax.nn.log_softmax", "relax.nn.layer_norm", "relax.nn.group_norm", "relax.nn.rms_norm",
        "relax.nn.instance_norm", "relax.nn.batch_norm", "relax.mean", "relax.sum", "relax.variance", "relax.std",
        "relax.exp", "relax.log", "relax.erf", "relax.power", "relax.nn.avg_pool2d", "relax.nn.adaptive_avg_pool2d",
        "relax.nn.avg_pool3d", "relax.nn.gelu", "relax.nn.gelu_tanh",
    }
)  # fmt: skip
_WIDE_DTYPE = "float32"


def to_half(mod: tvm.IRModule, dtype: str) -> tvm.IRModule:
    """`mod` (bound or working form, float32) with its activations and weights in `dtype`.

    Inputs and outputs keep their types. Operators that sum many terms or leave the range are computed in float32.
    KernelError for a `dtype` other than "float16" and "bfloat16".
    """
    if dtype not in DTYPES:
        raise KernelError(f"{dtype} is no half precision: there are {', '.join(DTYPES)}")
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

    def cast(self, func: relax.Function) -> relax.Function:
        params = [relax.Var(param.name, param.ty) for param in func.params]
        self._values.update(zip(func.params, params, strict=True))
        with self._builder.function("main", params):
            with self._builder.dataflow():
                for block in func.body.blocks:
                    for binding in block.bindings:
                        self._values[binding.var] = self._emit(binding.value)
                output = self._builder.emit_output(self._like(func.body.body))
            self._builder.emit_func_output(output)
        return self._builder.finalize()["main"].with_attrs(func.attrs)

    def _emit(self, value: relax.Expr) -> relax.Expr:
        if not isinstance(value, relax.Call):
            return self._builder.emit(self._argument(value, self._dtype))
        wide = value.op.name in _WIDE
        args = [self._argument(arg, _WIDE_DTYPE if wide else self._dtype) for arg in value.args]
        if value.op.name == "relax.astype" and str(value.attrs.dtype) == _WIDE_DTYPE:
            return self._builder.emit(relax.op.astype(args[0], self._dtype))
        call = self._builder.emit(relax.Call(value.op, args, value.attrs, value.ty_args))
        return self._to(call, self._dtype)

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

    def _like(self, output: relax.Expr) -> relax.Expr:
        """The function's result in the types that it had."""
        if isinstance(output, relax.Tuple):
            return relax.Tuple([self._like(field) for field in output.fields])
        value = self._values[output]
        return self._to(value, str(output.ty.dtype)) if isinstance(output.ty, relax.TensorType) else value


def _holds_floats(value: relax.Expr) -> bool:
    return isinstance(value.ty, relax.TensorType) and str(value.ty.dtype).startswith(("float", "bfloat"))


def _constant(constant: tvm.ir.GenericConst, dtype: str) -> tvm.ir.GenericConst:
    """A constant of floats in `dtype`; what is out of its range becomes its greatest number, as masks need."""
    if not _holds_floats(constant) or str(constant.ty.dtype) == dtype:
        return constant
    limit = float(ml_dtypes.finfo(dtype).max)
    values = np.clip(constant.value.numpy(), -limit, limit).astype(np.dtype(dtype))
    return relax.const(tvm.runtime.tensor(values), dtype)
