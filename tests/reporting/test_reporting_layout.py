"""Layered layouts: nothing overlaps, edges lead down, and what has no crossing is drawn without."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rlflow_tvm.reporting.layout import GAP, ROW_GAP, layered, rising


def boxes(count: int) -> list[tuple[float, float]]:
    return [(50.0, 20.0)] * count


def random_graph(count: int, seed: int) -> list[tuple[int, int]]:
    """Each node but the first reads one or two of the eight before it, some read the first too."""
    rng = np.random.default_rng(seed)
    edges = {(int(rng.integers(max(0, n - 8), n)), n) for n in range(1, count) for _ in range(2)}
    return sorted(edges | {(0, n) for n in range(10, count, 37)})


def test_chain_is_a_straight_line():
    layout = layered(boxes(4), [(0, 1), (1, 2), (2, 3)])
    assert [x for x, _ in layout.centres] == [25.0] * 4
    assert [y for _, y in layout.centres] == [10.0 + n * (20.0 + ROW_GAP) for n in range(4)]
    assert (layout.width, layout.height) == (50.0, 4 * 20.0 + 3 * ROW_GAP)


def test_diamond_is_symmetric():
    (top, left, right, bottom) = layered(boxes(4), [(0, 1), (0, 2), (1, 3), (2, 3)]).centres
    assert left[1] == right[1]
    assert abs(left[0] - right[0]) == pytest.approx(50.0 + GAP)
    assert top[0] == pytest.approx((left[0] + right[0]) / 2)
    assert bottom[0] == pytest.approx(top[0])


def test_twisted_pairs_are_untwisted():
    """Two chains, given so that the order of the numbers would cross them."""
    edges = [(0, 3), (1, 2), (2, 4), (3, 5)]
    centres = layered(boxes(6), edges).centres
    assert centres[0][0] < centres[1][0]
    assert centres[3][0] < centres[2][0]
    assert centres[5][0] < centres[4][0]


def test_late_input_stands_above_its_reader():
    centres = layered(boxes(5), [(0, 2), (2, 3), (1, 4), (3, 4)]).centres
    assert centres[1][1] == centres[3][1]


def test_what_is_late_stands_above_its_reader():
    """A chain of two that only the last node reads: one that reads nothing would be pulled down alone."""
    edges = [(0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    plain, late = layered(boxes(6), edges).centres, layered(boxes(6), edges, {3}).centres
    assert plain[3][1] == plain[2][1]
    assert late[3][1] == late[4][1]
    assert late[1][1] == late[2][1]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_overlaps_and_edges_lead_down(seed):
    count = 300
    rng = np.random.default_rng(seed)
    sizes = [(float(w), float(h)) for w, h in zip(rng.uniform(30, 200, count), rng.uniform(15, 40, count), strict=True)]
    edges = random_graph(count, seed)
    layout = layered(sizes, edges)
    rows: dict[float, list[int]] = {}
    for node, (_, y) in enumerate(layout.centres):
        rows.setdefault(y, []).append(node)
    for row in rows.values():
        row.sort(key=lambda node: layout.centres[node][0])
        for left, right in pairwise(row):
            distance = layout.centres[right][0] - layout.centres[left][0]
            assert distance >= (sizes[left][0] + sizes[right][0]) / 2 + GAP - 1e-6
    for (first, last), path in zip(edges, layout.paths, strict=True):
        assert path[0] == pytest.approx((layout.centres[first][0], layout.centres[first][1] + sizes[first][1] / 2))
        assert path[-1] == pytest.approx((layout.centres[last][0], layout.centres[last][1] - sizes[last][1] / 2))
        assert all(a[1] < b[1] for a, b in pairwise(path))
    assert all(0 <= x <= layout.width and 0 <= y <= layout.height for x, y in layout.centres)


def test_size_of_a_large_model():
    layout = layered(boxes(900), random_graph(900, 0))
    assert len(layout.centres) == 900


def test_edge_backwards_is_refused():
    with pytest.raises(ValueError, match="later"):
        layered(boxes(2), [(1, 0)])


def test_nothing_is_laid_out_as_nothing():
    layout = layered([], [])
    assert (layout.centres, layout.width, layout.height) == ((), 0.0, 0.0)


def test_rising_is_isotonic_regression():
    assert rising([1.0, 2.0, 3.0], [1.0] * 3) == [1.0, 2.0, 3.0]
    assert rising([3.0, 1.0], [1.0, 1.0]) == [2.0, 2.0]
    assert rising([3.0, 1.0], [3.0, 1.0]) == [2.5, 2.5]
    assert rising([4.0, 2.0, 0.0, 5.0], [1.0] * 4) == [2.0, 2.0, 2.0, 5.0]
