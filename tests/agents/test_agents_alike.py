"""The policies in two steps, over candidates and over a dream's latents: told the same of the same places, new ones are
alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_candidates import ToyCandidateEnv
from toy_env import ToyRewriteEnv
from training_checks import known_of

from rlflow_tvm.agents.candidate.config import CandidateConfig
from rlflow_tvm.agents.candidate.observation import CandidateSizes
from rlflow_tvm.agents.candidate.policy import CandidatePolicy
from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.places import Places
from rlflow_tvm.agents.policy import TwoStepPolicy, UniformPolicy
from rlflow_tvm.agents.world.controller import Controller, LatentObservation

TOY = {"length": 6, "random_start": True}
SIZES = ObservationSizes.from_space(ToyRewriteEnv(**TOY).observation_space)


@pytest.fixture(scope="module")
def places() -> Places:
    """What a random agent found out."""
    env, random = ToyRewriteEnv(**TOY), UniformPolicy(SIZES)
    return known_of([collect_episode(env, random, episode_rng(1, number)) for number in range(12)])


@pytest.mark.parametrize("told", ["nothing", "known", "by rule", "imagined"])
def test_they_draw_alike_and_take_the_same_for_the_likeliest(places, told):
    tell = {
        "nothing": Places().known,
        "known": places.known,
        "by rule": lambda where: places.known(where, by_rule=True),
        "imagined": lambda where: places.imagined(where, 7919),
    }[told]
    env, candidates, rng = ToyRewriteEnv(**TOY), ToyCandidateEnv(**TOY), np.random.default_rng(0)
    one = TwoStepPolicy(SIZES, 8, 1)
    config = CandidateConfig(hidden=8, heads=2, rounds=1)
    two = CandidatePolicy(CandidateSizes.from_space(candidates.observation_space), config)
    three = Controller(SIZES, 5, 8)
    for policy in (one, three):
        torch.nn.init.zeros_(policy.heads.rule_head.weight)
        torch.nn.init.zeros_(policy.heads.location_head.weight)
    torch.nn.init.zeros_(two.score_head.weight)
    likeliest = set()
    for seed in range(12):
        (here, _), (same, _), over = env.reset(seed=seed), candidates.reset(seed=seed), False
        while not over:
            seen, offered = one.compact(here, tell), two.compact(same, tell)
            np.testing.assert_array_equal(offered.site_places, seen.site_places)
            dreamt = LatentObservation(np.zeros(5, np.float32), seen.site_rules, seen.site_locations, seen.site_known)
            drawn = one.probabilities(seen)[seen.site_rules, seen.site_locations]
            np.testing.assert_allclose(two.probabilities(offered)[offered.site_numbers], drawn, atol=1e-6)
            in_dreams = three.probabilities(dreamt)[dreamt.site_rules, dreamt.site_locations]
            np.testing.assert_allclose(in_dreams, drawn, atol=1e-6)
            *_, second, most = np.sort([0.0, *np.bincount(seen.site_rules, drawn)])
            if most > second + 1e-4:  # of rules that are as likely rounding takes one
                likeliest.add(site := one.choose(seen, None)[0])
                assert two.choose(offered, None)[0] == three.choose(dreamt, None)[0] == site
            number = int(rng.integers(len(drawn)))
            here, *_ = env.step(one.action(seen, number))
            same, _, terminated, truncated, _ = candidates.step(two.action(offered, number))
            over = terminated or truncated
    assert told == "nothing" or len(likeliest) > 1
