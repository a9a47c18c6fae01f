"""Which neighbouring operators become one kernel: TVM's rules (`src/relax/analysis/graph_partitioner.cc`), in Python.

Written again because `relax.transform.FuseOps` and `FuseTIR` rebuild a whole module, 15 to 30 ms a graph; a search asks
for the kernels of thousands of graphs that differ in a few operators. Kinds are TVM's `OpPatternKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ELEMENTWISE, BROADCAST, INJECTIVE, REDUCTION, OUT_FUSIBLE, OPAQUE = 0, 1, 2, 3, 4, 8

_MAX_NODES = 256  # operators in one kernel, as in TVM


@dataclass
class Operator:
    """One operator. `uses`: (index of a later node that reads it, kind of that edge); `escapes`: it is an output."""

    kind: int
    uses: list[tuple[int, int]] = field(default_factory=list)
    escapes: bool = False


@dataclass
class _Group:
    kind: int
    parent: _Group | None = None
    size: int = 1
    has_anchor: bool = False  # it holds a product, convolution or the like

    def root(self) -> _Group:
        group = self
        while group.parent is not None:
            group = group.parent
        return group


def partition(nodes: Sequence[Operator]) -> list[list[int]]:
    """Groups of node indices, each ascending, in the order of their last members. `nodes` are in topological order."""
    dominators, kinds = _post_dominators(nodes)
    groups = [_Group(node.kind, has_anchor=node.kind == OUT_FUSIBLE) for node in nodes]
    for phase in (0, 1):
        for i in range(len(nodes)):
            sink = dominators[i]
            if sink is None or groups[i].kind == OPAQUE or groups[i].root() is groups[sink].root():
                continue
            allowed = _allowed(groups[i].kind, kinds[i], phase)
            if allowed is None or not _path_fits(nodes, groups, i, sink, allowed):
                continue
            members = _between(nodes, i, sink)
            size = {id(group): group.size for group in (groups[m].root() for m in (*members, sink))}
            if sum(size.values()) <= _MAX_NODES:
                for member in members:
                    _merge(groups[member], groups[sink])
    found: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        found.setdefault(id(group.root()), []).append(i)
    return sorted(found.values(), key=lambda members: members[-1])


def _allowed(kind: int, edges: int, phase: int) -> Callable[[int, bool], bool] | None:
    """What may lie on the way to the post-dominator for a node of this `kind`: f(kind, is the dominator itself)."""
    if kind == OUT_FUSIBLE:
        return (lambda k, _sink: k <= BROADCAST) if phase == 0 and edges == ELEMENTWISE else None
    if kind <= BROADCAST:
        if edges <= INJECTIVE or edges == REDUCTION:
            return lambda k, sink: k <= INJECTIVE or (sink and k in (REDUCTION, OUT_FUSIBLE))
        return None
    if kind == INJECTIVE:
        return (lambda k, _sink: k <= INJECTIVE) if phase == 1 else None
    return None


def _path_fits(
    nodes: Sequence[Operator], groups: Sequence[_Group], source: int, sink: int, allowed: Callable[[int, bool], bool]
) -> bool:
    seen: set[int] = set()
    pending = [use for use, _ in nodes[source].uses]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if not allowed(groups[node].root().kind, node == sink):
            return False
        if node != sink:
            pending.extend(use for use, _ in nodes[node].uses)
    return True


def _between(nodes: Sequence[Operator], source: int, sink: int) -> list[int]:
    """`source` and all nodes on the ways from it to `sink`, without `sink`."""
    seen = {source}
    pending = [source]
    while pending:
        for use, _ in nodes[pending.pop()].uses:
            if use != sink and use not in seen:
                seen.add(use)
                pending.append(use)
    return sorted(seen)


def _merge(child: _Group, parent: _Group) -> None:
    child, parent = child.root(), parent.root()
    if child is parent:
        return
    parent.size += child.size
    child.parent = parent
    if child.has_anchor:
        parent.has_anchor = True
        parent.kind = max(child.kind, parent.kind)


def _post_dominators(nodes: Sequence[Operator]) -> tuple[list[int | None], list[int]]:
    """Each node's immediate post-dominator (None: it has none), and the greatest kind of edge on the ways to it."""
    count = len(nodes)
    dominators: list[int | None] = [None] * count
    depths = [1] * count
    kinds = [OPAQUE] * count
    for i in range(count - 1, -1, -1):
        node = nodes[i]
        if node.escapes or not node.uses:
            continue
        parent: int | None = node.uses[0][0]
        kind = node.uses[0][1]
        for use, edge in node.uses[1:]:
            kind = max(kind, edge)
            parent, kind = _common(parent, use, kind, dominators, depths, kinds)
            if parent is None:
                break
        if parent is not None:
            dominators[i] = parent
            depths[i] = depths[parent] + 1
            kinds[i] = kind
    return dominators, kinds


def _common(
    left: int | None, right: int | None, kind: int, dominators: list[int | None], depths: list[int], kinds: list[int]
) -> tuple[int | None, int]:
    """The nearest common post-dominator of two nodes, and the greatest kind of edge on the ways to it."""
    while left != right:
        if left is None or right is None:
            return None, OPAQUE
        if depths[left] < depths[right]:
            kind = max(kind, kinds[right])
            right = dominators[right]
        elif depths[left] > depths[right]:
            kind = max(kind, kinds[left])
            left = dominators[left]
        else:
            kind = max(kind, kinds[left], kinds[right])
            left, right = dominators[left], dominators[right]
    return left, kind
