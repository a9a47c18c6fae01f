"""Attribute expressions and conditions that a found rule may have: what could give an attribute its value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations, product
from typing import Any

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import Attribute
from rlflow_tvm.passes.ops import OPERATORS

Env = Mapping[str, Any]

AXES, AXIS, SET, POINTS, SHAPE, FLAG, OTHER = "axes", "axis", "set", "points", "shape", "flag", "other"
"""What kinds of values attributes have: an order of axes, one axis, a set of axes, where to split, extents, ..."""

_KINDS = {
    ("permute_dims", "axes"): AXES,
    ("concat", "axis"): AXIS,
    ("split", "axis"): AXIS,
    ("softmax", "axis"): AXIS,
    ("split", "at"): POINTS,
    ("reshape", "shape"): SHAPE,
    **{(name, "axis"): SET for name in ("sum", "mean", "max", "min")},
    **{(name, "keepdims"): FLAG for name in ("sum", "mean", "max", "min")},
}

NAMES = {AXES: "p", AXIS: "k", SET: "a", POINTS: "at", SHAPE: "s", FLAG: "d", OTHER: "o"}
"""What variables of a kind are called."""


def kind(operator: str, attribute: str) -> str:
    return _KINDS.get((operator, attribute), OTHER)


def value(text: str, env: Env) -> Any:
    """The expression's value, None where it has none."""
    try:
        return Attribute(text).value(env)
    except RewriteError:
        return None


def literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def candidates(kind: str, tensors: Sequence[str], ranks: Mapping[str, int], variables: Mapping[str, str],
               values: Sequence[Any]) -> Iterator[str]:  # fmt: skip
    """Expressions for an attribute of a kind, the more general first. `variables`: the left side's attribute variables
    with their kinds; `ranks`: of the tensors, as far as all points agree; `values`: the attribute's at each point."""
    own = [name for name, of in variables.items() if of == kind]
    yield from own
    orders = [name for name, of in variables.items() if of == AXES]
    sets = [name for name, of in variables.items() if of == SET]
    axes = [name for name, of in variables.items() if of == AXIS]
    deep = [t for t in tensors if ranks.get(t, 0) > 0]
    if kind == AXES:
        yield from (f"compose({p}, {q})" for p, q in product(orders, repeat=2))
        yield from (f"inverse({p})" for p in orders)
        yield from (f"swap_last(rank({t}))" for t in deep)
    elif kind == AXIS:
        yield from (f"{p}[{k}]" for p, k in product(orders, axes))
        yield from (f"places([{k}], {p})[0]" for p, k in product(orders, axes))
        yield from (f"rank({t}) - {back}" for back in (1, 2) for t in deep if ranks[t] >= back)
        yield from (f"{k} {sign} 1" for k in axes for sign in "+-")
    elif kind == SET:
        for a, t in product(sets, deep):
            yield from (f"normal(normal({a}, rank({t})) + normal({b}, rank({t})), rank({t}))" for b in sets if b != a)
            yield from (f"{do}(normal({a}, rank({t})), {p})" for p in orders for do in ("picked", "places"))
        yield from (f"[{k}]" for k in axes)
        yield from (f"[rank({t}) - {back}]" for back in (1, 2) for t in deep)
    elif kind == POINTS:
        shapes = [name for name, of in variables.items() if of == SHAPE]
        yield from _points(deep, ranks, axes, shapes, values)
    elif kind == SHAPE:
        yield from _shapes(deep, ranks, variables, orders, sets, values)
    elif kind == OTHER and values and isinstance(values[0], tuple):
        yield from (f"[{o}[1], {o}[0]]" for o in own)
        yield from (f"[{o}[1], {o}[0], {o}[3], {o}[2]]" for o in own)
    if all(v == values[0] for v in values):
        yield literal(values[0])


def _extents(tensors: Iterable[str], ranks: Mapping[str, int]) -> list[str]:
    return [f"dim({t}, {axis})" for t in tensors for axis in range(ranks[t])]


def _points(
    tensors: Sequence[str], ranks: Mapping[str, int], axes: Sequence[str], shapes: Sequence[str], values: Sequence[Any]
) -> Iterator[str]:
    count = len(values[0])
    along = [f"dim({t}, {k})" for t in tensors for k in axes] + _extents(tensors, ranks)
    if count == 1:
        yield from (f"[{extent}]" for extent in along)
        yield from (f"[{s}[{i}]]" for s in shapes for i in range(4))
        yield from (f"[{extent} // 2]" for extent in along)
    elif count == 2:
        yield from (f"[{one}, {one} + {other}]" for one, other in product(along, repeat=2))


def _shapes(tensors: Sequence[str], ranks: Mapping[str, int], variables: Mapping[str, str], orders: Sequence[str],
            sets: Sequence[str], values: Sequence[Any]) -> Iterator[str]:  # fmt: skip
    yield from (f"shape({t})" for t in tensors)
    yield from (f"permuted(shape({t}), {p})" for t in tensors for p in orders)
    flags = [name for name, of in variables.items() if of == FLAG]
    for t, a in product(tensors, sets):
        yield from (f"reduced(shape({t}), normal({a}, rank({t})), {d})" for d in (*flags, "True", "False"))


def extent_candidates(tensors: Sequence[str], ranks: Mapping[str, int], shapes: Sequence[str]) -> Iterator[str]:
    """Expressions for one extent of a shape."""
    yield "1"
    known = _extents([t for t in tensors if ranks.get(t, 0) > 0], ranks)
    yield from known
    yield from (f"{s}[{i}]" for s in shapes for i in range(4))
    yield from (f"2 * {s}[{i}]" for s in shapes for i in range(4))
    yield from (f"{a} * {b}" for a, b in combinations(known, 2))
    yield from (f"{a} + {b}" for a, b in combinations(known, 2))
    yield from (f"{a} // 2" for a in known)


def conditions(tensors: Sequence[str], variables: Mapping[str, str], rests: Sequence[str], env: Env) -> Iterator[str]:
    """Conditions that may hold, the ones to try first first. `env`: some point, for literals."""
    ranks = {t: len(value(f"shape({t})", env)) for t in tensors}
    pairs = [*combinations(tensors, 2)]
    yield from (f"shape({a}) == shape({b})" for a, b in pairs)
    yield from _shapes_with_units(tensors, env)
    yield from (f"rank({t}) >= 2" for t in tensors)
    yield from (f"rank({t}) <= 1" for t in tensors)
    yield from (f"rank({a}) == rank({b})" for a, b in pairs)
    for name, of in variables.items():
        yield from _of_variable(name, of, tensors, variables, env)
    yield from (f"rank({t}) == {ranks[t]}" for t in tensors)
    for a, b in permutations(tensors, 2):
        yield f"fits(shape({a}), shape({b}))"
        if ranks[a] == ranks[b]:
            yield from (f"shape({a}){part} == shape({b}){part}" for part in ("[:-1]", "[1:]", "[2:]") if a < b)
    for a, b in pairs:
        for i, j in product(range(ranks[a]), range(ranks[b])):
            yield f"dim({a}, {i}) == dim({b}, {j})"
    for t in tensors:
        yield from (f"dim({t}, {axis}) == 1" for axis in range(ranks[t]))
        yield f"is_float({t})"
    for k in rests:
        for key, found in env[k].items():
            yield f'{k}["{key}"] == {literal(found)}'
        yield from (f'{k}["out_dtype"] in [None, dtype({t})]' for t in tensors[:1])


def _shapes_with_units(tensors: Sequence[str], env: Env) -> Iterator[str]:
    """For tensors with axes of extent 1: the whole shape, the other extents those of tensors beside them."""
    shapes = {t: value(f"shape({t})", env) for t in tensors}
    for t, extents in shapes.items():
        if 1 not in extents:
            continue
        known = [(f"dim({u}, {axis})", e) for u, shape in shapes.items() if u != t for axis, e in enumerate(shape)]
        others = [["1"] if extent == 1 else [text for text, e in known if e == extent] for extent in extents]
        yield from (f"shape({t}) == [{', '.join(texts)}]" for texts in product(*others))


def _of_variable(name: str, of: str, tensors: Sequence[str], variables: Mapping[str, str], env: Env) -> Iterator[str]:
    held = env[name]
    if of == AXES:
        yield f"{name} == range(len({name}))"
        yield from (f"moves_only_units(shape({t}), {name})" for t in tensors)
        yield from (f"{name} == swap_last(rank({t}))" for t in tensors)
        yield from (f"compose({name}, {other}) == range(len({name}))" for other, o in variables.items() if o == AXES)
    elif of == AXIS:
        yield from (f"{name} == rank({t}) - {back}" for back in (1, 2) for t in tensors)
        yield from (f"{name} < rank({t}) - {back}" for back in (1, 2) for t in tensors)
        yield from (f"{name} != {other}" for other, o in variables.items() if o == AXIS and other != name)
        for a in (other for other, o in variables.items() if o == SET):
            for t in tensors:
                yield f"{name} not in normal({a}, rank({t}))"
                yield f"{name} in normal({a}, rank({t}))"
    elif of == SET:
        for t in tensors:
            yield f"rank({t}) - 1 not in normal({name}, rank({t}))"
            yield f"rank({t}) - 2 not in normal({name}, rank({t}))"
            yield from (f"normal({name}, rank({t})) == [rank({t}) - {back}]" for back in (1, 2))
            yield f"len(normal({name}, rank({t}))) == 1"
            for other in (o for o, what in variables.items() if what == SET and o != name):
                yield f"disjoint(normal({name}, rank({t})), normal({other}, rank({t})))"
    elif of == POINTS:
        yield f"len({name}) == {len(held)}"
        axes = [other for other, o in variables.items() if o == AXIS]
        for k in axes:
            yield from (f"{name} == [dim({t}, {k})]" for t in tensors)
            yield from (f"{name}[:1] == [dim({t}, {k})]" for t in tensors)
            for t, u in permutations(tensors, 2):
                yield f"{name}[:2] == [dim({t}, {k}), dim({t}, {k}) + dim({u}, {k})]"
                yield f"{name}[-1:] == [dim({t}, {k}) + dim({u}, {k})]"
        ranks = {t: len(value(f"shape({t})", env)) for t in tensors}
        yield from (f"{name} == [{extent}]" for extent in _extents(tensors, ranks))
    elif of == SHAPE:
        yield from (f"{name} == shape({t})" for t in tensors)
        yield f"len({name}) == {len(held)}"
        yield from (f"{name}[-1:] == shape({t})[-1:]" for t in tensors)
        yield from (f"{name}[:1] == shape({t})[:1]" for t in tensors)
    elif of == FLAG:
        yield name if held else f"not {name}"
    if of in (AXES, AXIS, SET, OTHER):
        yield f"{name} == {literal(held)}"


def defaults(operator: str) -> Mapping[str, Any]:
    return OPERATORS[operator].attributes
