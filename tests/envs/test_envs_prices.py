"""Prices that turn out wrong when the next graph is priced, as those of kernels that were measured once."""

from __future__ import annotations

import dataclasses

import pytest
from env_tools import legal_actions
from fake_cost import FakeCostModel
from small_models import LANES, conv_net

from rlflow_tvm.agents.collect import collect_episode, episode_rng
from rlflow_tvm.agents.observation import ObservationSizes
from rlflow_tvm.agents.policy import UniformPolicy
from rlflow_tvm.agents.savings import savings
from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.passes import default_rules

MISSING = 0.2


class TooCheapAtFirst(FakeCostModel):
    """A fifth of a graph's price is missing until another one is priced."""

    def __init__(self) -> None:
        super().__init__()
        self.priced: dict[int, None] = {}

    def cost(self, mod, *, reach=None, confirmed=False):
        found = super().cost(mod, reach=reach, confirmed=confirmed)
        self.priced.setdefault(mod.structural_hash)
        if confirmed or mod.structural_hash != next(reversed(self.priced)):
            return found
        return dataclasses.replace(found, run_secs=(1.0 - MISSING) * found.run_secs)


@pytest.fixture
def env() -> GraphRewriteEnv:
    problem = RewriteProblem(conv_net(), TooCheapAtFirst(), default_rules(LANES))
    return GraphRewriteEnv(problem=problem, horizon=8, reward="relative")


def true_secs(env: GraphRewriteEnv) -> float:
    return env.problem.cost(env.state, confirmed=True).run_secs


def test_the_step_that_finds_it_out_does_not_pay_for_it(env):
    observation, info = env.reset(seed=0)
    start, before = info["run_secs"], true_secs(env)
    for number in range(4):
        met = set(env.problem.cost_model.priced)
        observation, reward, *_, info = env.step(legal_actions(observation)[number])
        assert env.state.structural_hash not in met, "a graph that was met is no test"
        assert info["run_secs"] == pytest.approx((1.0 - MISSING) * true_secs(env))
        assert info["run_secs_before"] == before
        assert reward == pytest.approx(100 * (before - info["run_secs"]) / start)
        before = true_secs(env)


def test_what_was_cheapest_by_a_wrong_price_hides_nothing(env):
    observation, _ = env.reset(seed=0)
    first = true_secs(env)
    env.step(legal_actions(observation)[0])
    assert env.best_cost.run_secs == env.run_secs < first
    following = true_secs(env)
    observation, _ = env._observe()
    env.step(legal_actions(observation)[0])
    assert env.best_cost.run_secs == min(following, env.run_secs)


def test_an_episode_keeps_what_was_found_out(env):
    policy = UniformPolicy(ObservationSizes.from_space(env.observation_space))
    seen = []
    env_step = env.step

    def step(action):
        told = env_step(action)
        seen.append(true_secs(env))
        return told

    env.step = step
    episode = collect_episode(env, policy, episode_rng(0, 0))
    assert len(episode) > 3
    assert episode.run_secs[1:-1] == seen[:-1]
    assert len(savings(episode)) == len(episode)
