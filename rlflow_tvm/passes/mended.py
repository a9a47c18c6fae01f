"""Passes around TVM's own: where those need constants, end the process, or change what is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.errors import RewriteError


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.OnConstants")
class OnConstants:
    """Let `inner`, which looks for constants, see each weight of `main` as one, and put the weights back behind it.

    `inner` may build with constants, and join those that are equal, but not compute with them: what stands in for the
    weights are random numbers, unlike each other and all of the module's constants. Weights that are no floats, or for
    which there is no such number, stay parameters.
    """

    def __init__(self, inner: tvm.transform.Pass) -> None:
        self._inner = inner

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        func = mod["main"]
        weights = func.params[ir.num_inputs(func) :]
        stand_ins = _stand_ins(func, weights)
        seen = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
        seen["main"] = func.bind_params(stand_ins)
        made = self._inner(seen)
        after = made["main"]
        rest = iter(after.params)
        body = _WeightsBack({tensor.data_ptr(): weight for weight, tensor in stand_ins.items()}).visit_expr(after.body)
        made["main"] = relax.Function(
            [param if param in stand_ins else next(rest) for param in func.params],
            body, after.ret_ty, after.is_pure, func.attrs, after.span,
        )  # fmt: skip
        return made


def _stand_ins(func: relax.Function, weights: Sequence[relax.Var]) -> dict[relax.Var, tvm.runtime.Tensor]:
    """Numbers for the weights that are floats. Passes take constants of equal contents for one, so none begins as
    another, or as a constant of the function."""
    taken: set[tuple[tuple[int, ...], str, bytes]] = set()

    def is_new(array: np.ndarray) -> bool:
        known = len(taken)
        taken.add((array.shape, str(array.dtype), array.reshape(-1)[:_BEGINNING].tobytes()))
        return len(taken) > known

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType):
            is_new(expr.value.numpy())

    relax.analysis.post_order_visit(func, visit)
    rng = np.random.default_rng(0)
    found = {}
    for weight in weights:
        dtype = str(weight.ty.dtype)
        if "float" not in dtype:
            continue
        array = np.zeros([int(extent) for extent in weight.ty.shape.values], dtype)
        begin = array.reshape(-1)[:_BEGINNING]  # of large weights the rest need not be drawn
        for _ in range(_DRAWS):
            begin[:] = rng.random(begin.size)
            if is_new(array):
                found[weight] = tvm.runtime.tensor(array)
                break
    return found


_BEGINNING = 16  # elements
_DRAWS = 100  # of narrow types there are few numbers


@relax.expr_functor.mutator
class _WeightsBack(relax.PyExprMutator):
    def __init__(self, weights: dict[int, relax.Var]) -> None:
        super().__init__()
        self._weights = weights

    def visit_generic_const_(self, op: tvm.ir.GenericConst) -> relax.Expr:
        if not isinstance(op.ty, relax.TensorType):  # an element type is one too, as an operand
            return op
        return self._weights.get(op.value.data_ptr(), op)


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.ScalarsAsTensors")
class ScalarsAsTensors:
    """Make constants (of no dimension) of the bare numbers that elementwise operators take beside a tensor.

    `FoldBatchnormToConv2D` leaves such numbers, and on one `ConvertLayout` ends the process (segmentation fault).
    RewriteError for an operand that is neither a tensor nor a number written down.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        made = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
        made["main"] = _ScalarsAsTensors().visit_expr(mod["main"])
        return made


@relax.expr_functor.mutator
class _ScalarsAsTensors(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        return ir.of_tensors(super().visit_call_(call))


def convert_layout(data: str, kernel: str) -> tvm.transform.Pass:
    """TVM's `ConvertLayout` of two-dimensional convolutions, where it may not end the process; RewriteError as
    `ScalarsAsTensors`."""
    layouts = {"relax.nn.conv2d": [data, kernel]}
    return tvm.transform.Sequential([ScalarsAsTensors(), relax.transform.ConvertLayout(layouts)])


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.ForInference")
class ForInference:
    """`inner`, which takes each batch normalisation's moments from its operands; RewriteError where one of `main` is to
    take them from the batch (`training`)."""

    def __init__(self, inner: tvm.transform.Pass) -> None:
        self._inner = inner

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        def check(expr: relax.Expr) -> None:
            if isinstance(expr, relax.Call) and expr.op == _BATCH_NORM and expr.attrs["training"]:
                raise RewriteError("a batch normalisation of it is in training: import the model for inference")

        relax.analysis.post_order_visit(mod["main"], check)
        return self._inner(mod)


_BATCH_NORM = tvm.ir.Op.get("relax.nn.batch_norm")
