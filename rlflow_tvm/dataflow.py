"""A function of one dataflow block as Python objects, each variable one and the same object wherever it stands.

TVM makes a new Python object at each access of an attribute. They compare equal, but to find that out takes a
dictionary forty times as long as to see that two objects are one: whoever goes over thousands of graphs reads a
binding once, as a `Node`, and hands nodes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self
from weakref import WeakValueDictionary

import tvm
import tvm_ffi
from tvm import relax, tirx

from rlflow_tvm.ir import num_inputs

_VARIABLES: WeakValueDictionary[int, relax.Var] = WeakValueDictionary()
"""Address of a variable -> the Python object that stands for it, as long as somebody holds that object."""


def canonical(var: relax.Var) -> relax.Var:
    """The Python object that stands for the variable: always the same one while it lives. Any other one is equal."""
    address = hash(var)
    known = _VARIABLES.get(address)
    if known is None:
        _VARIABLES[address] = known = var
    return known


def variables_of(value: relax.Expr) -> tuple[relax.Var, ...]:
    """The variables that a value in normal form reads, in order (calls, tuples and projections of variables)."""
    return tuple(_variables(value))


def _variables(value: relax.Expr) -> Iterator[relax.Var]:
    if isinstance(value, relax.Var):
        yield canonical(value)
    elif isinstance(value, relax.Call):
        for arg in value.args:
            yield from _variables(arg)
    elif isinstance(value, relax.Tuple):
        for field in value.fields:
            yield from _variables(field)
    elif isinstance(value, relax.TupleGetItem):
        yield from _variables(value.tuple_value)


def substitute(value: relax.Expr, mapping: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """`value` (in normal form) with variables replaced; new calls carry no type until they are given one."""
    if isinstance(value, relax.Var):
        return mapping.get(value, value)
    if isinstance(value, relax.Call):
        return relax.Call(value.op, [substitute(a, mapping) for a in value.args], value.attrs, value.ty_args)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([substitute(f, mapping) for f in value.fields])
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(substitute(value.tuple_value, mapping), value.index)
    return value


def all_bindings(func: relax.Function) -> list[relax.Binding]:
    """The bindings of a function without control flow, in order."""
    return [binding for block in func.body.blocks for binding in block.bindings]


@dataclass(frozen=True, eq=False)
class Node:
    """One binding: its variable, its value and the variables that the value reads (these and `var` canonical)."""

    binding: relax.VarBinding
    var: relax.Var
    value: relax.Expr
    inputs: tuple[relax.Var, ...]
    op: str  # Relax's operator name, "getitem" or "other"

    @staticmethod
    def of(var: relax.Var, value: relax.Expr, binding: relax.VarBinding | None = None) -> Node:
        if isinstance(value, relax.Call):
            op = value.op.name if isinstance(value.op, tvm.ir.Op) else "other"
        else:
            op = "getitem" if isinstance(value, relax.TupleGetItem) else "other"
        binding = relax.VarBinding(var, value) if binding is None else binding
        return Node(binding, canonical(var), value, variables_of(value), op)

    @cached_property
    def reads(self) -> tuple[relax.Var, ...]:
        """`inputs`, each once."""
        return tuple(dict.fromkeys(self.inputs))

    @cached_property
    def notes(self) -> dict[str, Any]:
        """Room for what is read off the node once and asked for often, by the reader's own keys."""
        return {}

    @cached_property
    def source(self) -> relax.Expr | None:
        """What an item is taken of, or a call's first argument (canonical); None where there is no such thing."""
        if self.op == "getitem":
            source = self.value.tuple_value
        elif isinstance(self.value, relax.Call) and self.value.args:
            source = self.value.args[0]
        else:
            return None
        return canonical(source) if isinstance(source, relax.Var) else source

    @cached_property
    def item(self) -> tuple[int, int]:
        """Of an item: its index, and how many the tuple has."""
        return self.value.index, len(self.value.tuple_value.ty.fields)


class Dataflow:
    """A function `main` of one dataflow block: parameters, nodes in execution order, what it returns. Immutable.

    `params`: canonical variables. `inputs`: how many of them, leading, are real inputs, the others being weights.
    `prim_funcs`: the PrimFuncs beside `main` in its module.
    """

    def __init__(
        self,
        params: Sequence[relax.Var],
        inputs: int,
        nodes: Sequence[Node],
        output: relax.Expr,
        attrs: object = None,
        prim_funcs: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc] | None = None,
    ) -> None:
        self.params, self.inputs, self.nodes, self.output = tuple(params), inputs, tuple(nodes), output
        self.attrs, self.prim_funcs = attrs, prim_funcs or {}

    @classmethod
    def from_function(
        cls, func: relax.Function, prim_funcs: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc] | None = None
    ) -> Self:
        """Read a function in the working form (see `rlflow_tvm.ir`)."""
        nodes = [Node.of(b.var, b.value, b) for b in all_bindings(func)]
        return cls(tuple(map(canonical, func.params)), num_inputs(func), nodes, func.body.body, func.attrs, prim_funcs)

    @classmethod
    def from_module(cls, mod: tvm.IRModule) -> Self:
        """Read a module in the working form."""
        others = {gv: func for gv, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
        return cls.from_function(mod["main"], others)

    @cached_property
    def outputs(self) -> tuple[relax.Var, ...]:
        """The variables that the function returns."""
        return variables_of(self.output)

    @cached_property
    def function(self) -> relax.Function:
        block = relax.DataflowBlock([node.binding for node in self.nodes])
        body = relax.SeqExpr([block], self.output)
        relax.expr._update_type(body, self.output.ty)
        return relax.Function(list(self.params), body, self.output.ty, True, self.attrs)

    @property
    def module(self) -> tvm.IRModule:
        """The function as `main` of a module, with its PrimFuncs beside it."""
        mod = tvm.IRModule(dict(self.prim_funcs))
        mod["main"] = self.function
        return mod

    @cached_property
    def structural_hash(self) -> int:
        """64-bit hash of the structure, the same in every process: operators, attributes, shapes and small constants,
        no weight values."""
        # what else the module holds counts by its name: by its address it would, as nothing here binds it
        return tvm_ffi.structural_hash(self.function, map_free_vars=self._names_others) & (2**64 - 1)

    @property
    def _names_others(self) -> bool:
        """Whether a node calls another function of the module."""
        calls = (node.value for node in self.nodes if isinstance(node.value, relax.Call))
        return any(isinstance(each, tvm.ir.GlobalVar) for call in calls for each in (call.op, *call.args))

    @property
    def structure(self) -> tuple[object, ...]:
        """What two equal functions have in common: the hash, and those of the PrimFuncs beside it."""
        return self.structural_hash, *((gv.name_hint, tvm_ffi.structural_hash(f)) for gv, f in self.prim_funcs.items())


@dataclass(frozen=True)
class Template:
    """What a node becomes: bindings over `params` (the variables that it reads, in order), the last its value."""

    params: tuple[relax.Var, ...]
    bindings: tuple[relax.VarBinding, ...]

    def in_place_of(self, node: Node, operands: Sequence[relax.Expr] | None = None) -> list[Node]:
        """The nodes that compute what `node` does; the last binds its variable, the others are named after it.

        `operands`: what `params` stand for, where that is not the variables alone.
        """
        return self.binding(node.var, node.inputs if operands is None else operands)

    def binding(self, result: relax.Var, operands: Sequence[relax.Expr]) -> list[Node]:
        """The nodes that compute the value of `operands`; the last binds `result`, the others are named after it."""
        values: dict[relax.Var, relax.Expr] = dict(zip(self.params, operands, strict=True))
        nodes: list[Node] = []
        for i, binding in enumerate(self.bindings):
            last, var = i == len(self.bindings) - 1, binding.var
            values[var] = result if last else relax.DataflowVar(f"{result.name}_{var.name}", var.ty)
            nodes.append(bound(values[var], substitute(binding.value, values), var.ty))
        return nodes


def bound(var: relax.Var, value: relax.Expr, ty: relax.Type) -> Node:
    """The node of a value of the type `ty`, which a new call does not know yet."""
    if isinstance(value, relax.Call):  # tuples and their members know their type
        relax.expr._update_type(value, ty)
    return Node.of(var, value)
