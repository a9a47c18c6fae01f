"""What a learned cost model is told of a kernel's schedule: how its work is split, and how much of it is in vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.target import Target

from rlflow_tvm.cost.access import Point, element_offset, index_value
from rlflow_tvm.cost.metrics import tensor_bytes
from rlflow_tvm.kernels import RULE_ATTR, num_cores

_GIVEN = "given"


def schedule_features(func: tirx.PrimFunc, target: Target) -> dict[str, float]:
    """Of a scheduled function, by name; counts are of one run, a vector counting once.

    `forks`: parallel regions; `tasks`: the iterations of the longest of them, and `waves`: how much longer they take
    than if the threads shared them evenly. `stores:` and `loads:` by kind: `vector` (neighbours in memory), `same` (one
    element for all lanes), `strided` and `scalar`. `calls`: statements that are calls. `allocated`: bytes between its
    blocks. `rule:NAME`: 1 for the schedule rule that took it, "given" where it came with its schedule.
    """
    counts: Counter[str] = Counter()
    tasks = 0
    for stmt, scope in _statements(func.body, _Scope()):
        if isinstance(stmt, tirx.For):
            counts["forks"] += scope.runs
            tasks = max(tasks, _extent(stmt, scope))
        elif isinstance(stmt, s_tir.SBlock):
            counts["allocated"] += sum(tensor_bytes(_shape(buffer), buffer.dtype) for buffer in stmt.alloc_buffers)
        elif isinstance(stmt, tirx.BufferStore):
            counts[f"stores:{scope.kind(stmt.buffer, stmt.indices)}"] += scope.runs
            for load in _loads(stmt.value):
                counts[f"loads:{scope.kind(load.source, load.indices)}"] += scope.runs
        else:
            counts["calls"] += scope.runs
    features = {f"schedule:{name}": float(count) for name, count in counts.items()}
    threads = num_cores(target)
    features["schedule:tasks"] = float(tasks)
    features["schedule:waves"] = ceil(tasks / threads) * threads / tasks if tasks else float(threads)
    rule = func.attrs.get(RULE_ATTR, _GIVEN) if func.attrs is not None else _GIVEN
    features[f"rule:{rule}"] = 1.0
    return features


@dataclass(frozen=True)
class _Scope:
    """Where a statement stands: how often it runs, along which variable it is a vector, and its variables' values."""

    runs: int = 1
    vector: tvm.ir.Var | None = None
    first: Point = field(default_factory=dict)
    second: Point = field(default_factory=dict)
    """At the first lane, and at the second."""

    def within(self, loop: tirx.For) -> _Scope:
        extent = _extent(loop, self)
        first, second = {**self.first, loop.loop_var: 0}, {**self.second, loop.loop_var: 0}
        if loop.kind == tirx.ForKind.VECTORIZED:
            second[loop.loop_var] = 1
            return replace(self, vector=loop.loop_var, first=first, second=second)
        return replace(self, runs=self.runs * extent, first=first, second=second)

    def bound(self, realize: s_tir.SBlockRealize) -> _Scope:
        axes = [axis.var for axis in realize.block.iter_vars]
        first, second = (
            {**point, **{axis: index_value(e, point) or 0 for axis, e in zip(axes, realize.iter_values, strict=True)}}
            for point in (self.first, self.second)
        )
        return replace(self, first=first, second=second)

    def kind(self, buffer: tvm.ir.Expr, indices: list[tvm.ir.Expr]) -> str:
        if self.vector is None:
            return "scalar"
        before, after = element_offset(buffer, indices, self.first), element_offset(buffer, indices, self.second)
        step = None if before is None or after is None else after - before
        return {0: "same", 1: "vector"}.get(step, "strided") if step is not None else "strided"


def _statements(stmt: tirx.stmt.Stmt, scope: _Scope) -> Iterator[tuple[tirx.stmt.Stmt, _Scope]]:
    """The stores, calls, blocks and parallel loops below, each with its scope; both branches of a condition."""
    if isinstance(stmt, tirx.For):
        if stmt.kind == tirx.ForKind.PARALLEL:
            yield stmt, scope
        yield from _statements(stmt.body, scope.within(stmt))
    elif isinstance(stmt, s_tir.SBlockRealize):
        yield from _statements(stmt.block, scope.bound(stmt))
    elif isinstance(stmt, s_tir.SBlock):
        yield stmt, scope
        yield from _statements(stmt.body, scope)
    elif isinstance(stmt, tirx.SeqStmt):
        for each in stmt.seq:
            yield from _statements(each, scope)
    elif isinstance(stmt, tirx.IfThenElse):
        for branch in (stmt.then_case, stmt.else_case):
            if branch is not None:
                yield from _statements(branch, scope)
    elif isinstance(stmt, tirx.BufferStore | tirx.Evaluate):
        yield stmt, scope
    elif hasattr(stmt, "body"):
        yield from _statements(stmt.body, scope)


def _loads(expr: tvm.ir.Expr) -> list[tvm.ir.TensorLoad]:
    found: list[tvm.ir.TensorLoad] = []
    tvm_ffi.structural_walk(expr, (tvm.ir.TensorLoad, found.append))
    return found


def _extent(loop: tirx.For, scope: _Scope) -> int:
    """1 where it depends on data."""
    return index_value(loop.extent, scope.first) or 1


def _shape(buffer: tvm.ir.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)
