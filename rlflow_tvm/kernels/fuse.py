"""Fusing the calls of a legalised function: groups of operators become one PrimFunc each, each group fused once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx

from rlflow_tvm.dataflow import Dataflow, Node, canonical
from rlflow_tvm.ir import CALL_IN_PLACE, IN_PLACE, known_shape

from .partition import OPAQUE, partition
from .split import make_function
from .unit_axes import without_unit_axes

_CALL_TIR = "relax.call_tir"
_NAME_ATTRS = ("global_symbol",)
_REMEMBERED = 50_000
_DIGITS = "0123456789"  # which make names of PrimFuncs unique
_LONGEST_NAME = 80


@dataclass(frozen=True)
class FusedCall:
    """One launch: the kernel's PrimFunc, its key and name, the values it reads, and the node it replaces last.

    `results`: how many tensors it writes.
    """

    func: tirx.PrimFunc
    key: str
    name: str
    args: tuple[relax.Expr, ...]
    output: Node
    results: int


@dataclass(frozen=True)
class _Call:
    """What fusion must know of a node."""

    callee: str | None  # name of the PrimFunc that it calls; None: it is no call of one
    kind: int
    args: tuple[relax.Expr, ...]
    size: int  # elements of its result; 0 where that is not known, or no one tensor


class Fuser:
    """Fuses functions; remembers each group of operators that it has fused, over graphs.

    `stretching`: whether an operator with a result larger than the product that it reads joins the product's kernel, as
    in TVM.
    """

    def __init__(self, stretching: bool = True) -> None:
        self._stretching = stretching
        self._calls: dict[Node, _Call] = {}
        self._groups: dict[tuple[Node, ...], FusedCall] = {}
        self._fused: dict[tuple, tuple[tirx.PrimFunc, str, str]] = {}

    def __call__(self, flow: Dataflow, prim_funcs: dict[str, tirx.PrimFunc]) -> list[FusedCall | Node]:
        """The launches of `flow` in order; nodes that launch no PrimFunc (reshapes, tuples) as they are.

        `prim_funcs`: the PrimFuncs that it calls, by name.
        """
        if len(self._calls) + len(self._groups) > _REMEMBERED:
            self._calls.clear()
            self._groups.clear()
        nodes = flow.nodes
        calls = [self._calls.get(node) or self._call(node, prim_funcs) for node in nodes]
        kinds = [call.kind for call in calls]
        if any(node.op in IN_PLACE for node in nodes):  # fusion could move a read behind the call that writes
            kinds = [OPAQUE] * len(kinds)
        steps: list[FusedCall | Node] = []
        uses, escaping = _uses(flow)
        stretched = () if self._stretching else _stretched(calls, uses)
        for members in partition(kinds, uses, escaping, stretched):
            last = members[-1]
            if calls[last].callee is None:
                steps.append(nodes[last])
                continue
            group = tuple([nodes[i] for i in members])
            fused = self._groups.get(group)
            if fused is None:
                fused = self._groups[group] = self._fuse(group, [calls[i] for i in members], prim_funcs)
            steps.append(fused)
        return steps

    def _call(self, node: Node, prim_funcs: dict[str, tirx.PrimFunc]) -> _Call:
        if node.op in (_CALL_TIR, CALL_IN_PLACE):
            value = node.value
            callee = value.args[0].name_hint
            attrs = prim_funcs[callee].attrs
            kind = int(attrs["op_pattern"]) if "op_pattern" in attrs else OPAQUE
            if not isinstance(node.var.ty, relax.TensorType) or len(value.args) > 2:
                kind = OPAQUE  # several results, or shape arguments
            args = (canonical(arg) if isinstance(arg, relax.Var) else arg for arg in value.args[1])
            shape = known_shape(node.var.ty)
            call = _Call(callee, kind, tuple(args), 0 if shape is None else math.prod(shape))
        else:
            call = _Call(None, OPAQUE, (), 0)
        self._calls[node] = call
        return call

    def _fuse(self, group: Sequence[Node], calls: list[_Call], prim_funcs: dict[str, tirx.PrimFunc]) -> FusedCall:
        """The launch of a group of nodes; the last one's variable is its result."""
        names = [call.callee for call in calls if call.callee is not None]
        if len(calls) == 1:
            callee, args = names[0], calls[0].args
            if (callee,) not in self._fused:
                self._fused[callee,] = (prim_funcs[callee], kernel_key(prim_funcs[callee]), _stem(callee))
            return FusedCall(*self._fused[callee,], args, group[-1], count_tensors(group[-1].var.ty))
        inside = {node.var: i for i, node in enumerate(group)}
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
            func = self._make(group, list(inputs), prim_funcs)
            name = "_".join(["fused", *map(_stem, names)])
            self._fused[key] = (func, kernel_key(func), name[:_LONGEST_NAME])
        return FusedCall(*self._fused[key], tuple(inputs), group[-1], count_tensors(group[-1].var.ty))

    @staticmethod
    def _make(members: Sequence[Node], inputs: list[relax.Expr], prim_funcs: dict[str, tirx.PrimFunc]) -> tirx.PrimFunc:
        """The group as one PrimFunc, made by `relax.transform.FuseTIR`; parameters in the order of `inputs`."""
        params = [relax.Var(f"p{i}", arg.ty) for i, arg in enumerate(inputs)]
        outer = [relax.Var(f"x{i}", arg.ty) for i, arg in enumerate(inputs)]
        renamed = dict(zip(inputs, params, strict=True))
        body: list[Node] = []
        for i, node in enumerate(members):
            call = node.value
            last = i == len(members) - 1
            var = (relax.Var if last else relax.DataflowVar)(f"y{i}", node.var.ty)
            args = relax.Tuple([renamed[arg] for arg in call.args[1]])
            value = relax.Call(call.op, [call.args[0], args], call.attrs, call.ty_args)
            relax.expr._update_type(value, node.var.ty)
            body.append(Node.of(var, value))
            renamed[node.var] = var
        group = (
            make_function(Dataflow(params, 0, body, body[-1].var))
            .without_attr("num_input")
            .without_attr("global_symbol")
        )
        group = group.with_attr("Primitive", 1)
        builder = relax.BlockBuilder(
            tvm.IRModule({c.value.args[0]: prim_funcs[c.value.args[0].name_hint] for c in members})
        )
        callee = builder.add_func(group, "group")
        with builder.function("main", outer):
            with builder.dataflow():
                output = builder.emit_output(relax.Call(callee, outer))
            builder.emit_func_output(output)
        module = relax.transform.FuseTIR()(builder.finalize())
        return module["group"]


def _stem(name: str) -> str:
    """The name of a PrimFunc before it was made unique."""
    return name.rstrip(_DIGITS) or name


def _uses(flow: Dataflow) -> tuple[list[list[int]], set[int]]:
    """For each node the numbers of those that read it, once for each operand, and the numbers of the outputs."""
    index = {node.var: i for i, node in enumerate(flow.nodes)}
    uses: list[list[int]] = [[] for _ in flow.nodes]
    for i, node in enumerate(flow.nodes):
        for var in node.inputs:
            source = index.get(var)
            if source is not None:
                uses[source].append(i)
    return uses, {index[var] for var in flow.outputs if var in index}


def _stretched(calls: Sequence[_Call], uses: Sequence[Sequence[int]]) -> set[int]:
    """The numbers of the calls that are read by one with a larger result."""
    return {i for i, readers in enumerate(uses) if any(calls[reader].size > calls[i].size > 0 for reader in readers)}


def count_tensors(ty: relax.Type) -> int:
    """How many tensors a value of this type holds."""
    if isinstance(ty, relax.TupleType):
        return sum(map(count_tensors, ty.fields))
    return int(isinstance(ty, relax.TensorType))


def kernel_key(func: tirx.PrimFunc) -> str:
    """The structural hash of `func` without its name attributes and `unit_axes`: 16 hexadecimal digits, the same in
    every process."""
    func = without_unit_axes(func)
    for attr in _NAME_ATTRS:
        if func.attrs is not None and attr in func.attrs:
            func = func.without_attr(attr)
    return f"{tvm_ffi.structural_hash(func) & 0xFFFFFFFFFFFFFFFF:016x}"
