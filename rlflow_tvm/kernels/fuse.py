"""Fusing the calls of a legalised function: groups of operators become one PrimFunc each, each group fused once."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx

from .partition import OPAQUE, Node, partition
from .split import all_bindings, make_function, variables_of

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_NAME_ATTRS = ("global_symbol",)
_REMEMBERED = 50_000
_DIGITS = "0123456789"  # which make names of PrimFuncs unique
_LONGEST_NAME = 80


@dataclass(frozen=True)
class FusedCall:
    """One launch: the kernel's PrimFunc, its key and name, the variables it reads, and the binding it replaces last."""

    func: tirx.PrimFunc
    key: str
    name: str
    args: tuple[relax.Expr, ...]
    output: relax.Binding


@dataclass(frozen=True)
class _Call:
    """What fusion must know of a binding."""

    callee: str | None  # name of the PrimFunc that it calls; None: it is no call of one
    kind: int
    args: tuple[relax.Expr, ...]
    reads: tuple[relax.Var, ...]


class Fuser:
    """Fuses functions; remembers each group of operators that it has fused, over graphs."""

    def __init__(self) -> None:
        self._calls: dict[relax.Binding, _Call] = {}
        self._fused: dict[tuple, tuple[tirx.PrimFunc, str, str]] = {}

    def __call__(self, func: relax.Function, prim_funcs: dict[str, tirx.PrimFunc]) -> list[FusedCall | relax.Binding]:
        """The launches of `func` in order; bindings that launch no PrimFunc (reshapes, tuples) as they are.

        `prim_funcs`: the PrimFuncs that it calls, by name.
        """
        if len(self._calls) > _REMEMBERED:
            self._calls.clear()
        bindings = all_bindings(func)
        calls = [self._call(binding, prim_funcs) for binding in bindings]
        steps: list[FusedCall | relax.Binding] = []
        for members in partition(_nodes(func, bindings, calls)):
            last = bindings[members[-1]]
            if calls[members[-1]].callee is None:
                steps.append(last)
            else:
                steps.append(self._fuse([bindings[i] for i in members], [calls[i] for i in members], prim_funcs))
        return steps

    def _call(self, binding: relax.Binding, prim_funcs: dict[str, tirx.PrimFunc]) -> _Call:
        known = self._calls.get(binding)
        if known is not None:
            return known
        value = binding.value
        reads = tuple(variables_of(value))
        if isinstance(value, relax.Call) and value.op == _CALL_TIR:
            callee = value.args[0].name_hint
            attrs = prim_funcs[callee].attrs
            kind = int(attrs["op_pattern"]) if "op_pattern" in attrs else OPAQUE
            if not isinstance(binding.var.ty, relax.TensorType) or len(value.args) > 2:
                kind = OPAQUE  # several results, or shape arguments
            call = _Call(callee, kind, tuple(value.args[1]), reads)
        else:
            call = _Call(None, OPAQUE, (), reads)
        self._calls[binding] = call
        return call

    def _fuse(
        self, bindings: list[relax.Binding], calls: list[_Call], prim_funcs: dict[str, tirx.PrimFunc]
    ) -> FusedCall:
        """The launch of a group of bindings; the last one's variable is its result."""
        names = [call.callee for call in calls if call.callee is not None]
        if len(calls) == 1:
            callee, args = names[0], calls[0].args
            if (callee,) not in self._fused:
                self._fused[callee,] = (prim_funcs[callee], kernel_key(prim_funcs[callee]), callee.rstrip(_DIGITS))
            return FusedCall(*self._fused[callee,], args, bindings[-1])
        inside = {binding.var: i for i, binding in enumerate(bindings)}
        inputs: dict[relax.Expr, int] = {}
        signature: list[tuple] = []
        for call in calls:
            where: list[object] = []
            for arg in call.args:
                if isinstance(arg, relax.Var) and arg in inside:
                    where.append(("result", inside[arg]))
                else:
                    where.append(inputs.setdefault(arg, len(inputs)))
            signature.append((call.callee, tuple(where)))
        key = tuple(signature)
        if key not in self._fused:
            func = self._make(bindings, list(inputs), prim_funcs)
            name = "_".join(["fused", *(name.rstrip(_DIGITS) for name in names)])
            self._fused[key] = (func, kernel_key(func), name[:_LONGEST_NAME])
        return FusedCall(*self._fused[key], tuple(inputs), bindings[-1])

    @staticmethod
    def _make(
        bindings: list[relax.Binding], inputs: list[relax.Expr], prim_funcs: dict[str, tirx.PrimFunc]
    ) -> tirx.PrimFunc:
        """The group as one PrimFunc, made by `relax.transform.FuseTIR`; parameters in the order of `inputs`."""
        params = [relax.Var(f"p{i}", arg.ty) for i, arg in enumerate(inputs)]
        outer = [relax.Var(f"x{i}", arg.ty) for i, arg in enumerate(inputs)]
        renamed = dict(zip(inputs, params, strict=True))
        body: list[relax.Binding] = []
        for i, binding in enumerate(bindings):
            call = binding.value
            last = i == len(bindings) - 1
            var = (relax.Var if last else relax.DataflowVar)(f"y{i}", binding.var.ty)
            args = relax.Tuple([renamed[arg] for arg in call.args[1]])
            value = relax.Call(call.op, [call.args[0], args], call.attrs, call.ty_args)
            relax.expr._update_type(value, binding.var.ty)
            body.append(relax.VarBinding(var, value))
            renamed[binding.var] = var
        group = make_function(params, body, body[-1].var, 0).without_attr("num_input").without_attr("global_symbol")
        group = group.with_attr("Primitive", 1)
        builder = relax.BlockBuilder(
            tvm.IRModule({c.value.args[0]: prim_funcs[c.value.args[0].name_hint] for c in bindings})
        )
        callee = builder.add_func(group, "group")
        with builder.function("main", outer):
            with builder.dataflow():
                output = builder.emit_output(relax.Call(callee, outer))
            builder.emit_func_output(output)
        module = relax.transform.FuseTIR()(builder.finalize())
        return module["group"]


def _nodes(func: relax.Function, bindings: list[relax.Binding], calls: list[_Call]) -> list[Node]:
    """The graph of the bindings, as `partition` wants it."""
    index = {binding.var: i for i, binding in enumerate(bindings)}
    nodes = [Node(call.kind) for call in calls]
    for i, call in enumerate(calls):
        for var in call.reads:
            if var in index:
                source = nodes[index[var]]
                source.uses.append((i, call.kind))
    for var in variables_of(func.body.body):
        if var in index:
            nodes[index[var]].escapes = True
    return nodes


def kernel_key(func: tirx.PrimFunc) -> str:
    """The structural hash of `func` without its name attributes: 16 hexadecimal digits, the same in every process."""
    for attr in _NAME_ATTRS:
        if func.attrs is not None and attr in func.attrs:
            func = func.without_attr(attr)
    return f"{tvm_ffi.structural_hash(func) & 0xFFFFFFFFFFFFFFFF:016x}"
