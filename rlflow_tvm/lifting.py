"""Operators of one or three dimensions as two-dimensional ones, and what stands between them.

What is known of convolutions (implementations, schedules, packed weights, layouts) is known of two-dimensional ones. So
others are lifted to images: a convolution, a pool, and the element-wise operators behind them, which would not be fused
across the way back, up to the first operator that wants the tensor as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from tvm import relax

from rlflow_tvm.dataflow import Dataflow, Node, substitute
from rlflow_tvm.ir import known_shape

ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        *("abs", "add", "astype", "ceil", "clip", "cos", "divide", "equal", "erf", "exp", "floor", "greater"),
        *("greater_equal", "less", "less_equal", "log", "logical_and", "logical_not", "logical_or", "maximum"),
        *("minimum", "multiply", "negative", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.silu"),
        *("not_equal", "power", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "subtract", "tanh"),
        "where",
    )
)
CONCAT = "relax.concat"
_REMEMBERED = 50_000


class Lifter(ABC):
    """Lifts functions in working form; remembers what it made: equal nodes stay the same objects over graphs."""

    def __init__(self) -> None:
        self._made: dict[tuple, tuple[Node, ...]] = {}

    def __call__(self, flow: Dataflow) -> Dataflow:
        """`flow` without the operators that are lifted, as far as shapes and layouts are known; it computes the same.
        The same object where it has none."""
        if not any(self.begins(node) for node in flow.nodes):
            return flow
        if len(self._made) > _REMEMBERED:
            self._made.clear()
        return _Lifting(self, flow, self._made).lifted()

    @abstractmethod
    def begins(self, node: Node) -> bool:
        """Whether it is an operator for which all this is done."""

    @abstractmethod
    def goes_over(self, node: Node) -> bool:
        """Whether an operator with a lifted operand does to images what it does to its tensors."""

    def reads_image(self, _node: Node, _var: relax.Var) -> bool:
        """Whether the lifted node reads the image of a variable that is lifted too, not what it was."""
        return True

    @abstractmethod
    def operand(self, node: Node, var: relax.Var, name: str) -> list[Node]:
        """What makes, of a variable that `node` reads, what is read in its place, that last (called `name`, the others
        after it); nothing where it is read as it is."""

    @abstractmethod
    def on_images(self, node: Node, value: relax.Expr, name: str) -> list[Node]:
        """What computes the image of what `node` does, that last (called `name`, the others after it). `value`: of the
        node, with what is read in place of its operands."""

    @abstractmethod
    def back(self, var: relax.Var, image: relax.Var) -> list[Node]:
        """What makes `var`, which it binds last, of its image."""


def is_plain(node: Node, convs: Mapping[str, str], pools: Collection[str], layout: str) -> bool:
    """Whether it is one of `convs` (operator -> layout of its weights) or `pools` in the usual layouts, its shapes
    known."""
    if node.op in convs:
        attrs = node.value.attrs
        layouts = attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout
        plain = layouts == (layout, convs[node.op], layout)
    elif node.op in pools:
        plain = node.value.attrs.layout == layout and node.value.attrs.out_layout in ("", layout)
    else:
        return False
    return plain and all(known_shape(arg.ty) is not None for arg in (node.var, *node.inputs))


class _Lifting:
    """One function's lifting. `images`: of the variables that were lifted, those of their images."""

    def __init__(self, lifter: Lifter, flow: Dataflow, made: dict[tuple, tuple[Node, ...]]) -> None:
        self.lifter, self.flow, self.made = lifter, flow, made
        self.images: dict[relax.Var, relax.Var] = {}
        self.nodes: list[Node] = []
        self.given_back: set[relax.Var] = set()

    def lifted(self) -> Dataflow:
        for node in self.flow.nodes:
            lifter = self.lifter
            if lifter.begins(node) or (not self.images.keys().isdisjoint(node.inputs) and lifter.goes_over(node)):
                self._lift(node)
            else:
                self._give_back(node.reads)
                self.nodes.append(node)
        self._give_back(self.flow.outputs)
        flow = self.flow
        return Dataflow(flow.params, flow.inputs, self.nodes, flow.output, flow.attrs, flow.prim_funcs)

    def _give_back(self, variables: Sequence[relax.Var]) -> None:
        """Bind those of `variables` that are there as images alone."""
        for var in variables:
            image = self.images.get(var)
            if image is not None and var not in self.given_back:
                self.given_back.add(var)
                self._add((var, image), partial(self.lifter.back, var, image))

    def _lift(self, node: Node) -> None:
        whole = {var for var in node.reads if not self.lifter.reads_image(node, var)}
        self._give_back(tuple(whole))
        images = {var: self.images[var] for var in node.reads if var in self.images and var not in whole}
        self._add((node, *map(images.get, node.inputs)), partial(_lift, self.lifter, node, images))
        self.images[node.var] = self.nodes[-1].var

    def _add(self, key: tuple, make: Callable[[], Sequence[Node]]) -> None:
        if key not in self.made:
            self.made[key] = tuple(make())
        self.nodes += self.made[key]


def _lift(lifter: Lifter, node: Node, images: Mapping[relax.Var, relax.Var]) -> list[Node]:
    """The nodes that compute the image of what `node` computes, that image last."""
    nodes: list[Node] = []
    operands: dict[relax.Var, relax.Expr] = {}
    for i, var in enumerate(node.reads):
        if var in images:
            operands[var] = images[var]
        elif made := lifter.operand(node, var, f"{node.var.name}_operand{i}"):
            nodes += made
            operands[var] = made[-1].var
    return nodes + lifter.on_images(node, substitute(node.value, operands), f"{node.var.name}_image")
