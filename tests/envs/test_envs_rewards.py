"""Rewards, worked out by hand, and the cost above which an episode is lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from env_tools import make_env, random_legal, rule_action, stop_action
from small_models import MODELS, conv_chain

from rlflow_tvm.cost import GraphCost
from rlflow_tvm.envs.rewards import (
    REWARDS,
    EndToEndReward,
    IncrementalReward,
    MixedReward,
    RelativeReward,
    ShapedReward,
    Step,
)
from rlflow_tvm.errors import CostError, EnvError


def cost(run_secs: float, bytes_moved: int = 0, flops: int = 0, kernels: int = 1, peak: int = 0) -> GraphCost:
    return GraphCost(run_secs, 0.0, kernels, flops, bytes_moved, peak)


def step(before: GraphCost, after: GraphCost, start: GraphCost, number: int = 1, **changes) -> Step:
    def never() -> float:
        raise AssertionError("nothing asks for end-to-end times here")

    secs = dict.fromkeys(("start_secs", "first_secs", "after_secs"), never)
    fields = {"best": start, "terminated": False, "truncated": False, **secs}
    return Step(before, after, start, number=number, **{**fields, **changes})


def test_incremental_reward_is_milliseconds_saved():
    assert IncrementalReward()(step(cost(5e-3), cost(3.5e-3), cost(9e-3))) == pytest.approx(1.5)


def test_mixed_reward_by_hand():
    before, after, start = cost(8.0, 300), cost(7.0, 360), cost(10.0, 400)
    expected = 0.8 * 10.0 + 0.2 * -15.0
    assert MixedReward()(step(before, after, start)) == pytest.approx(expected)
    assert MixedReward(alpha=0.3)(step(before, after, start)) == pytest.approx(0.3 * 10.0 + 0.7 * -15.0)
    assert MixedReward(alpha=1.0)(step(before, after, start)) == RelativeReward()(step(before, after, start))
    assert MixedReward()(step(cost(8.0), cost(7.0), cost(10.0))) == pytest.approx(8.0)  # a graph that moves nothing


@pytest.mark.parametrize("alpha", [-0.1, 1.5, math.nan])
def test_mixed_reward_refuses_a_share_that_is_none(alpha):
    with pytest.raises(EnvError, match="between 0 and 1"):
        MixedReward(alpha)


def test_end_to_end_reward_measures_every_nth_step_and_at_the_end():
    reward = EndToEndReward(every=3, between=0.1)
    times = iter([8.0, 9.0, 6.0])
    asked = []

    def after_secs() -> float:
        asked.append(next(times))
        return asked[-1]

    def give(number: int, **ends: bool) -> float:
        whole = {"start_secs": lambda: 10.0, "first_secs": lambda: 10.0, "after_secs": after_secs}
        return reward(step(cost(1), cost(1), cost(1), number, **whole, **ends))

    reward.begin()
    assert [give(n) for n in (1, 2, 3, 4, 5, 6)] == pytest.approx([0.1, 0.1, 20.0, 0.1, 0.1, -10.0])
    assert give(7, terminated=True) == pytest.approx(30.0)
    assert asked == [8.0, 9.0, 6.0]
    reward.begin()
    times = iter([5.0])
    assert give(1, truncated=True) == pytest.approx(50.0)  # against the start again, not against the last episode's 6.0


def test_end_to_end_reward_counts_from_the_episodes_first_graph():
    reward = EndToEndReward(every=1)
    times = {"start_secs": lambda: 10.0, "first_secs": lambda: 6.0}
    reward.begin()
    assert reward(step(cost(1), cost(1), cost(1), 1, after_secs=lambda: 5.0, **times)) == pytest.approx(10.0)
    assert reward(step(cost(1), cost(1), cost(1), 2, after_secs=lambda: 5.5, **times)) == pytest.approx(-5.0)


def test_end_to_end_reward_pays_nothing_for_what_a_remembered_graph_had_saved():
    env = make_env(conv_chain(), reward=EndToEndReward(every=1))
    env.reset(seed=0)
    env.step(rule_action(env, "block_conv"))
    remembered = env.plan
    env.reset(options={"plan": remembered})
    assert env.step(stop_action(env))[1] == 0.0
    env.reset(options={"plan": remembered})
    fork = env.fork()
    rewards = [each.step(rule_action(each, "block_conv"))[1] for each in (env, fork)]
    assert rewards == pytest.approx([100 * 34 / 202] * 2)
    env.reset()
    assert env.step(rule_action(env, "block_conv"))[1] == pytest.approx(100 * 34 / 202)
    env.replay(remembered)  # that is an episode from the start: what the plan saves is its own
    assert env.step(stop_action(env))[1] == pytest.approx(100 * 34 / 202)


def test_an_episode_improves_on_the_graph_that_it_begins_at():
    """Though that costs more than the model."""
    env = make_env(conv_chain(), blocked_conv=150.0)
    env.reset(seed=0)
    model = env.run_secs
    env.step(rule_action(env, "block_conv"))
    env.reset(options={"plan": env.plan})
    assert env.best_cost.run_secs == env.run_secs > model


def test_environment_measures_end_to_end_and_once_a_graph():
    env = make_env(conv_chain(), reward=EndToEndReward(every=2, between=0.5))
    env.reset(seed=0)
    _, first, *_ = env.step(rule_action(env, "block_conv"))
    _, second, *_ = env.step(rule_action(env, "block_conv"))
    cost_model = env.problem.cost_model
    assert first == 0.5
    assert second == pytest.approx(100 * 68 / 202)  # the fake end-to-end time is the graph's cost
    assert cost_model.run == 2  # the start and the graph after two steps
    _, last, terminated, *_ = env.step(stop_action(env))
    assert terminated
    assert (last, cost_model.run) == (0.0, 2)


def test_a_graph_that_cannot_be_run_as_a_whole_counts_as_the_limit(monkeypatch, caplog):
    """Where the first can; where nothing can be, that is told."""
    env = make_env(conv_chain(), reward=EndToEndReward(every=1))
    env.reset(seed=0)
    cost_model, first = env.problem.cost_model, env.problem.end_to_end(env.state)

    def fails(mod):
        raise CostError("it cannot be linked")

    monkeypatch.setattr(cost_model, "end_to_end", fails)
    *_, info = told = env.step(rule_action(env, "block_conv"))
    assert told[1] == pytest.approx(100 * (1 - env.limit))
    assert "end_to_end_secs" not in info
    assert "counts as the limit: it cannot be linked" in caplog.text
    monkeypatch.undo()
    _, reward, *_ = env.step(rule_action(env, "block_conv"))
    assert reward == pytest.approx(100 * (env.limit - env.problem.end_to_end(env.state) / first))
    other = make_env(conv_chain(), reward=EndToEndReward(every=1))
    other.reset(seed=0)
    monkeypatch.setattr(other.problem.cost_model, "end_to_end", fails)
    with pytest.raises(CostError, match="cannot be linked"):
        other.step(rule_action(other, "block_conv"))


def test_an_episode_goes_on_from_a_graph_that_cannot_be_run_as_a_whole(monkeypatch):
    """It was remembered for the sum of its kernels: it counts as that share of the beginning, and is tried once."""
    env = make_env(conv_chain(), reward=EndToEndReward(every=1))
    env.reset(seed=0)
    first, model = env.problem.end_to_end(env.state), env.run_secs
    env.step(rule_action(env, "block_conv"))
    remembered = env.plan
    tried = []

    def fails(mod):
        tried.append(mod)
        raise CostError("it cannot be linked")

    other = make_env(conv_chain(), reward=EndToEndReward(every=1))
    other.problem.end_to_end(other.state)
    monkeypatch.setattr(other.problem.cost_model, "end_to_end", fails)
    for _ in range(2):
        other.reset(seed=0, options={"plan": remembered})
        cheaper = first * other.run_secs / model
        _, reward, *_, info = other.step(rule_action(other, "block_conv"))
        assert reward == pytest.approx(100 * (cheaper - other.limit * cheaper) / first)
        assert "end_to_end_secs" not in info
    assert len(tried) == 2, "the remembered graph and the one after it"


def test_fork_goes_on_with_a_reward_of_its_own():
    env = make_env(conv_chain(), reward=EndToEndReward(every=1))
    env.reset(seed=0)
    env.step(rule_action(env, "block_conv"))
    fork = env.fork()
    _, there, *_ = fork.step(rule_action(fork, "block_conv"))
    _, here, *_ = env.step(rule_action(env, "block_conv"))
    assert here == there == pytest.approx(100 * 34 / 202)


@pytest.mark.parametrize("metric", ["flops", "bytes_moved", "kernels", "run_secs", "peak_bytes"])
def test_shaping_adds_the_discounted_change_of_the_potential(metric):
    start, before, after = map(cost, (10, 8, 6), (100, 80, 90), (50, 40, 20), (20, 16, 10), (40, 42, 30))
    base = RelativeReward()(step(before, after, start))
    saved = {
        "flops": (20, 60), "bytes_moved": (20, 10), "kernels": (20, 50), "run_secs": (20, 40), "peak_bytes": (-5, 25),
    }[metric]  # fmt: skip
    reward = ShapedReward(metric=metric, gamma=0.9)
    assert reward(step(before, after, start)) == pytest.approx(base + 0.9 * saved[1] - saved[0])
    assert reward(step(before, after, start, terminated=True)) == pytest.approx(base - saved[0])


@pytest.mark.parametrize("seed", range(3))
def test_shaping_changes_no_return_of_a_whole_episode(seed):
    """Discounted, the potentials of an episode that terminates cancel: Ng, Harada and Russell's theorem."""
    rng = np.random.default_rng(seed)
    gamma, length = 0.95, 6
    costs = [cost(*(float(x) for x in rng.uniform(1, 10, 1)), flops=int(rng.integers(1, 99))) for _ in range(length)]
    totals = []
    for reward in (RelativeReward(), ShapedReward(gamma=gamma)):
        totals.append(
            sum(
                gamma**t * reward(step(costs[t], costs[t + 1], costs[0], t + 1, terminated=t == length - 2))
                for t in range(length - 1)
            )
        )
    assert totals[0] == pytest.approx(totals[1])


def test_shaping_refuses_a_metric_that_a_search_does_not_know():
    with pytest.raises(EnvError, match="no potential is made of 'beauty'"):
        ShapedReward(metric="beauty")


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_reward_runs_an_episode(name):
    env = make_env(conv_chain(), reward=name, horizon=4)
    observation, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(4):
        observation, reward, terminated, truncated, _ = env.step(random_legal(observation, rng))
        assert math.isfinite(reward)
    assert truncated != terminated


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["conv_net", "transformer_block"])
def test_rewards_add_up_to_the_relative_gain(name, seed):
    env = make_env(MODELS[name]())
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    start, total = info["run_secs"], 0.0
    for _ in range(10):
        before = env.run_secs
        observation, reward, *_, info = env.step(random_legal(observation, rng))
        assert reward == pytest.approx(100 * (before - info["run_secs"]) / start)
        total += reward
    assert total == pytest.approx(100 * (start - env.run_secs) / start)
    assert env.run_secs == info["run_secs"] == env.problem.cost(env.state).run_secs


def test_reward_of_one_known_step():
    env = make_env(conv_chain(), blocked_conv=60.0)
    _, info = env.reset(seed=0)
    assert info["run_secs"] == pytest.approx(202e-6)  # two convolutions at 100, bias and relu at 1
    _, reward, _, _, info = env.step(rule_action(env, "block_conv"))
    assert info["run_secs"] == pytest.approx(168e-6)  # one at 60 with two transforms at 3
    assert reward == pytest.approx(100 * 34 / 202)
    assert info["rule"] == "block_conv"


@pytest.mark.parametrize("reward", [{}, {"reward": EndToEndReward(every=1)}], ids=["by its kernels", "as a whole"])
def test_graph_that_costs_too_much_ends_the_episode(reward):
    env = make_env(conv_chain(), blocked_conv=200.0, limit=1.3, **reward)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(rule_action(env, "block_conv"))
    assert info["run_secs"] == pytest.approx(308e-6)  # of 202
    assert (terminated, truncated) == (True, False)
    assert reward == pytest.approx(-30.0)  # counted as the limit
    within = make_env(conv_chain(), blocked_conv=200.0, limit=1.6)
    within.reset(seed=0)
    _, reward, terminated, *_ = within.step(rule_action(within, "block_conv"))
    assert not terminated
    assert reward == pytest.approx(-100 * 106 / 202)


@pytest.mark.parametrize("limit", [1.0, 0.5, -1.0])
def test_limit_below_the_first_graph_is_refused(limit):
    with pytest.raises(EnvError, match="must lie above 1"):
        make_env(conv_chain(), limit=limit)


def test_improvement_is_mostly_what_beats_the_best():
    env = make_env(conv_chain(), reward="improvement", blocked_conv=98.0)
    env.reset(seed=0)
    rewards = [
        env.step(rule_action(env, rule))[1]
        for rule in (
            "block_conv",  # 2 less and two transforms at 3: 206 instead of 202
            "unpack_after_binary", "unpack_after_unary",
            "block_conv",  # 210
            "cancel_pack_of_unpack",  # 204
        )
    ]  # fmt: skip
    assert rewards == pytest.approx([0.1 * 100 * change / 202 for change in (-4, 0, 0, -4, 6)])
    better = make_env(conv_chain(), reward="improvement")
    better.reset(seed=0)
    first, second = (better.step(rule_action(better, "block_conv"))[1] for _ in range(2))
    assert (first, second) == (pytest.approx(100 * 34 / 202), pytest.approx(100 * 34 / 202))


def test_improvement_adds_up_to_the_gains_of_the_best_and_the_last_graph():
    env = make_env(reward="improvement")
    rng = np.random.default_rng(8)
    observation, info = env.reset(seed=0)
    start = best = info["run_secs"]
    total = 0.0
    for _ in range(15):
        observation, reward, *_, info = env.step(random_legal(observation, rng))
        total, best = total + reward, min(best, info["run_secs"])
    assert env.best_cost.run_secs == best < start
    assert total == pytest.approx(100 * (0.9 * (start - best) + 0.1 * (start - info["run_secs"])) / start)
