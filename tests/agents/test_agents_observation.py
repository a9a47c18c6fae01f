"""Sizes from spaces, the compact form of an observation, and batches."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rlflow_tvm.agents.observation import ObservationSizes, collate, compact
from rlflow_tvm.errors import AgentError


@pytest.fixture
def reset(toy):
    env = toy.ToyRewriteEnv(length=6, num_locations=8)
    return env.reset(seed=0)[0], ObservationSizes.from_space(env.observation_space)


def test_sizes_come_from_the_space_alone(reset):
    assert reset[1] == ObservationSizes(
        num_operators=5,
        node_features=2,
        edge_features=2,
        num_rules=4,
        num_locations=8,
        nodes_per_location=4,
        keys_per_location=3,
    )
    assert reset[1].stop_rule == 3


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Dict({"graph": spaces.Discrete(2)})])
def test_other_spaces_are_refused(space):
    with pytest.raises(AgentError, match="not a rewriting environment"):
        ObservationSizes.from_space(space)


def test_compact_keeps_exactly_the_legal_pairs(reset):
    observation, sizes = reset
    kept = compact(observation, sizes)
    assert np.array_equal(
        np.stack([kept.site_rules, kept.site_locations], axis=1), np.argwhere(observation["location_mask"])
    )
    assert np.array_equal(kept.site_nodes, observation["location_nodes"][observation["location_mask"] == 1])
    assert (kept.site_rules[9], kept.site_locations[9]) == (1, 3)
    assert 2 not in kept.site_rules


def test_a_masked_rule_loses_its_sites_and_stop_has_one_location(reset):
    observation, sizes = reset
    observation["rule_mask"][0] = 0
    observation["location_mask"][3] = 1
    kept = compact(observation, sizes)
    assert kept.site_rules.tolist() == [1] * 6 + [3]
    assert kept.site_locations.tolist() == [0, 1, 2, 3, 4, 5, 0]
    observation["rule_mask"][3] = 0
    assert 3 not in compact(observation, sizes).site_rules


def test_a_rule_without_a_location_is_an_error(reset):
    observation, sizes = reset
    observation["rule_mask"][2] = 1
    with pytest.raises(AgentError, match=r"rule 2 .* no location"):
        compact(observation, sizes)


def test_an_observation_of_other_sizes_is_an_error(reset, toy):
    observation, sizes = reset
    other = toy.ToyRewriteEnv(num_locations=5).reset(seed=0)[0]
    with pytest.raises(AgentError, match="train anew"):
        compact(other, sizes)
    observation["graph"].nodes[0, 0] = 5
    with pytest.raises(AgentError, match="operators below 5"):
        compact(observation, sizes)


def test_an_observation_is_kept_when_the_environment_overwrites_its_arrays(reset):
    observation, sizes = reset
    kept = compact(observation, sizes)
    before = kept.nodes.copy(), kept.edges.copy(), kept.edge_links.copy(), kept.site_nodes.copy()
    for array in (*observation["graph"], observation["location_nodes"]):
        array[...] = 0
    after = kept.nodes, kept.edges, kept.edge_links, kept.site_nodes
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_graph_without_edges_may_say_none(reset):
    observation, sizes = reset
    observation["graph"] = spaces.GraphInstance(observation["graph"].nodes, None, None)
    kept = compact(observation, sizes)
    assert kept.edges.shape == (0, 2)
    assert kept.edge_links.shape == (0, 2)


def test_collate_numbers_nodes_sites_and_pairs(random_observation):
    rng = np.random.default_rng(0)
    parts = [random_observation(rng, nodes=n, edges=e, sites=s) for n, e, s in ((3, 0, 4), (1, 0, 0), (5, 9, 30))]
    batch = collate(parts)
    assert batch.kind_counts.tolist() == [3, 1, 5]
    assert batch.graph_kinds.tolist() == list(range(9))
    assert batch.graph_sizes.tolist() == [1] * 9
    assert batch.site_offsets.tolist() == [0, 5, 6, 37]
    for index, (part, start) in enumerate(zip(parts, (0, 3, 4), strict=True)):
        own = slice(batch.site_offsets[index], batch.site_offsets[index + 1])
        pairs = batch.site_pair[own]
        assert batch.pair_rule[pairs].tolist() == part.site_rules.tolist()
        assert set(batch.pair_graph[pairs].tolist()) == {index}
        ends = [*batch.member_offsets.tolist(), len(batch.member_nodes)]
        for site, nodes in zip(range(own.start, own.stop), part.site_nodes, strict=True):
            members = batch.member_nodes[ends[site] : ends[site + 1]].tolist()
            assert members == [node + start for node in nodes.tolist() if node >= 0]
    assert batch.pair_sizes.tolist() == np.bincount(batch.site_pair.numpy()).tolist()
