"""Where the nodes of a graph are drawn: layers from top to bottom, as Sugiyama, Tagawa and Toda (1981) have it.

Layers by longest path, orders within them by barycentres, and then positions: of each layer those nearest to what its
neighbours ask for, under the layer's order and gaps, which is an isotonic regression.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]

GAP, ROW_GAP, THIN = 16.0, 26.0, 4.0  # between neighbours, between layers; the width of a passing edge
_SWEEPS, _PULLS = 10, 8
_STRAIGHT = 6.0  # how much more than a node an edge that passes a layer holds to its place


@dataclass(frozen=True)
class Layout:
    """Centres of the nodes; for each edge the points that it passes, from its first node's lower side to the upper side
    of its last; the size of all. In pixels, downwards."""

    centres: tuple[Point, ...]
    paths: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def layered(sizes: Sequence[Point], edges: Sequence[tuple[int, int]], late: Collection[int] = ()) -> Layout:
    """Lay out nodes of these (width, height), numbered in execution order: each edge leads to a later node.

    ValueError for an edge that does not. Edges of one node that pass the same layers pass them together. Nodes that are
    `late` stand as far down as what reads them allows, as do those that read nothing.
    """
    if any(not 0 <= first < last < len(sizes) for first, last in edges):
        raise ValueError("every edge must lead from a node to a later one")
    rows = _rows(len(sizes), edges, late)
    grid = _Grid(sizes, edges, rows)
    grid.order()
    return grid.placed()


def _rows(count: int, edges: Sequence[tuple[int, int]], late: Collection[int]) -> list[int]:
    """Each node's layer: by its longest path from above; a late one, and one that reads nothing, stands just above its
    first reader."""
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for first, last in edges:
        above[last].append(first)
        below[first].append(last)
    rows = [0] * count
    for node in range(count):
        rows[node] = 1 + max((rows[other] for other in above[node]), default=-1)
    for node in reversed(range(count)):
        if below[node] and (not above[node] or node in late):
            rows[node] = min(rows[other] for other in below[node]) - 1
    return rows


class _Grid:
    """Items in layers: the nodes, by their numbers, and after them a stand-in for each layer that a node's longest edge
    passes. Links lead from one layer to the next."""

    def __init__(self, sizes: Sequence[Point], edges: Sequence[tuple[int, int]], rows: Sequence[int]) -> None:
        self.sizes, self.edges = sizes, edges
        self.row = list(rows)
        self.widths = [width for width, _ in sizes]
        self.passing: dict[tuple[int, int], int] = {}  # (node, layer) -> its stand-in there
        self.up: list[list[int]] = [[] for _ in sizes]
        self.down: list[list[int]] = [[] for _ in sizes]
        for first, last in edges:
            self._link(self._reach(first, self.row[last] - 1), last)
        self.layers: list[list[int]] = [[] for _ in range(max(self.row, default=-1) + 1)]
        for item in self._met():
            self.layers[self.row[item]].append(item)

    def _reach(self, node: int, row: int) -> int:
        """The item that stands for `node` in a layer below it, or the node itself."""
        item = node
        for passed in range(self.row[node] + 1, row + 1):
            following = self.passing.get((node, passed))
            if following is None:
                following = self.passing[node, passed] = len(self.row)
                self.row.append(passed)
                self.widths.append(THIN)
                self.up.append([])
                self.down.append([])
                self._link(item, following)
            item = following
        return item

    def _link(self, upper: int, lower: int) -> None:
        self.down[upper].append(lower)
        self.up[lower].append(upper)

    def _met(self) -> list[int]:
        """All items, as they are met going down from each node that has none above it: a first order without far-off
        neighbours."""
        met: dict[int, None] = {}
        for start in range(len(self.row)):
            pending = [] if self.up[start] else [start]
            while pending:
                item = pending.pop()
                if item not in met:
                    met[item] = None
                    pending += reversed(self.down[item])
        return list(met)

    def order(self) -> None:
        """Order each layer by the mean place of the neighbours above, then below, and so on; the order with the fewest
        crossings stays."""
        best, fewest = [list(layer) for layer in self.layers], self._crossings()
        for sweep in range(_SWEEPS):
            if not fewest:
                break
            downwards = sweep % 2 == 0
            beside = self.up if downwards else self.down
            place = {item: at for layer in self.layers for item, at in _places(layer)}
            for layer in self.layers if downwards else self.layers[::-1]:
                means = {
                    item: sum(place[other] for other in beside[item]) / len(beside[item])
                    if beside[item]
                    else place[item]
                    for item in layer
                }
                layer.sort(key=means.__getitem__)
                place.update(_places(layer))
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(layer) for layer in self.layers], crossings
        self.layers = best

    def _crossings(self) -> int:
        total = 0
        for upper, lower in pairwise(self.layers):
            place = {item: number for number, item in enumerate(lower)}
            seen: list[int] = []
            for item in upper:
                ends = sorted(place[other] for other in self.down[item])
                total += sum(len(seen) - bisect_right(seen, end) for end in ends)
                for end in ends:
                    insort(seen, end)
        return total

    def placed(self) -> Layout:
        """Positions for the order there is."""
        x = [0.0] * len(self.row)
        for layer in self.layers:
            for item, left in zip(layer, self._packed(layer), strict=True):
                x[item] = left
        for pull in range(_PULLS):
            downwards = pull % 2 == 0
            for layer in self.layers if downwards else self.layers[::-1]:
                self._pull(layer, x, downwards, both=pull >= _PULLS - 2)
        left = min((x[item] - self.widths[item] / 2 for item in range(len(x))), default=0.0)
        right = max((x[item] + self.widths[item] / 2 for item in range(len(x))), default=0.0)
        x = [at - left for at in x]
        tops, heights, top = [], [], 0.0
        for layer in self.layers:
            tops.append(top)
            heights.append(max((self.sizes[item][1] for item in layer if item < len(self.sizes)), default=0.0))
            top += heights[-1] + ROW_GAP
        centres = tuple(
            (x[node], tops[self.row[node]] + heights[self.row[node]] / 2) for node in range(len(self.sizes))
        )
        paths = tuple(self._path(first, last, x, centres, tops, heights) for first, last in self.edges)
        return Layout(centres, paths, right - left, max(0.0, top - ROW_GAP))

    def _packed(self, layer: Sequence[int]) -> list[float]:
        """Positions side by side, from nought."""
        at, result = 0.0, []
        for number, item in enumerate(layer):
            at += self._distance(layer[number - 1], item) if number else 0.0
            result.append(at)
        return result

    def _distance(self, left: int, right: int) -> float:
        return (self.widths[left] + self.widths[right]) / 2 + GAP

    def _pull(self, layer: Sequence[int], x: list[float], downwards: bool, both: bool) -> None:
        """Move a layer's items towards their neighbours."""
        wanted, weights = [], []
        for item in layer:
            beside = [*self.up[item], *self.down[item]] if both else (self.up if downwards else self.down)[item]
            wanted.append(sum(x[other] for other in beside) / len(beside) if beside else x[item])
            weights.append((_STRAIGHT if item >= len(self.sizes) else 1.0) if beside else 0.1)
        offsets = self._packed(layer)
        targets = [want - offset for want, offset in zip(wanted, offsets, strict=True)]
        for item, level, offset in zip(layer, rising(targets, weights), offsets, strict=True):
            x[item] = level + offset

    def _path(
        self,
        first: int,
        last: int,
        x: Sequence[float],
        centres: Sequence[Point],
        tops: Sequence[float],
        heights: Sequence[float],
    ) -> tuple[Point, ...]:
        points = [(x[first], centres[first][1] + self.sizes[first][1] / 2)]
        for row in range(self.row[first] + 1, self.row[last]):
            at = x[self.passing[first, row]]
            points += [(at, tops[row]), (at, tops[row] + heights[row])]
        points.append((x[last], centres[last][1] - self.sizes[last][1] / 2))
        inner = range(1, len(points) - 1)
        bends = [
            points[i]
            for i in inner
            if not abs(points[i - 1][0] - points[i][0]) + abs(points[i + 1][0] - points[i][0]) < 1.0
        ]
        return (points[0], *bends, points[-1])


def _places(layer: Sequence[int]) -> list[tuple[int, float]]:
    """How far to the right each item stands in its layer, from 0 to 1."""
    return [(item, (number + 0.5) / len(layer)) for number, item in enumerate(layer)]


def rising(targets: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values nearest to `targets` (in weighted squares) of which none is below the one before it: isotonic
    regression by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for target, weight in zip(targets, weights, strict=True):
        mean, total, count = target, weight, 1
        while pools and pools[-1][0] > mean:
            before, heavy, many = pools.pop()
            mean = (mean * total + before * heavy) / (total + heavy)
            total, count = total + heavy, count + many
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
