"""The graph encoder: what reaches what, and that batching and node order change nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlflow_tvm.agents.encoder import GraphEncoder
from rlflow_tvm.agents.observation import collate


@pytest.fixture
def encoder(sizes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GraphEncoder(sizes, hidden=16, rounds=2)


def encode(encoder, *observations):
    with torch.no_grad():
        return encoder(collate(observations))


def chain(observation, length=6):
    """The observation's first nodes as a chain 0 -> 1 -> ..."""
    links = np.array([(i, i + 1) for i in range(length - 1)], dtype=np.int32)
    return dataclasses.replace(observation, edge_links=links, edges=observation.edges[: length - 1])


def test_graphs_without_edges_and_single_nodes_have_embeddings(encoder, random_observation):
    rng = np.random.default_rng(0)
    for nodes, edges in ((1, 0), (1, 1), (4, 0)):
        h, readout = encode(encoder, random_observation(rng, nodes=nodes, edges=edges))
        assert h.shape == (nodes, 16)
        assert readout.shape == (1, 16)
        assert torch.isfinite(h).all()
        assert torch.isfinite(readout).all()


def test_a_batch_gives_what_its_members_give_alone(encoder, random_observation):
    rng = np.random.default_rng(1)
    parts = [random_observation(rng, nodes=n, edges=e) for n, e in ((5, 8), (1, 0), (9, 0), (7, 20))]
    h, readout = encode(encoder, *parts)
    alone = [encode(encoder, part) for part in parts]
    torch.testing.assert_close(h, torch.cat([one[0] for one in alone]), rtol=0, atol=1e-5)
    torch.testing.assert_close(readout, torch.cat([one[1] for one in alone]), rtol=0, atol=1e-5)


def test_renumbering_nodes_renumbers_embeddings_and_keeps_the_readout(encoder, random_observation):
    rng = np.random.default_rng(2)
    observation = random_observation(rng, nodes=9, edges=14)
    order, edge_order = rng.permutation(9), rng.permutation(14)
    place = np.argsort(order)
    renumbered = dataclasses.replace(
        observation,
        nodes=observation.nodes[order],
        edges=observation.edges[edge_order],
        edge_links=place[observation.edge_links[edge_order]].astype(np.int32),
    )
    (h, readout), (h2, readout2) = encode(encoder, observation), encode(encoder, renumbered)
    torch.testing.assert_close(h[torch.from_numpy(order)], h2, rtol=0, atol=1e-5)
    torch.testing.assert_close(readout, readout2, rtol=0, atol=1e-5)


@pytest.mark.parametrize("changed", [0, 5])
def test_two_rounds_reach_two_edges_both_ways(encoder, random_observation, changed):
    observation = chain(random_observation(np.random.default_rng(3), nodes=6, edges=10))
    nodes = observation.nodes.copy()
    nodes[changed, 1:] += 1.0
    before, _ = encode(encoder, observation)
    after, _ = encode(encoder, dataclasses.replace(observation, nodes=nodes))
    moved = (before - after).abs().amax(dim=1) > 0
    assert moved.tolist() == [abs(i - changed) <= 2 for i in range(6)]


def test_direction_and_edge_features_enter(encoder, random_observation):
    observation = chain(random_observation(np.random.default_rng(4), nodes=6, edges=10))
    turned = dataclasses.replace(observation, edge_links=observation.edge_links[:, ::-1].copy())
    reshaped = dataclasses.replace(observation, edges=observation.edges + 1.0)
    _, readout = encode(encoder, observation)
    for other in (turned, reshaped):
        assert (readout - encode(encoder, other)[1]).abs().max() > 1e-4


def test_every_parameter_gets_a_gradient(encoder, random_observation):
    observation = random_observation(np.random.default_rng(5), nodes=40, edges=60)
    h, readout = encoder(collate([observation]))
    (h.square().sum() + readout.square().sum()).backward()
    silent = [name for name, value in encoder.named_parameters() if value.grad is None or not value.grad.any()]
    assert silent == []
