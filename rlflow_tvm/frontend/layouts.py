"""Layouts that ONNX does not have (NCHW16c, NHWC): written as Reshape, Transpose, Reshape.

A layout is what TVM calls one: an upper-case letter for an axis, a number and its lower-case letter for the block of it
that lies there. A value that is brought back into the layout it came from is the old value: its way there is dropped
where nobody else reads it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tvm
from tvm import tirx

from rlflow_tvm.frontend.writer import Writer

_LETTERS = "ABCDEFGHIJ"
_PART = re.compile(r"(\d*)([A-Za-z])")


def parts_of(layout: str) -> list[str]:
    """NCHW16c -> N C H W 16c"""
    return [number + letter for number, letter in _PART.findall(layout)]


def _canonical(source: str, to: str) -> tuple[str, str]:
    """The two with their letters named in the order of the first: OIHW to OIHW16o is ABCD to ABCD16a."""
    names: dict[str, str] = {}
    for part in parts_of(source):
        names.setdefault(_axis(part), _LETTERS[len(names)])
    first, second = ("".join(part[:-1] + _named(part, names) for part in parts_of(layout)) for layout in (source, to))
    return first, second


def _named(part: str, names: dict[str, str]) -> str:
    name = names[_axis(part)]
    return name if part.isupper() else name.lower()


def _axis(part: str) -> str:
    return part[-1].upper()


def is_plain(layout: str) -> bool:
    """Whether no axis of it is blocked."""
    return layout.isupper()


def shape_in(shape: Sequence[int], layout: str, to: str) -> tuple[int, ...]:
    """The shape in the plain layout `to` of a tensor that has `shape` in `layout`."""
    extents = dict.fromkeys(to, 1)
    for part, extent in zip(parts_of(layout), shape, strict=True):
        extents[_axis(part)] *= extent
    return tuple(extents.values())


def relayout(writer: Writer, x: str, shape: Sequence[int], source: str, to: str) -> str:
    """`x`, of `shape` in the layout `source`, in the layout `to`; one of the two is plain."""
    if source == to:
        return x
    there, back = (_canonical(*pair) for pair in ((source, to), (to, source)))
    known = writer.turned(x, there)
    if known is not None:
        return known
    before, after = parts_of(source), parts_of(to)
    extents = dict(zip(before, shape, strict=True))
    if any(int(part[:-1]) != extent for part, extent in extents.items() if not part.isupper()):
        raise writer.refusal(f"{tuple(shape)} is no shape in the layout {source}")
    if is_plain(to):
        order = [part for axis in after for part in before if _axis(part) == axis]
        result = _transpose(writer, x, [before.index(part) for part in order])
        if len(order) > len(after):
            result = writer.reshape(result, shape_in(shape, source, to))
    else:
        for part in after:
            if part not in extents:
                block = int(part[:-1])
                if extents[_axis(part)] % block:
                    raise writer.refusal(f"axis {_axis(part)} of {tuple(shape)} is no multiple of the layout {to}")
                extents[_axis(part)] //= block
                extents[part] = block
        order = [part for axis in before for part in after if _axis(part) == axis]
        split = writer.reshape(x, [extents[part] for part in order]) if len(order) > len(before) else x
        result = _transpose(writer, split, [order.index(part) for part in after])
    writer.remember(x, there, result, back)
    return result


def _transpose(writer: Writer, x: str, order: list[int]) -> str:
    return x if order == sorted(order) else writer.node("Transpose", x, perm=order)


def layouts_of(index_map: tirx.IndexMap) -> tuple[str, str] | None:
    """The layouts between which a map of indices goes, axes of the plain one named A, B, ...; None for another map."""
    named = _LETTERS[: len(index_map.initial_indices)]
    forward = _blocked(index_map.initial_indices, index_map.final_indices, named)
    if forward is not None:
        return named, forward
    named = _LETTERS[: len(index_map.final_indices)]
    backward = _joined(index_map.initial_indices, index_map.final_indices, named)
    return None if backward is None else (backward, named)


def _blocked(initial: Sequence[tirx.Var], final: Sequence[tvm.ir.Expr], letters: str) -> str | None:
    """The layout of indices i, i // b and i % b of axes i, and 0 where a block is of one."""
    parts, divided = [], []
    for expr in final:
        if isinstance(expr, tirx.IntImm) and int(expr) == 0:
            parts.append(f"1{letters[0].lower()}")
            continue
        base, block = (expr.a, expr.b) if isinstance(expr, tirx.FloorDiv | tirx.FloorMod) else (expr, None)
        place = next((i for i, var in enumerate(initial) if var.same_as(base)), None)
        if place is None or not (block is None or isinstance(block, tirx.IntImm)):
            return None
        letter = letters[place]
        part = f"{int(block)}{letter.lower()}" if isinstance(block, tirx.IntImm) else letter
        divided += [part] if isinstance(expr, tirx.FloorDiv) else []
        parts.append(part if isinstance(expr, tirx.FloorMod) else letter)
    blocks = [part for part in parts if not part.isupper() and part[:-1] != "1"]
    plain = [part for part in parts if part.isupper()]
    whole = sorted(plain) == sorted(letters) and sorted(blocks) == sorted(divided) and len(set(parts)) == len(parts)
    return "".join(parts) if whole else None


def _joined(initial: Sequence[tirx.Var], final: Sequence[tvm.ir.Expr], letters: str) -> str | None:
    """The layout of indices of which a final one is i, i * b + k, or i + k where a block is of one."""
    parts: list[str | None] = [None] * len(initial)

    def name(var: tvm.ir.Expr, part: str) -> bool:
        place = next((i for i, each in enumerate(initial) if each.same_as(var)), None)
        if place is None or parts[place] is not None:
            return False
        parts[place] = part
        return True

    for expr, letter in zip(final, letters, strict=True):
        if isinstance(expr, tirx.Add):
            scaled = isinstance(expr.a, tirx.Mul) and isinstance(expr.a.b, tirx.IntImm)
            outer, block = (expr.a.a, int(expr.a.b)) if scaled else (expr.a, 1)
            if not (name(outer, letter) and name(expr.b, f"{block}{letter.lower()}")):
                return None
        elif not name(expr, letter):
            return None
    return None if None in parts else "".join(part for part in parts if part is not None)
