"""Legalisation of matrix products for GPUs.

A right side that is a weight is transposed, once, at compile time: the rules fetch both factors along the reduced axis,
which then lies in memory order, and a product with one row becomes what dlight's rule for such products takes.
Half-precision products are summed in float32.
"""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx, topi

_OUT_ELEMENTWISE_FUSIBLE = 4  # TVM's OpPatternKind: element-wise operators behind the product go into its kernel
_HALF = frozenset({"float16", "bfloat16"})

PRODUCT_ATTRS = {"op_pattern": _OUT_ELEMENTWISE_FUSIBLE}


def sum_dtype(dtype: str) -> str:
    """The dtype in which products with a result of `dtype` are summed."""
    return "float32" if dtype in _HALF else dtype


def legalize_matmul(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.matmul` by TVM's legalisation, a half-precision result summed in float32 and then rounded."""
    legalize = call.op.get_attr("FLegalize")
    dtype = str(call.ty.dtype)
    if sum_dtype(dtype) == dtype:
        return legalize(bb, call)
    wide = bb.normalize(relax.op.matmul(*call.args, out_dtype=sum_dtype(dtype)))
    return bb.call_te(topi.cast, bb.emit(legalize(bb, wide)), dtype, primfunc_name_hint="round")


def legalize_weight_matmul(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """`relax.matmul` of a tensor and a matrix that is a weight, as the weight's transpose and a product with it."""
    left, right = call.args
    columns = bb.emit(bb.call_te(topi.transpose, right, [1, 0], primfunc_name_hint="transpose_weights"))
    dtype = str(call.ty.dtype)
    return bb.call_te(_product, left, columns, dtype, primfunc_name_hint="matmul", primfunc_attrs=PRODUCT_ATTRS)


def is_weight_product(call: relax.Call) -> bool:
    """Whether the right side is a matrix, all shapes being static (it must be a weight besides)."""
    shapes = [arg.ty.shape for arg in call.args]
    if not all(isinstance(s, relax.ShapeExpr) and all(isinstance(d, tirx.IntImm) for d in s.values) for s in shapes):
        return False
    return len(shapes[0].values) >= 2 and len(shapes[1].values) == 2


def _product(left: te.Tensor, columns: te.Tensor, dtype: str) -> te.Tensor:
    """left[..., k] times columns[n, k]."""
    k = te.reduce_axis((0, columns.shape[1]), "k")
    summed = sum_dtype(dtype)

    def element(*index: tirx.Var) -> tvm.ir.Expr:
        *row, n = index
        return te.sum(left[(*row, k)].astype(summed) * columns[n, k].astype(summed), axis=k)

    result = te.compute((*left.shape[:-1], columns.shape[0]), element, name="matmul")
    return result if summed == dtype else topi.cast(result, dtype)
