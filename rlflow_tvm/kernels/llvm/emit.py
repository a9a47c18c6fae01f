"""Loop nests written out statement by statement, for kernels whose code no sequence of schedule moves reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.tirx.stmt import Stmt

Index = tvm.ir.Expr | int


class Emitter:
    """Collects statements in the order in which they are asked for; 32-bit indices, float32 vectors of any width."""

    def __init__(self) -> None:
        self._scopes: list[list[Stmt]] = [[]]
        self.buffers: list[tirx.Buffer] = []

    def statement(self) -> Stmt:
        """All that was emitted."""
        return _sequence(self._scopes[0])

    def allocate(self, name: str, shape: Sequence[int]) -> tirx.Buffer:
        """A float32 buffer; it lives in the innermost loop that holds all its uses (lowering places it there)."""
        buffer = tirx.decl_buffer(list(shape), "float32", name)
        self.buffers.append(buffer)
        return buffer

    @contextmanager
    def loop(self, extent: int, name: str, kind: tirx.ForKind = tirx.ForKind.SERIAL) -> Iterator[tvm.ir.Expr]:
        """The statements emitted inside are a loop's body; a serial loop of one turn is none."""
        if extent == 1 and kind != tirx.ForKind.PARALLEL:
            yield tirx.const(0, "int32")
            return
        var = tirx.Var(name, "int32")
        self._scopes.append([])
        yield var
        body = _sequence(self._scopes.pop())
        self.add(tirx.For(var, tirx.const(0, "int32"), tirx.const(extent, "int32"), kind, body))

    @contextmanager
    def when(self, condition: tvm.ir.Expr | bool) -> Iterator[None]:
        """The statements emitted inside are run where `condition` holds; True stands for no test."""
        if condition is True:
            yield
            return
        self._scopes.append([])
        yield
        body = _sequence(self._scopes.pop())
        self.add(tirx.IfThenElse(condition, body, None))

    def add(self, stmt: Stmt) -> None:
        """Emit a statement."""
        self._scopes[-1].append(stmt)

    def bind(self, value: tvm.ir.Expr, name: str = "v") -> tirx.Var:
        """A name for a value, which is then computed once."""
        var = tirx.Var(name, value.ty)
        self.add(tirx.Bind(var, value))
        return var

    def load(self, buffer: tirx.Buffer, indices: Sequence[Index], lanes: int) -> tirx.Var:
        """A vector of `lanes` elements along the last axis, from `indices` on."""
        return self.bind(tirx.BufferLoad(buffer, _vector(indices, lanes)))

    def store(self, buffer: tirx.Buffer, indices: Sequence[Index], value: tvm.ir.Expr, lanes: int) -> None:
        """Write a vector along the last axis."""
        self.add(tirx.BufferStore(buffer, value, _vector(indices, lanes)))


def splat(value: float | tvm.ir.Expr, lanes: int) -> tvm.ir.Expr:
    """A float32 vector of one value."""
    if isinstance(value, float | int):
        value = tirx.const(float(value), "float32")
    return value if lanes == 1 else tirx.Broadcast(value, lanes)


def transpose(emitter: Emitter, vectors: Sequence[tvm.ir.Expr], width: int) -> list[tvm.ir.Expr]:
    """`n` vectors of `width` elements as `width` vectors of `n`, both powers of two, `width` > 1.

    Each round interleaves the first half of the vectors with the second: the first bit of the number of an element's
    vector becomes the last bit of its place.
    """
    count = len(vectors)
    rows, held = list(vectors), width
    for _ in range(count.bit_length() - 1):
        half = len(rows) // 2
        order = [place for i in range(held) for place in (i, held + i)]
        parts = [order] if held < count else [order[:held], order[held:]]
        rows = [
            emitter.bind(tirx.Shuffle([rows[i], rows[half + i]], [tirx.const(place, "int32") for place in part]))
            for i in range(half)
            for part in parts
        ]
        held = min(2 * held, count)
    return rows


def _vector(indices: Sequence[Index], lanes: int) -> list[Index]:
    *outer, last = (tirx.const(i, "int32") if isinstance(i, int) else i for i in indices)
    return [*outer, last if lanes == 1 else tirx.Ramp(last, tirx.const(1, "int32"), lanes)]


def _sequence(stmts: Sequence[Stmt]) -> Stmt:
    return stmts[0] if len(stmts) == 1 else tirx.SeqStmt(list(stmts))
