"""Which neighbouring operators become one kernel: TVM's rules (`src/relax/analysis/graph_partitioner.cc`), in Python.

Written again because `relax.transform.FuseOps` and `FuseTIR` rebuild a whole module, 15 to 30 ms a graph; a search asks
for the kernels of thousands of graphs that differ in a few operators. Kinds are TVM's `OpPatternKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

ELEMENTWISE, BROADCAST, INJECTIVE, REDUCTION, OUT_FUSIBLE, OPAQUE = 0, 1, 2, 3, 4, 8

_MAX_NODES = 256  # operators in one kernel, as in TVM
# Schedules inline what is computed into whatever reads it: of a chain in which each step reads the one before twice,
# that is 2 to the power of its length. So many operators may an expression have.
_MAX_INLINED = 1024
_FEW = 8  # operators: not worth counting


def partition(
    kinds: Sequence[int], uses: Sequence[Sequence[int]], escaping: Container[int], stretched: Container[int] = ()
) -> list[list[int]]:
    """Groups of operators, each ascending, in the order of their last members.

    Operators are numbered in topological order: the `kinds` of each, its `uses` (the later operators that read it, once
    for each operand), and those that are outputs are `escaping`. The `stretched` are read by an operator with a larger
    result, as where a product is added to several others: no product is fused over them.
    """
    sinks, edges = _post_dominators(kinds, uses, escaping, stretched)
    groups = _Groups(kinds)
    fusible = [(i, sink) for i, sink in enumerate(sinks) if sink is not None and kinds[i] != OPAQUE]
    for phase in (0, 1):
        for i, sink in fusible:
            allowed = _allowed(groups.kinds[i], edges[i], phase)
            if allowed is None or groups.root(i) == groups.root(sink):
                continue
            if len(uses[i]) == 1:  # the sink is its one reader
                members = [i]
                if not allowed(groups.kinds[groups.root(sink)], True):
                    continue
            elif _path_fits(uses, groups, i, sink, allowed):
                members = _between(uses, i, sink)
            else:
                continue
            roots = {groups.root(m) for m in (*members, sink)}
            size = sum(groups.sizes[root] for root in roots)
            if size <= _FEW or (size <= _MAX_NODES and _inlined(kinds, uses, groups.joined(roots)) <= _MAX_INLINED):
                for member in members:
                    groups.merge(member, sink)
    found: dict[int, list[int]] = {}
    for i in range(len(kinds)):
        found.setdefault(groups.root(i), []).append(i)
    return sorted(found.values(), key=lambda members: members[-1])


class _Groups:
    """Disjoint groups of operators; kind and size are those of a group where they are asked of its root.

    Lists of numbers, no objects: Python's garbage collector would take as long as all the rest.
    """

    def __init__(self, kinds: Sequence[int]) -> None:
        self.kinds = list(kinds)
        self.sizes = [1] * len(kinds)
        self._members = [[i] for i in range(len(kinds))]
        self._anchored = [kind == OUT_FUSIBLE for kind in kinds]  # it holds a product, convolution or the like
        self._parents = list(range(len(kinds)))

    def root(self, i: int) -> int:
        parents = self._parents
        while parents[i] != i:
            i = parents[i]
        return i

    def joined(self, roots: Iterable[int]) -> list[int]:
        """The members of several groups, ascending."""
        return sorted(i for root in roots for i in self._members[root])

    def merge(self, child: int, parent: int) -> None:
        child, parent = self.root(child), self.root(parent)
        if child == parent:
            return
        self.sizes[parent] += self.sizes[child]
        self._members[parent] += self._members[child]
        self._parents[child] = parent
        if self._anchored[child]:
            self._anchored[parent] = True
            self.kinds[parent] = max(self.kinds[child], self.kinds[parent])


def _up_to_broadcast(kind: int, sink: bool) -> bool:
    del sink
    return kind <= BROADCAST


def _up_to_injective(kind: int, sink: bool) -> bool:
    del sink
    return kind <= INJECTIVE


def _injective_into_any(kind: int, sink: bool) -> bool:
    return kind <= INJECTIVE or (sink and kind in (REDUCTION, OUT_FUSIBLE))


def _allowed(kind: int, edges: int, phase: int) -> Callable[[int, bool], bool] | None:
    """What may lie on the way to the post-dominator for a node of this `kind`: f(kind, is the dominator itself)."""
    if kind == OUT_FUSIBLE:
        return _up_to_broadcast if phase == 0 and edges == ELEMENTWISE else None
    if kind <= BROADCAST:
        return _injective_into_any if edges <= INJECTIVE or edges == REDUCTION else None
    return _up_to_injective if kind == INJECTIVE and phase == 1 else None


def _path_fits(
    uses: Sequence[Sequence[int]], groups: _Groups, source: int, sink: int, allowed: Callable[[int, bool], bool]
) -> bool:
    seen: set[int] = set()
    pending = list(uses[source])
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if not allowed(groups.kinds[groups.root(node)], node == sink):
            return False
        if node != sink:
            pending.extend(uses[node])
    return True


def _between(uses: Sequence[Sequence[int]], source: int, sink: int) -> list[int]:
    """`source` and all nodes on the ways from it to `sink`, without `sink`."""
    seen = {source}
    pending = [source]
    while pending:
        for use in uses[pending.pop()]:
            if use != sink and use not in seen:
                seen.add(use)
                pending.append(use)
    return sorted(seen)


def _inlined(kinds: Sequence[int], uses: Sequence[Sequence[int]], members: Sequence[int]) -> int:
    """Operators in the longest expression of `members`, ascending, where each but products and sums is inlined."""
    sizes = dict.fromkeys(members, 1)
    for i in members:
        for reader in uses[i]:
            if reader in sizes:
                sizes[reader] += sizes[i] if kinds[i] <= INJECTIVE else 1
    return max(sizes.values())


def _post_dominators(
    kinds: Sequence[int], uses: Sequence[Sequence[int]], escaping: Container[int], stretched: Container[int]
) -> tuple[list[int | None], list[int]]:
    """Each node's immediate post-dominator (None: it has none), and the greatest kind of edge on the ways to it.

    The kind of an edge is that of the operator that reads; at least broadcasting where what it reads is `stretched`.
    """
    count = len(kinds)
    dominators: list[int | None] = [None] * count
    depths = [1] * count
    edges = [OPAQUE] * count
    for i in range(count - 1, -1, -1):
        readers = uses[i]
        if not readers or i in escaping:
            continue
        parent: int | None = readers[0]
        kind = max(kinds[readers[0]], BROADCAST) if i in stretched else kinds[readers[0]]
        for use in readers[1:]:
            kind = max(kind, kinds[use])
            parent, kind = _common(parent, use, kind, dominators, depths, edges)
            if parent is None:
                break
        if parent is not None:
            dominators[i] = parent
            depths[i] = depths[parent] + 1
            edges[i] = kind
    return dominators, edges


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
