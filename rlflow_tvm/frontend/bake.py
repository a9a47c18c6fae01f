"""Constants in their final shape: what the importer computes from weights alone is evaluated with numpy, and
operators that change nothing are dropped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm.frontend.fold import MOST_REPEATED
from rlflow_tvm.frontend.inputs import numpy_dtype
from rlflow_tvm.ir import known_shape


def bake_constants(func: relax.Function) -> relax.Function:
    """Evaluate views and plain arithmetic of constants in `func`; take out views that leave shape and type alone.

    Only operators that are cheap in numpy are evaluated (the table in this file), so that no code is compiled.
    """
    return _Baker().visit_expr(func)


@relax.expr_functor.mutator
class _Baker(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
            return call
        if call.op.name == "relax.shape_of" and known_shape(call.args[0].ty) is not None:
            return call.args[0].ty.shape
        if not isinstance(call.ty, relax.TensorType) or known_shape(call.ty) is None:
            return call
        if call.op.name in _VIEWS and _leaves_alone(call):
            return call.args[0]
        evaluate = _NUMPY.get(call.op.name)
        if evaluate is None and call.op.name not in _BINARY:
            return call
        constants = [self._constant(arg) for arg in call.args]  # by reference: a table that ids index stays unread
        if evaluate is None or any(constant is None for constant in constants):
            return self._with_numbers(call, constants) if call.op.name in _BINARY else call
        if call.op.name == "relax.broadcast_to" and _bytes(call) > max(MOST_REPEATED, _bytes(call.args[0])):
            return call
        found = np.ascontiguousarray(evaluate(call, *map(_array, constants)))
        return relax.const(found.reshape(_extents(call)), _dtype(call))  # contiguity makes a scalar one-dimensional

    def _with_numbers(self, call: relax.Call, constants: list[relax.Expr | None]) -> relax.Expr:
        """Constants of one element as numbers without axes, by which rules know them, where no axis is lost with it."""
        rank = len(_extents(call))
        shapes = [_extents(arg) for arg in call.args]
        for i, constant in enumerate(constants):
            if constant is not None and math.prod(shapes[i]) == 1 and shapes[i] and len(shapes[1 - i]) == rank:
                number = relax.const(_array(constant).reshape(()), _dtype(call.args[i]))
                return self.builder_.normalize(relax.Call(call.op, [*call.args[:i], number, *call.args[i + 1 :]]))
        return call

    def _constant(self, expr: relax.Expr) -> relax.Expr | None:
        """What is known: a constant or a static shape, bound to a variable or not."""
        if isinstance(expr, relax.Var):
            bound = self.lookup_binding(expr)
            expr = expr if bound is None else bound
        if isinstance(expr, relax.ShapeExpr):
            return expr if all(isinstance(extent, tvm.tirx.IntImm) for extent in expr.values) else None
        return expr if isinstance(expr, tvm.ir.GenericConst) else None


def _array(constant: relax.Expr) -> np.ndarray:
    if isinstance(constant, relax.ShapeExpr):
        return np.array([int(extent) for extent in constant.values], np.int64)
    return constant.value.numpy()


def _leaves_alone(call: relax.Call) -> bool:
    data = call.args[0]
    shape = _extents(call)
    if shape != known_shape(data.ty) or _dtype(call) != _dtype(data):
        return False
    if call.op.name != "relax.permute_dims":
        return True
    return [a for a in _axes(call) if shape[a] != 1] == [a for a in range(len(shape)) if shape[a] != 1]


def _extents(expr: relax.Expr) -> tuple[int, ...]:
    shape = known_shape(expr.ty)
    assert shape is not None, "looked at in visit_call_"
    return shape


def _bytes(expr: relax.Expr) -> int:
    return math.prod(_extents(expr)) * numpy_dtype(_dtype(expr)).itemsize


def _dtype(expr: relax.Expr) -> str:
    return str(expr.ty.dtype.dtype)


def _axes(call: relax.Call) -> list[int]:
    rank = len(_extents(call))
    axes = call.attrs.axes
    return [int(a) % rank for a in axes] if axes is not None else list(range(rank))[::-1]


def _reshape(call: relax.Call, data: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return data.reshape(_extents(call))


def _permute(call: relax.Call, data: np.ndarray) -> np.ndarray:
    axes = _axes(call)
    if axes != [1, 0]:
        return data.transpose(axes)
    out = np.empty(data.shape[::-1], data.dtype)
    for row in range(0, len(data), _ROWS):  # by strips: four times as fast as numpy's own copy of a large matrix
        out[:, row : row + _ROWS] = data[row : row + _ROWS].T
    return out


def _take(call: relax.Call, data: np.ndarray, indices: np.ndarray) -> np.ndarray:
    axis = call.attrs.axis
    return np.take(data, indices, None if axis is None else int(axis), mode="wrap")


_ROWS = 64
_VIEWS = frozenset(
    {"relax.reshape", "relax.permute_dims", "relax.broadcast_to", "relax.squeeze", "relax.expand_dims", "relax.astype"}
)
_BINARY = frozenset(
    f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
)
_NUMPY: dict[str, Callable[..., Any]] = {
    "relax.reshape": _reshape,
    "relax.expand_dims": _reshape,
    "relax.squeeze": _reshape,
    "relax.permute_dims": _permute,
    "relax.shape_to_tensor": lambda _, shape: shape,
    "relax.take": _take,
    "relax.where": lambda _, condition, a, b: np.where(condition, a, b),
    "relax.less": lambda _, a, b: a < b,
    "relax.broadcast_to": lambda call, data, *_: np.broadcast_to(data, _extents(call)),
    "relax.astype": lambda call, data: data.astype(_dtype(call)),
    "relax.add": lambda _, a, b: a + b,
    "relax.subtract": lambda _, a, b: a - b,
    "relax.multiply": lambda _, a, b: a * b,
    "relax.divide": lambda _, a, b: a / b,
    "relax.sqrt": lambda _, a: np.sqrt(a),
    "relax.rsqrt": lambda _, a: 1 / np.sqrt(a),
    "relax.negative": lambda _, a: -a,
}
