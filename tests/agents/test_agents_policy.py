"""The two-step policy: masks, order of sites, joint probabilities, entropy, sampling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlflow_tvm.agents.heads import segment_log_softmax
from rlflow_tvm.agents.observation import ObservationSizes, collate, compact
from rlflow_tvm.agents.policy import TwoStepPolicy


def test_segment_log_softmax_is_log_softmax_in_each_segment():
    logits = torch.tensor([1.0, -2.0, 300.0, 299.0, 0.5, -1e4])
    segment = torch.tensor([0, 0, 1, 1, 2, 1])
    result = segment_log_softmax(logits, segment, 3)
    for part in ([0, 1], [2, 3, 5], [4]):
        torch.testing.assert_close(result[part], torch.log_softmax(logits[part], dim=0))


def test_masked_actions_have_probability_zero_and_the_rest_sums_to_one(policy, sizes, random_observation):
    rng = np.random.default_rng(0)
    for sites in (0, 1, 5, 40, 60):
        observation = random_observation(rng, sites=sites)
        probabilities = policy.probabilities(observation)
        legal = np.zeros(probabilities.shape, dtype=bool)
        legal[observation.site_rules, observation.site_locations] = True
        assert probabilities.shape == (sizes.num_rules, sizes.num_locations)
        assert (probabilities[~legal] == 0.0).all()
        assert (probabilities[legal] > 0.0).all()
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-6)


def test_masks_of_a_real_observation_are_kept(toy):
    env = toy.ToyRewriteEnv(length=4)
    sizes = ObservationSizes.from_space(env.observation_space)
    policy = TwoStepPolicy(sizes, hidden=8, rounds=1)
    observation, _ = env.reset(seed=0)
    probabilities = policy.probabilities(compact(observation, sizes))
    assert np.array_equal(probabilities > 0, observation["location_mask"] == 1)


def test_the_order_of_sites_does_not_matter(policy, random_observation):
    rng = np.random.default_rng(1)
    for _ in range(10):
        observation = random_observation(rng, nodes=12, edges=18, sites=30)
        before = policy.probabilities(observation)
        # within each rule the sites change places: same locations, other nodes behind them
        order = np.arange(observation.num_sites)
        for rule in np.unique(observation.site_rules):
            own = np.flatnonzero(observation.site_rules == rule)
            order[own] = rng.permutation(own)
        moved = {name: getattr(observation, name)[order] for name in ("site_nodes", "site_places", "site_known")}
        after = policy.probabilities(dataclasses.replace(observation, **moved))
        rules, locations = observation.site_rules, observation.site_locations
        assert np.abs(after[rules, locations] - before[rules, locations][order]).max() < 1e-6
        assert np.abs(after.sum(axis=1) - before.sum(axis=1)).max() < 1e-6


def test_the_order_of_a_sites_nodes_does_not_matter(policy, random_observation):
    observation = random_observation(np.random.default_rng(2), sites=30)
    turned = dataclasses.replace(observation, site_nodes=observation.site_nodes[:, ::-1].copy())
    assert np.abs(policy.probabilities(observation) - policy.probabilities(turned)).max() < 1e-6


def test_sites_are_told_apart_by_their_nodes(policy, random_observation):
    probabilities = policy.probabilities(random_observation(np.random.default_rng(3), sites=40))
    spread = [row[row > 0].std() for row in probabilities[:-1]]
    assert max(spread) > 1e-3


def test_the_joint_is_the_product_of_the_two_steps(policy, random_observation):
    rng = np.random.default_rng(4)
    observation = random_observation(rng, sites=25)
    with torch.no_grad():
        output = policy(collate([observation]))
    dense = policy.probabilities(observation)
    rules = np.unique(observation.site_rules)
    np.testing.assert_allclose(output.rule_log_probs.exp().numpy(), dense.sum(axis=1)[rules], atol=1e-6)
    given_rule = dense / np.maximum(dense.sum(axis=1, keepdims=True), 1e-300)
    np.testing.assert_allclose(
        output.location_log_probs.exp().numpy(),
        given_rule[observation.site_rules, observation.site_locations],
        atol=1e-5,
    )
    # stop has one location, so its second step is certain
    assert output.location_log_probs[-1] == 0.0


def test_entropy_is_the_joint_distributions_and_splits_into_the_two_steps(policy, random_observation):
    rng = np.random.default_rng(5)
    observations = [random_observation(rng, sites=sites) for sites in (0, 3, 30)]
    with torch.no_grad():
        output = policy(collate(observations))
    for observation, entropy in zip(observations, output.entropy.tolist(), strict=True):
        p = policy.probabilities(observation)
        joint = -(p[p > 0] * np.log(p[p > 0])).sum()
        of_rule = p.sum(axis=1)
        split = -(of_rule[of_rule > 0] * np.log(of_rule[of_rule > 0])).sum()
        for row, weight in zip(p, of_rule, strict=True):
            given = row[row > 0] / max(weight, 1e-300)
            split -= weight * (given * np.log(given)).sum()
        assert entropy == pytest.approx(joint, abs=1e-5)
        assert entropy == pytest.approx(split, abs=1e-5)


def test_a_batch_gives_what_its_members_give_alone(policy, random_observation):
    rng = np.random.default_rng(6)
    parts = [random_observation(rng, nodes=n, edges=e, sites=s) for n, e, s in ((1, 0, 0), (9, 12, 50), (4, 0, 7))]
    with torch.no_grad():
        together, alone = policy(collate(parts)), [policy(collate([part])) for part in parts]
    for name in ("log_probs", "rule_log_probs", "location_log_probs", "values", "entropy"):
        joined = torch.cat([getattr(one, name) for one in alone])
        torch.testing.assert_close(getattr(together, name), joined, rtol=0, atol=1e-5)


def test_sampled_actions_follow_the_probabilities(policy, random_observation):
    observation = random_observation(np.random.default_rng(7), nodes=3, edges=3, sites=4)
    rng, draws = np.random.default_rng(8), 600
    counts = np.zeros(observation.num_sites)
    for _ in range(draws):
        site, log_prob, _ = policy.choose(observation, rng)
        counts[site] += 1
    probabilities = policy.probabilities(observation)[observation.site_rules, observation.site_locations]
    assert np.abs(counts / draws - probabilities).max() < 4 * np.sqrt(0.25 / draws)
    assert log_prob == pytest.approx(np.log(probabilities[site]), abs=1e-5)


def test_without_a_generator_the_likeliest_rule_and_then_its_likeliest_location_are_taken(policy, random_observation):
    rng = np.random.default_rng(9)
    for _ in range(20):
        observation = random_observation(rng, sites=25)
        site, _, _ = policy.choose(observation, None)
        p = policy.probabilities(observation)
        rule = int(p.sum(axis=1).argmax())
        assert (observation.site_rules[site], observation.site_locations[site]) == (rule, int(p[rule].argmax()))


def test_acting_and_updating_agree_on_log_probabilities(policy, random_observation):
    rng = np.random.default_rng(10)
    observations = [random_observation(rng, sites=int(rng.integers(0, 40))) for _ in range(12)]
    acted = [policy.choose(observation, rng) for observation in observations]
    batch = collate(observations)
    with torch.no_grad():
        output = policy(batch)
    for index, (site, log_prob, value) in enumerate(acted):
        assert float(output.log_probs[batch.site_offsets[index] + site]) == pytest.approx(log_prob, abs=1e-5)
        assert float(output.values[index]) == pytest.approx(value, abs=1e-5)


def test_every_parameter_gets_a_gradient(policy, random_observation):
    rng = np.random.default_rng(11)
    batch = collate([random_observation(rng, nodes=20, edges=30, sites=40) for _ in range(4)])
    output = policy(batch)
    (output.log_probs.square().sum() + output.values.square().sum()).backward()
    # softmax is unmoved by a constant, so the heads' biases alone have none
    silent = {
        name
        for name, value in policy.named_parameters()
        if value.grad is None or value.grad.abs().max() < 1e-4 * (1 + value.abs().max())
    }
    assert silent <= {"heads.location_head.bias", "heads.rule_head.bias"}
