"""Sites of dreamt graphs: those of the real ones, followed as the counts change, against a plain loop."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.world.sites import Newcomers, Sites
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


@pytest.fixture
def newcomers(sizes) -> Newcomers:
    """What is known of one tells which two rules it is of; of rule 4 none ever came, of rule 3 only with rule 0."""
    applied, rules = np.array([[a, r] for a in range(sizes.num_rules) for r in range(5)] * 2).T
    kept = (rules != 4) & ((rules != 3) | (applied == 0))
    known = np.zeros((kept.sum(), sizes.num_known), np.float32)
    known[:, 0], known[:, 1] = applied[kept], rules[kept]
    known[:, 2] = np.arange(len(known)) >= len(known) // 2
    return Newcomers(known, applied[kept], rules[kept], sizes.num_rules)


def test_the_rewritten_goes_then_what_shares_its_nodes_then_any(observations, sizes, places, newcomers):
    rng = np.random.default_rng(2)
    for _ in range(50):
        before = Sites.of(observations, sizes, places)
        chosen = before.offsets[:-1] + rng.integers(0, np.diff(before.offsets))
        counts = rng.integers(0, 6, before.counts.shape)
        drawn: list[np.ndarray] = []

        def uniform(number: int, drawn=drawn) -> np.ndarray:
            drawn.append(rng.random(number))
            return drawn[-1]

        after = before.after(chosen, counts, newcomers, uniform)
        assert np.array_equal(after.counts, counts)
        assert len(after.known) == len(after.nodes) == counts.sum()
        for graph in range(len(counts)):
            struck = {node for node in before.nodes[chosen[graph]].tolist() if node >= 0}
            for rule in range(sizes.num_rules):
                was = np.flatnonzero((before.graphs == graph) & (before.rules == rule))
                now = np.flatnonzero((after.graphs == graph) & (after.rules == rule))
                left = [row for row in was.tolist() if row != chosen[graph]]
                left.sort(key=lambda row: (bool(struck & set(before.nodes[row].tolist())), drawn[0][row]))
                kept = sorted(left[: counts[graph, rule]])
                assert np.array_equal(after.nodes[now[: len(kept)]], before.nodes[kept])
                assert np.array_equal(after.known[now[: len(kept)]], before.known[kept])
                new = now[len(kept) :]
                assert (after.nodes[new] == -1).all()
                applied = before.rules[chosen[graph]]
                if rule < 4:
                    told = [0 if rule == 3 else applied, rule]
                    assert (after.known[new, :2] == told).all()
                else:
                    assert (after.known[new] == 0).all()


def test_new_sites_are_drawn_from_all_that_came(newcomers):
    ones = np.ones(1000, np.int64)
    drawn = newcomers.known(ones, 2 * ones, np.random.default_rng(0).random(1000))
    assert 0.4 < drawn[:, 2].mean() < 0.6
    assert newcomers.known(ones[:0], ones[:0], np.zeros(0)).shape == (0, drawn.shape[1])


def test_newcomers_are_sites_of_a_sort_that_grew_at_places_that_were_not_there(observations, sizes, places):
    """Sites whose surroundings alone changed are the old ones."""
    first = observations[2]
    where = first.site_places.copy()
    old, grown = where[:-1], 1000 + np.arange(len(where) - 1)
    moved = np.where(np.arange(len(where)) % 2 == 0, where[:, 1], -where[:, 1])
    second = dataclasses.replace(first, site_places=np.stack([where[:, 0], moved], axis=1))
    episode = Episode(observations=[first, second], sites=[3, 0], rewards=[0.0, 0.0])
    assert not Newcomers.of([episode], sizes, places).number
    third = dataclasses.replace(
        first,
        site_rules=np.concatenate([first.site_rules[:-1], first.site_rules]),
        site_places=np.concatenate([np.stack([old[:, 0], grown], axis=1), where]),
    )
    found = Newcomers.of([dataclasses.replace(episode, observations=[first, third])], sizes, places)
    assert found.number == len(old)
    applied, rules = np.full(len(old), first.site_rules[3], np.int64), first.site_rules[:-1].astype(np.int64)
    expected = {row.tobytes() for row in places.known(np.stack([old[:, 0], grown], axis=1))}
    drawn = found.known(applied, rules, np.random.default_rng(0).random(len(rules)))
    assert {row.tobytes() for row in drawn} <= expected
    assert drawn.any()


def test_sites_are_numbered_without_the_holes_of_the_masks(random_observation):
    kept = random_observation(np.random.default_rng(0), sites=30)
    numbers = [site_number(kept, site) for site in range(kept.num_sites)]
    for rule in np.unique(kept.site_rules):
        assert [number for number, each in zip(numbers, kept.site_rules, strict=True) if each == rule] == list(
            range((kept.site_rules == rule).sum())
        )
    assert (np.array(numbers) != kept.site_locations).any()
