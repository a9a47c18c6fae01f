"""Sites of dreamt graphs: those of the real ones, followed as the counts change, against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.world.sites import Sites
from rlflow_tvm.agents.world.vision import site_number


@pytest.fixture
def observations(random_observation):
    rng = np.random.default_rng(0)
    return [random_observation(rng, sites=int(sites)) for sites in (9, 1, 30, 14)]


@pytest.fixture
def places(observations) -> Places:
    places = Places()
    for each in observations[:3]:
        places.add(each.site_places, np.arange(len(each.site_places), dtype=float))
    return places


def test_they_are_the_real_graphs(observations, sizes, places):
    found = Sites.of(observations, sizes, places)
    for number, seen in enumerate(observations):
        rows = slice(*found.offsets[number : number + 2])
        assert np.array_equal(found.rules[rows], seen.site_rules)
        assert (found.graphs[rows] == number).all()
        assert np.array_equal(found.nodes[rows], seen.site_nodes)
        assert np.array_equal(found.known[rows], places.known(seen.site_places))
        for rule in range(sizes.num_rules):
            own = found.locations[rows][seen.site_rules == rule]
            assert own.tolist() == list(range(len(own)))


def test_some_of_them_are_those_graphs_in_that_order(observations, sizes, places):
    order = np.array([2, 0, 2])
    found, expected = (
        Sites.of(observations, sizes, places)[order],
        Sites.of([observations[number] for number in order], sizes, places),
    )
    assert all(np.array_equal(value, getattr(expected, name)) for name, value in vars(found).items())


def test_the_rewritten_goes_then_what_shares_its_nodes_then_any_and_new_ones_are_unknown(observations, sizes, places):
    rng = np.random.default_rng(2)
    for _ in range(50):
        before = Sites.of(observations, sizes, places)
        chosen = before.offsets[:-1] + rng.integers(0, np.diff(before.offsets))
        counts = rng.integers(0, 6, before.counts.shape)
        drawn = rng.random(len(before.rules))
        after = before.after(chosen, counts, drawn)
        assert np.array_equal(after.counts, counts)
        assert len(after.known) == len(after.nodes) == counts.sum()
        for graph in range(len(counts)):
            struck = {node for node in before.nodes[chosen[graph]].tolist() if node >= 0}
            for rule in range(sizes.num_rules):
                was = np.flatnonzero((before.graphs == graph) & (before.rules == rule))
                now = np.flatnonzero((after.graphs == graph) & (after.rules == rule))
                left = [row for row in was.tolist() if row != chosen[graph]]
                left.sort(key=lambda row: (bool(struck & set(before.nodes[row].tolist())), drawn[row]))
                kept = sorted(left[: counts[graph, rule]])
                assert np.array_equal(after.nodes[now[: len(kept)]], before.nodes[kept])
                assert np.array_equal(after.known[now[: len(kept)]], before.known[kept])
                assert (after.nodes[now[len(kept) :]] == -1).all()
                assert (after.known[now[len(kept) :]] == 0).all()


def test_sites_are_numbered_without_the_holes_of_the_masks(random_observation):
    kept = random_observation(np.random.default_rng(0), sites=30)
    numbers = [site_number(kept, site) for site in range(kept.num_sites)]
    for rule in np.unique(kept.site_rules):
        assert [number for number, each in zip(numbers, kept.site_rules, strict=True) if each == rule] == list(
            range((kept.site_rules == rule).sum())
        )
    assert (np.array(numbers) != kept.site_locations).any()
