"""Work that needs the weights only, taken out of `main`, so that it is done once, when the model is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from rlflow_tvm.dataflow import Dataflow, Node, canonical, substitute
from rlflow_tvm.ir import known_shape

_REMEMBERED = 50_000


@dataclass(frozen=True)
class Split:
    """A function in working form, divided.

    `main`: `main(inputs..., weights..., derived...)`, the weights those that it reads itself.
    `early`: what is computed from `weights` alone, in order, and which variables among it `needed` by `main`.
    """

    main: Dataflow
    early: tuple[Node, ...]
    weights: tuple[relax.Var, ...]
    needed: tuple[relax.Var, ...]

    @property
    def weight_only(self) -> Dataflow | None:
        """`main(weights...) -> (derived...)`, or None where nothing depends on weights alone."""
        if not self.needed:
            return None
        return Dataflow(self.weights, 0, *_with_output([*self.early], relax.Tuple(self.needed)))

    @property
    def derived(self) -> tuple[str, ...]:
        """The names of main's trailing parameters, in the order of the tuple that `weight_only` returns."""
        return tuple(param.name for param in self.main.params[len(self.main.params) - len(self.needed) :])


class WeightSplitter:
    """Divides functions; remembers what it renamed: equal nodes stay the same objects from graph to graph."""

    def __init__(self) -> None:
        self._params: dict[relax.Var, relax.Var] = {}
        self._replaced: dict[tuple, Node] = {}

    def __call__(self, flow: Dataflow) -> Split:
        """Divide `flow`, dropping what is not used.

        After legalisation, so that what legalising makes of weights alone (their packing) is divided off too.
        """
        if len(self._params) + len(self._replaced) > _REMEMBERED:
            self._params.clear()
            self._replaced.clear()
        weights = flow.params[flow.inputs :]
        early: dict[relax.Var, Node] = {}
        constant = set(weights)
        runtime: list[Node] = []
        shapes: dict[relax.Var, relax.Expr] = {}
        for original in flow.nodes:
            node = self._replace(original, shapes) if shapes else original
            if node.op == "relax.shape_of" and _is_static(node):
                shapes[node.var] = node.value.args[0].ty.shape
            elif constant.issuperset(node.inputs):
                constant.add(node.var)
                early[node.var] = node
            else:
                runtime.append(node)
        if shapes:
            flow = Dataflow(flow.params, flow.inputs, flow.nodes, substitute(flow.output, shapes), flow.attrs)
        return self._assemble(flow, weights, early, runtime)

    def _assemble(
        self, flow: Dataflow, weights: tuple[relax.Var, ...], early: dict[relax.Var, Node], runtime: list[Node]
    ) -> Split:
        read = set(flow.outputs)
        live: list[Node] = []
        for node in reversed(runtime):
            if node.var in read:
                live.append(node)
                read.update(node.inputs)
        copied: list[Node] = []
        # a tuple or shape cannot be bound as a constant: main makes its own, from members that can
        for var in reversed(early):
            if var in read and not isinstance(var.ty, relax.TensorType):
                copied.append(early[var])
                read.update(early[var].inputs)
        needed = [var for var in early if var in read and isinstance(var.ty, relax.TensorType)]
        params = {var: self._derived(var) for var in needed}
        nodes = [self._replace(node, params) for node in (*reversed(copied), *reversed(live))]
        direct = [weight for weight in weights if weight in read]
        main = Dataflow(
            [*flow.params[: flow.inputs], *direct, *params.values()],
            flow.inputs,
            *_with_output(nodes, substitute(flow.output, params)),
        )
        return Split(main, tuple(early.values()), weights, tuple(needed))

    def _derived(self, var: relax.Var) -> relax.Var:
        """The parameter of `main` that holds the value of `var`."""
        known = self._params.get(var)
        if known is None:
            known = self._params[var] = canonical(relax.Var(var.name, var.ty))
        return known

    def _replace(self, node: Node, values: dict[relax.Var, relax.Expr]) -> Node:
        if values.keys().isdisjoint(node.inputs):
            return node
        hit = tuple(var for var in node.inputs if var in values)
        key = (node, hit, tuple(values[var] for var in hit))
        if key not in self._replaced:
            value = substitute(node.value, values)
            if isinstance(value, relax.Call):  # tuples and their members know their type
                relax.expr._update_type(value, node.var.ty)
            self._replaced[key] = Node.of(node.var, value)
        return self._replaced[key]


def _with_output(nodes: list[Node], output: relax.Expr) -> tuple[list[Node], relax.Expr]:
    """Nodes and output of a function: it is given a variable where it has none."""
    if isinstance(output, relax.Var) and not isinstance(output, relax.DataflowVar):
        return nodes, output
    result = relax.Var("output", output.ty)
    return [*nodes, Node.of(result, output)], result


def make_function(flow: Dataflow, name: str = "main") -> relax.Function:
    """`flow` as a function that TVM's passes take for an entry of a module, called `name`."""
    body = relax.SeqExpr(
        [relax.DataflowBlock([node.binding for node in flow.nodes])] if flow.nodes else [], flow.output
    )
    relax.expr._update_type(body, flow.output.ty)
    attrs = tvm.ir.make_node("ir.DictAttrs", global_symbol=name, num_input=flow.inputs)
    return relax.Function(list(flow.params), body, flow.output.ty, True, attrs)


def _is_static(node: Node) -> bool:
    """Whether the shape that a `shape_of` gives is known."""
    return known_shape(node.value.args[0].ty) is not None
