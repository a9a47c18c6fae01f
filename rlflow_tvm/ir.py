"""The two forms of a module, and the way between them.

*Bound*: `main` takes the real inputs, weights are constants (`tvm.ir.GenericConst`). This is what users hold.
*Detached* (the working form): weights are parameters behind the inputs, so that hashing, comparing and
splicing a function never reads weight data. `num_input` (TVM's own attribute) says where the inputs end.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from rlflow_tvm.errors import RewriteError, UsageError

CALL_IN_PLACE = "relax.call_tir_inplace"
IN_PLACE = {CALL_IN_PLACE, "relax.call_inplace_packed"}
"""What writes to its operands, though it may stand in a dataflow block."""
_SHORT = 1  # constants of one element stay in the body: rules read them, and they cost nothing to hash


@dataclass(frozen=True)
class Detached:
    """A module in the working form and the weights that were taken out of it (parameter name -> tensor)."""

    mod: tvm.IRModule
    weights: dict[str, tvm.runtime.Tensor]

    def bind(self, mod: tvm.IRModule | None = None) -> tvm.IRModule:
        """Put the weights back as constants, into `mod` (default: the module they came from)."""
        mod = self.mod if mod is None else mod
        func = mod["main"]
        by_name = {p.name: p for p in func.params}
        bound = func.bind_params({by_name[name]: tensor for name, tensor in self.weights.items() if name in by_name})
        out = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
        out["main"] = bound.with_attr("num_input", num_inputs(func))
        return out


def num_inputs(func: relax.Function) -> int:
    """How many leading parameters of `func` are real inputs (all of them without TVM's `num_input`)."""
    attrs = func.attrs
    return int(attrs["num_input"]) if attrs is not None and "num_input" in attrs else len(func.params)


def single_block(func: relax.Function) -> list[relax.Binding]:
    """The bindings of `func`, which must be one dataflow block (UsageError otherwise)."""
    body = func.body
    if isinstance(body, relax.SeqExpr) and not body.blocks:
        raise UsageError("function main has no operator in it (it returns its parameters): there is nothing to rewrite")
    if not _is_one_block(body):
        raise UsageError(
            "function main is not one dataflow block (control flow or impure calls in it): "
            "import it with rlflow_tvm.from_onnx, or run relax.transform.ConvertToDataflow first"
        )
    return list(body.blocks[0].bindings)


def _is_one_block(body: relax.Expr) -> bool:
    return isinstance(body, relax.SeqExpr) and len(body.blocks) == 1 and isinstance(body.blocks[0], relax.DataflowBlock)


def check_static(func: relax.Function) -> None:
    """UsageError for the first variable of `func` that has a shape which is not static."""
    for var in (*func.params, *(binding.var for binding in single_block(func))):
        if not is_static(var.ty):
            raise UsageError(
                f"{var.name} is of type {var.ty}, and only static shapes can be rewritten: import the model with "
                "from_onnx(..., shapes={...}), or run relax.transform.BindSymbolicVars first"
            )


def check_pure(func: relax.Function) -> None:
    """UsageError where a call of `func` writes to one of its operands, where a function is made or called within it, or
    where a type is asserted: of what such bindings read, or promise, rewrites know nothing."""
    for binding in single_block(func):
        value, name = binding.value, binding.var.name
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name in IN_PLACE:
            raise UsageError(
                f"{name} is written in place ({value.op.name}), and a rewrite could move what reads the tensor behind "
                "that: call the function with call_pure_packed or call_tir while searching"
            )
        if isinstance(value, relax.Function) or (isinstance(value, relax.Call) and isinstance(value.op, relax.Var)):
            raise UsageError(
                f"{name} is a function, or the result of one, that is made within main: run "
                "relax.transform.LambdaLift and InlinePrivateFunctions first"
            )
        if isinstance(binding, relax.MatchCast):
            raise UsageError(f"{name} is asserted to be of type {binding.ty} (match_cast): give its operand that type")


def is_static(ty: relax.Type) -> bool:
    """Whether all extents of tensors of the type are numbers."""
    if isinstance(ty, relax.TupleType):
        return all(is_static(field) for field in ty.fields)
    return not isinstance(ty, relax.TensorType) or known_shape(ty) is not None


def known_shape(ty: relax.Type) -> tuple[int, ...] | None:
    """The shape of a tensor's type; None where an extent is no number, or it is no tensor's."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    extents = list(ty.shape.values)
    return tuple(map(int, extents)) if all(isinstance(each, tvm.tirx.IntImm) for each in extents) else None


def extent_along(axis: str, ty: relax.Type, layout: str) -> int:
    """The extent of a tensor (of a known shape) along an axis of its layout, blocks included: along O of 64 in OIHW as
    in OIHW16o, of which the first axis has 4."""
    letters = zip(re.sub(r"\d", "", layout), known_shape(ty) or (), strict=True)
    return math.prod(extent for letter, extent in letters if letter.upper() == axis)


def main_of(mod: tvm.IRModule) -> relax.Function:
    """The function `main`; UsageError without one."""
    if "main" not in {gv.name_hint for gv in mod.get_global_vars()}:
        raise UsageError("the module has no function main: rename the entry function to main")
    return mod["main"]


def check_no_devices(mod: tvm.IRModule) -> None:
    """UsageError where tensors are placed on devices, which is told beside the functions."""
    if "vdevice" in mod.global_infos:
        raise UsageError(
            "the module places its tensors on virtual devices (vdevice), and what rewrites make is on none: give their "
            "types no device, or realize them after rewriting"
        )


def detach(mod: tvm.IRModule) -> Detached:
    """Bring `mod` into the working form; constants become parameters in the order of their first use.

    UsageError where `main` is not one dataflow block and cannot be made one, or tensors are placed on devices. It may
    have no block at all, if it returns parameters as they are.
    """
    func = main_of(mod)
    check_no_devices(mod)
    if not _is_one_block(func.body):
        mod = relax.transform.CanonicalizeBindings()(relax.transform.ConvertToDataflow(1)(mod))
        func = mod["main"]
    if func.body.blocks:
        single_block(func)
    lifter = _ConstantLifter({p.name for p in func.params})
    body = lifter.visit_expr(func.body)
    detached = relax.Function(
        [*func.params, *lifter.params.values()], body, func.ret_ty, func.is_pure, func.attrs, func.span
    ).with_attr("num_input", num_inputs(func))
    out = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
    out["main"] = detached
    return Detached(out, {lifter.params[c].name: c.value for c in lifter.params})


@relax.expr_functor.mutator
class _ConstantLifter(relax.PyExprMutator):
    def __init__(self, taken: set[str]) -> None:
        super().__init__()
        self.params: dict[tvm.ir.GenericConst, relax.Var] = {}
        self._taken = taken

    def visit_generic_const_(self, op: tvm.ir.GenericConst) -> relax.Expr:
        if not isinstance(op.ty, relax.TensorType):  # an element type is one too, as an operand
            return op
        count = 1
        for extent in op.value.shape:
            count *= extent
        if count <= _SHORT:
            return op
        if op not in self.params:
            name = f"w{len(self.params)}"
            while name in self._taken:
                name += "_"
            self.params[op] = relax.Var(name, op.ty)
        return self.params[op]


_BINARY = frozenset(
    f"relax.{name}"
    for name in (
        *("add", "divide", "equal", "floor_divide", "floor_mod", "greater", "greater_equal", "less", "less_equal"),
        *("maximum", "minimum", "mod", "multiply", "not_equal", "power", "subtract"),
    )
)


def of_tensors(call: relax.Call) -> relax.Call:
    """`call`, if of an elementwise operator that takes one beside a tensor, with constants of no dimension in the place
    of bare numbers (`relax.prim_value`), on which some of TVM's passes end the process. RewriteError for an operand
    that is neither a tensor nor a number written down."""
    if not isinstance(call.op, tvm.ir.Op) or call.op.name not in _BINARY:
        return call
    args = [
        relax.const(arg.value, str(other.ty.dtype)) if isinstance(arg, tirx.IntImm | tirx.FloatImm) else arg
        for arg, other in zip(call.args, reversed(call.args), strict=True)
    ]
    if not all(isinstance(arg.ty, relax.TensorType) for arg in args):
        raise RewriteError(f"{call.op.name} takes {args}, not all of which are tensors")
    return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)
