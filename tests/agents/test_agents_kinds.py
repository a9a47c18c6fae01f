"""Nodes and sites that look the same are worked out once: outputs and gradients are those of all by themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from toy_candidates import ToyCandidateEnv
from toy_env import ToyRewriteEnv

from rlflow_tvm.agents.alike import JoinedKinds, NodeKinds, alike
from rlflow_tvm.agents.candidate import observation as candidate_observation
from rlflow_tvm.agents.candidate.config import CandidateConfig
from rlflow_tvm.agents.candidate.observation import CandidateSizes
from rlflow_tvm.agents.candidate.policy import CandidatePolicy
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.observation import CompactObservation, ObservationSizes, collate
from rlflow_tvm.agents.policy import TwoStepPolicy


def repeated(observation: CompactObservation, times: int) -> CompactObservation:
    """The observation's graph and sites, so often beside each other, stop once."""
    count, sites = len(observation.nodes), observation.num_sites - 1
    order = np.argsort(np.tile(np.arange(sites), times), kind="stable")  # rules ascend

    def tiled(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([np.concatenate([rows[:-1]] * times)[order], rows[-1:]])

    shifts = np.repeat(np.arange(times) * count, sites)[:, None]
    nodes = np.concatenate([observation.site_nodes[:-1]] * times)
    return dataclasses.replace(
        observation,
        nodes=np.concatenate([observation.nodes] * times),
        edges=np.concatenate([observation.edges] * times),
        edge_links=np.concatenate([observation.edge_links + count * i for i in range(times)]).astype(np.int32),
        site_rules=tiled(observation.site_rules),
        site_locations=tiled(observation.site_locations),
        site_nodes=np.concatenate([np.where(nodes < 0, -1, nodes + shifts)[order], observation.site_nodes[-1:]]).astype(
            np.int32
        ),
        site_places=tiled(observation.site_places),
        site_known=tiled(observation.site_known),
    )


def chain(length: int, changed: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes 0 -> 1 -> ... that are alike for themselves, but for one; edges and links."""
    nodes = np.ones((length, 2), np.float32)
    if changed is not None:
        nodes[changed, 1] = 2.0
    links = np.array([(i, i + 1) for i in range(length - 1)])
    return nodes, np.ones((length - 1, 1), np.float32), links


def compared(policy: torch.nn.Module, merged, apart) -> None:
    """Outputs and gradients of a policy on two batches of the same observations."""
    found = policy(merged), policy(apart)
    for name in ("log_probs", "values", "entropy"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), atol=2e-5, rtol=1e-4)
    gradients = []
    for each in found:
        policy.zero_grad()
        (each.log_probs[::3].sum() + each.values.square().sum() + each.entropy.sum()).backward()
        gradients.append({name: value.grad for name, value in policy.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        torch.testing.assert_close(
            gradients[0][name], expected, atol=2e-4 * (1 + float(expected.abs().max())), rtol=1e-3
        )


def test_equal_blocks_are_worked_out_once(policy, random_observation):
    rng = np.random.default_rng(0)
    blocks = [random_observation(rng, nodes=n, edges=e, sites=s) for n, e, s in ((6, 8, 9), (1, 0, 1), (4, 7, 20))]
    seen = [repeated(block, times) for block, times in zip(blocks, (3, 5, 2), strict=True)]
    merged, apart = collate(seen, policy.encoder.reach), collate(seen)
    assert len(apart.operator) == 6 * 3 + 1 * 5 + 4 * 2
    assert len(merged.operator) == 6 + 1 + 4
    assert len(merged.kind_known) == 10 + 2 + 21
    assert merged.kinds.sizes.sum() == apart.kinds.sizes.sum() == 27 + 5 + 40 + 3
    compared(policy, merged, apart)


def test_graphs_of_a_batch_share_what_looks_the_same(policy, random_observation):
    rng = np.random.default_rng(1)
    one, other = random_observation(rng, nodes=7, edges=9), random_observation(rng, nodes=5, edges=4)
    seen = [one, repeated(one, 2), other, one]
    merged = collate(seen, policy.encoder.reach)
    assert len(merged.operator) == 7 + 5
    assert merged.kind_counts.tolist() == [7, 7, 5, 7]
    compared(policy, merged, collate(seen))


def two_step() -> tuple[ToyRewriteEnv, TwoStepPolicy, Any]:
    env = ToyRewriteEnv(length=9, random_start=True)
    policy = TwoStepPolicy(ObservationSizes.from_space(env.observation_space), 16, 2)
    torch.nn.init.normal_(policy.heads.location_head.weight)
    return env, policy, collate


def of_candidates() -> tuple[ToyCandidateEnv, CandidatePolicy, Any]:
    env = ToyCandidateEnv(length=6, random_start=True)
    sizes = CandidateSizes.from_space(env.observation_space)
    policy = CandidatePolicy(sizes, CandidateConfig(hidden=16, heads=2, rounds=2))
    torch.nn.init.normal_(policy.score_head.weight)
    return env, policy, candidate_observation.collate


@pytest.mark.parametrize("make", [two_step, of_candidates])
def test_episodes(make):
    torch.manual_seed(0)
    env, policy, joined = make()
    seen = [each for n in range(3) for each in collect_episode(env, policy, episode_rng(0, n)).observations]
    merged, apart = policy.collate(seen), joined(seen)
    assert merged.graph_kinds.max() < apart.graph_kinds.max()
    assert len(merged.kind_known) <= len(apart.kind_known)
    compared(policy, merged, apart)


@pytest.mark.parametrize("changed", [0, 6])
def test_nodes_are_told_apart_as_far_as_the_network_sees(changed):
    """Of the others in a chain those that are nearer to an end than that."""
    for reach in range(4):
        kinds = NodeKinds.of(*chain(13, changed), reach).of_node
        ends = {(min(i, reach), min(12 - i, reach)) for i in range(13)}
        near = {i for i in range(13) if abs(i - changed) <= reach}
        assert all((kinds == kinds[i]).sum() == 1 for i in near)
        assert len(set(kinds[[i for i in range(13) if i not in near]])) <= len(ends)
        beyond = [i for i in range(13) if i not in near and reach <= i <= 12 - reach]
        assert len(set(kinds[beyond])) <= 1


def test_direction_and_edges_tell_nodes_apart():
    nodes, edges, links = chain(2)
    assert len(set(NodeKinds.of(nodes, edges, links, 1).of_node)) == 2
    pairs = np.concatenate([links, links + 2])
    assert len(NodeKinds.of(np.tile(nodes, (2, 1)), np.ones((2, 1), np.float32), pairs, 1).sizes) == 2
    assert len(NodeKinds.of(np.tile(nodes, (2, 1)), np.array([[1.0], [2.0]], np.float32), pairs, 1).sizes) == 4
    # twice the same producer is not once
    twice = NodeKinds.of(
        np.ones((4, 2), np.float32), np.ones((3, 1), np.float32), np.array([(0, 1), (2, 3), (2, 3)]), 1
    )
    assert len(twice.sizes) == 4


def test_graphs_without_edges():
    kinds = NodeKinds.of(np.ones((3, 2), np.float32), np.zeros((0, 1), np.float32), np.zeros((0, 2), np.int32), 3)
    assert kinds.sizes.tolist() == [3]
    joined = JoinedKinds.of([kinds, kinds])
    assert joined.kinds.tolist() == [0, 0]
    assert joined.starts.tolist() == [0, 1, 2]
    assert [each.shape for each in (*joined.heard, *joined.edges)] == [(0, 2), (0, 2), (0, 1), (0, 1)]


def test_rows_that_are_alike_lie_in_order():
    first, kind = alike(np.array([3, 0, 3, 200, 0]), np.array([[1.0], [2.0], [1.0], [1.0], [2.5]], np.float32))
    assert [(3, 0, 3, 200, 0)[i] for i in first] == [0, 0, 3, 200]
    assert kind[0] == kind[2]
    assert len(set(kind)) == 4
