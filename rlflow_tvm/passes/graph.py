"""An immutable view of a detached function as a graph, and the splice that rewrites it.

Relax bindings themselves are the nodes; a rewrite shares every untouched binding with the graph it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import tvm
from tvm import relax

from rlflow_tvm.dataflow import Dataflow, Node, substitute, variables_of
from rlflow_tvm.errors import RewriteError

VARIABLES = (relax.Var, relax.DataflowVar)
"""The types of variables: asking for the type is faster than `isinstance`, where it is asked often."""


class Graph(Dataflow):
    """A function of one dataflow block with what matching and rewriting ask of it."""

    @cached_property
    def position(self) -> dict[relax.Var, int]:
        """Variable -> the index of the node that binds it."""
        return {node.var: i for i, node in enumerate(self.nodes)}

    def node(self, var: relax.Expr) -> Node | None:
        """The node that binds `var`; None for parameters and constants."""
        index = self.position.get(var) if type(var) in VARIABLES else None
        return None if index is None else self.nodes[index]

    @cached_property
    def operators(self) -> frozenset[str]:
        """What operators there are."""
        return frozenset(node.op for node in self.nodes)

    @cached_property
    def users(self) -> dict[relax.Var, tuple[Node, ...]]:
        """Variable -> the nodes that read it, in execution order."""
        users: dict[relax.Var, list[Node]] = {}
        for node in self.nodes:
            for var in node.reads:
                users.setdefault(var, []).append(node)
        return {var: tuple(nodes) for var, nodes in users.items()}

    @cached_property
    def weight_only(self) -> frozenset[relax.Var]:
        """Variables computed from weights alone: they cost nothing at run time."""
        known = set(self.params[self.inputs :])
        for node in self.nodes:
            if known.issuperset(node.inputs):
                known.add(node.var)
        return frozenset(known)

    def is_weight(self, expr: relax.Expr) -> bool:
        return expr in self.weight_only if type(expr) in VARIABLES else isinstance(expr, tvm.ir.GenericConst)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed at run time: the function returns its parameters, or work on weights, as is."""
        return not any(isinstance(n.value, relax.Call) and n.var not in self.weight_only for n in self.nodes)

    def live(self) -> Graph:
        """This graph without the nodes that its output does not need."""
        nodes = _live(list(self.nodes), self.output)
        if len(nodes) == len(self.nodes):
            return self
        return Graph(self.params, self.inputs, nodes, self.output, self.attrs, self.prim_funcs)

    def rewritten(self, roots: Mapping[relax.Var, relax.Expr], new: Iterable[Node]) -> Graph:
        """This graph with each root bound to (or replaced by) its new expression; a root given as itself stays.

        `new` holds the nodes that the new expressions need, root variables included where the root keeps its name.
        Dead nodes are dropped. RewriteError if the result would depend on itself.
        """
        replaced = {var: expr for var, expr in roots.items() if not expr.same_as(var)}
        added = {node.var: node for node in new}
        nodes: list[Node] = []
        pending = list(added.values())
        for node in self.nodes:
            if node.var in roots and pending:
                nodes += pending
                pending = []
            if node.var not in replaced and node.var not in added:
                nodes.append(node)
        output = self.output
        if replaced:
            nodes, output = _substitute_all(nodes, output, replaced)
        nodes = _live(_in_order(nodes), output)
        return Graph(self.params, self.inputs, nodes, output, self.attrs, self.prim_funcs)


def _substitute_all(
    nodes: list[Node], output: relax.Expr, replaced: dict[relax.Var, relax.Expr]
) -> tuple[list[Node], relax.Expr]:
    """Replace variables everywhere; an output variable keeps its name, and its replacement takes it on.

    A function's result must not be a dataflow variable, so where a dataflow variable replaces an output, the node
    that bound it binds the output's variable from now on.
    """
    outputs = set(variables_of(output))
    ends = {old: end_of(old, replaced) for old in replaced}
    renamed: dict[relax.Expr, relax.Var] = {}  # decided first: other variables may be replaced by the same node
    for old, new in ends.items():
        if old in outputs and isinstance(new, relax.DataflowVar):
            renamed.setdefault(new, old)
    mapping: dict[relax.Var, relax.Expr] = {new: old for new, old in renamed.items() if isinstance(new, relax.Var)}
    for old, new in ends.items():
        if not renamed.get(new, new).same_as(old):
            mapping[old] = renamed.get(new, new)
    builder = relax.BlockBuilder()
    result = []
    for node in nodes:
        touched = any(var in mapping for var in node.inputs)
        if touched or node.var in mapping:
            value = builder.normalize(substitute(node.value, mapping)) if touched else node.value
            var = mapping.get(node.var, node.var)
            if not isinstance(var, relax.Var):
                raise RewriteError(f"{node.var.name} would be bound to a constant")
            node = Node.of(var, value)
        result.append(node)
    return result, substitute(output, mapping)


def end_of(var: relax.Expr, replaced: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """What `var` is replaced by at last; RewriteError if there is no end."""
    for _ in replaced:
        var = replaced.get(var, var)
    if var in replaced:
        raise RewriteError(f"the rewrite would make {var.name} depend on itself")
    return var


def _live(nodes: list[Node], output: relax.Expr) -> list[Node]:
    """The nodes that the output needs, of nodes in execution order."""
    needed = set(variables_of(output))
    kept = []
    for node in reversed(nodes):
        if node.var in needed:
            needed.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _in_order(nodes: list[Node]) -> list[Node]:
    """`nodes` in execution order: as they are, unless a new node stands before one that it shares or joins."""
    position = {node.var: i for i, node in enumerate(nodes)}
    if all(position.get(var, -1) < i for i, node in enumerate(nodes) for var in node.inputs):
        return nodes
    return _sorted(nodes)


def _sorted(nodes: list[Node]) -> list[Node]:
    """Stable topological order; RewriteError if there is none."""
    by_var = {node.var: node for node in nodes}
    done: dict[relax.Var, Node | None] = {}
    for start in nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            if done.get(node.var) is not None:
                stack.pop()
                continue
            waiting = [by_var[var] for var in node.inputs if var in by_var and done.get(var) is None]
            if any(w.var in done for w in waiting):
                raise RewriteError(f"the rewrite would make {node.var.name} depend on itself")
            if waiting:
                done.setdefault(node.var, None)
                stack.append(waiting[0])
            else:
                done.pop(node.var, None)  # re-insert: the dictionary's order is the result's
                done[node.var] = node
                stack.pop()
    return [node for node in done.values() if node is not None]
