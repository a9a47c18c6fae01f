"""Graphs, and parts of them, as drawings: boxes with texts, and lines between them, ready to be put on a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from rlflow_tvm.dataflow import Node
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.reporting.changes import Mark, Marks
from rlflow_tvm.reporting.layout import layered

Drawing = dict[str, Any]
"""`width`, `height`; `nodes`: [x, y, width, height, label, second line, kind, mark, text in full] each, x and y its
centre; `edges`: [from, to, [x, y, x, y, ...]] each, by the nodes' numbers; `left_out`: neighbours without a box. Kinds
are `op`, `input`, `weight`, `output`, and `free` for an operator that works on weights alone."""

_LETTER, _LINE, _PAD = 6.4, 15.0, 10.0  # of the page's text, in pixels
_LONGEST = 40  # letters of a label
_NEIGHBOURS = 24  # that are drawn of a part
_INTEGER = re.compile(r"T\.int\d+\((-?\d+)\)")  # as TVM writes one


@dataclass(frozen=True)
class _Box:
    label: str
    second: str
    kind: str
    mark: str
    text: str

    @property
    def size(self) -> tuple[float, float]:
        letters = max(len(self.label), len(self.second))
        return letters * _LETTER + 2 * _PAD, (2 if self.second else 1) * _LINE + _PAD


def whole(graph: Graph, marks: Marks) -> Drawing:
    """All of a graph but its weights, which the texts of their readers name."""
    inputs = graph.params[: graph.inputs]
    return _drawn(graph, [*inputs, *(node.var for node in graph.nodes)], marks, outputs=True)


def surroundings(graph: Graph, centre: Iterable[relax.Var], also: Iterable[relax.Var] = ()) -> list[relax.Var]:
    """`centre`, what it reads and what reads it, and `also`, as far as they are in the graph; each once."""
    there = {*graph.params, *graph.position}
    middle = [var for var in centre if var in there]
    nodes = [node for node in map(graph.node, middle) if node is not None]
    beside = [
        *(var for node in nodes for var in node.reads),
        *(user.var for var in middle for user in graph.users.get(var, ())),
        *(var for var in also if var in there),
    ]
    return list(dict.fromkeys([*middle, *beside]))


def part(graph: Graph, shown: Sequence[relax.Var], marks: Marks) -> Drawing:
    """Those variables of a graph: nodes, inputs, weights. Of unmarked ones no more than fit."""
    plain = [var for var in shown if var not in marks]
    left_out = set(plain[_NEIGHBOURS:])
    return _drawn(graph, [var for var in shown if var not in left_out], marks, left_out=len(left_out))


def _drawn(graph: Graph, shown: Sequence[relax.Var], marks: Marks, outputs: bool = False, left_out: int = 0) -> Drawing:
    order = {var: number for number, var in enumerate((*graph.params, *(node.var for node in graph.nodes)))}
    shown = sorted(shown, key=order.__getitem__)
    number = {var: i for i, var in enumerate(shown)}
    boxes = [_box(graph, var, marks.get(var)) for var in shown]
    edges = [
        (number[var], number[node.var])
        for node in map(graph.node, shown)
        if node is not None
        for var in node.reads
        if var in number
    ]
    for i, var in enumerate(graph.outputs):
        if var in graph.outputs[:i]:
            continue  # returned twice
        if var in number and (outputs or graph.node(var) is not None):
            several = len(graph.outputs) > 1
            edges.append((number[var], len(boxes)))
            boxes.append(_Box(f"output {i}" if several else "output", "", "output", "", f"output: {_typed(var.ty)}"))
    # what is computed of weights alone, once, would else stand in a row at the top, far from what reads it
    layout = layered([box.size for box in boxes], edges, {i for i, box in enumerate(boxes) if box.kind == "free"})
    return {
        "width": round(layout.width),
        "height": round(layout.height),
        "nodes": [
            [round(x), round(y), *map(round, box.size), box.label, box.second, box.kind, box.mark, box.text]
            for box, (x, y) in zip(boxes, layout.centres, strict=True)
        ],
        "edges": [
            [*edge, [round(number) for point in path for number in point]]
            for edge, path in zip(edges, layout.paths, strict=True)
        ],
        "left_out": left_out,
    }


def _box(graph: Graph, var: relax.Var, mark: Mark | None) -> _Box:
    node = graph.node(var)
    shape = _typed(var.ty)
    if node is None:
        what = "weight" if var in graph.weight_only else "input"
        return _Box(_short(var.name), _short(shape), what, mark or "", f"{what} {var.name}: {shape}")
    free = var in graph.weight_only
    label = _operator(node)
    lines = [f"{var.name} = {label}", shape, *_details(node.value)]
    read = [f"  {each.name}: {_typed(each.ty)}" for each in node.reads]
    lines += ["reads", *read] if read else []
    if free:
        lines.append("works on weights alone: done once, when compiling")
    return _Box(_short(label), _short(shape), "free" if free else "op", mark or "", "\n".join(lines))


def _operator(node: Node) -> str:
    if isinstance(node.value, relax.TupleGetItem):
        return f"item {node.value.index}"
    if isinstance(node.value, relax.Tuple):
        return "tuple"
    if isinstance(node.value, relax.Call):
        op = node.value.op
        name = op.name if isinstance(op, tvm.ir.Op) else getattr(op, "name_hint", type(op).__name__)
        return str(name).removeprefix("relax.")
    return "constant" if isinstance(node.value, tvm.ir.GenericConst) else "alias"


def _details(value: relax.Expr) -> list[str]:
    """A call's attributes, and of its arguments those that are no variables, a line each."""
    if not isinstance(value, relax.Call):
        return []
    text = "" if value.attrs is None else str(value.attrs)
    inside = _INTEGER.sub(r"\1", text.partition("(")[2].rpartition(")")[0])
    lines = [f"attributes {' '.join(inside.split())}"] if inside else []
    for arg in value.args:
        if isinstance(arg, relax.ShapeExpr):
            lines.append(f"shape {_extents(arg)}")
        elif isinstance(arg, tvm.ir.GenericConst):
            lines.append(f"constant {_constant(arg)}")
    return lines


def _constant(expr: tvm.ir.GenericConst) -> str:
    if not isinstance(expr.ty, relax.TensorType):  # an element type, as an operand
        return str(expr.value)
    values = expr.value.numpy()
    return str(values.reshape(-1)[0]) if values.size == 1 else _typed(expr.ty)


def _typed(ty: relax.Type) -> str:
    """A tensor's shape, and its element type where that is not float32; of a tuple all of them."""
    if isinstance(ty, relax.TupleType):
        return f"({', '.join(map(_typed, ty.fields))})"
    if not isinstance(ty, relax.TensorType):
        return str(ty)
    shape = _extents(ty.shape) if isinstance(ty.shape, relax.ShapeExpr) else "?"
    return shape if str(ty.dtype) == "float32" else f"{shape} {ty.dtype}"


def _extents(shape: relax.ShapeExpr) -> str:
    return "×".join(str(int(extent)) for extent in shape.values) or "scalar"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
