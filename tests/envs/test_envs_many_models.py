"""Several models in one training."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from fake_cost import FakeCostModel
from small_models import LANES, MODELS

from rlflow_tvm.envs import GraphRewriteEnv, ManyModelsEnv, RewriteProblem
from rlflow_tvm.errors import EnvError
from rlflow_tvm.passes import CATALOGUE, Plan, RuleSet, default_rules
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search.settled import exhausted


def make_env(name: str, rules: RuleSet | None = None) -> GraphRewriteEnv:
    problem = RewriteProblem(MODELS[name](), FakeCostModel(), rules or default_rules(LANES))
    return GraphRewriteEnv(problem=problem, horizon=5)


@pytest.fixture
def env() -> ManyModelsEnv:
    return ManyModelsEnv({name: make_env(name) for name in MODELS})


def test_model_is_chosen_by_the_seed(env):
    chosen = {}
    for seed in range(30):
        env.reset(seed=seed)
        chosen[seed] = env.model
    assert set(chosen.values()) == set(MODELS)
    for seed in (7, 3, 21):
        env.reset(seed=seed)
        assert env.model == chosen[seed]


def test_models_change_from_episode_to_episode_after_one_seed(env):
    def episodes() -> list[str]:
        env.reset(seed=1)
        names = []
        for _ in range(12):
            env.reset()
            names.append(env.model)
        return names

    first = episodes()
    assert len(set(first)) > 1
    assert episodes() == first


def test_steps_go_to_the_current_model(env):
    observation, _ = env.reset(seed=0)
    other = {name: len(e.plan) for name, e in env._envs.items() if name != env.model}
    rule, location = np.argwhere(observation["location_mask"][:-1])[0]
    observation, *_ = env.step(np.array([rule, location]))
    assert len(env.current.plan) == 1
    assert env.observation_space.contains(observation)
    assert {name: len(e.plan) for name, e in env._envs.items() if name != env.model} == other


def test_the_last_info_holds_the_cheapest_graph_of_the_episode(env):
    """Its first one among them: what is worse is nothing to go on from."""
    rng = np.random.default_rng(0)
    seen = set()
    for seed in range(12):
        observation, info = env.reset(seed=seed)
        found, over = [(info["run_secs"], env.current.plan)], False
        while not over:
            assert "episode" not in info
            actions = np.argwhere(observation["location_mask"])
            observation, _, terminated, truncated, info = env.step(actions[rng.integers(len(actions))])
            found.append((info["run_secs"], env.current.plan))
            over = terminated or truncated
        secs, plan = min(found, key=lambda pair: pair[0])
        told = info["episode"]
        assert (told["model"], told["run_secs"], told["step"]) == (env.model, secs, found.index((secs, plan)))
        stored = json.loads(json.dumps(told["plan"]))
        assert Plan.of(stored) == plan
        seen.add(len(plan))
    assert len(seen) > 2
    assert 0 in seen


def test_what_is_told_of_the_cheapest_graph_is_measured_where_steps_are_predicted():
    problem = RewriteProblem(MODELS["algebra"](), FakeCostModel(wrong_by=0.4), default_rules(LANES))
    env = ManyModelsEnv({"one": GraphRewriteEnv(problem=problem, horizon=5)})
    rng, wrong, others = np.random.default_rng(0), 0, 0
    for seed in range(24):
        observation, info = env.reset(seed=seed)
        found, over = [(info["run_secs"], env.current.state)], False
        while not over:
            actions = np.argwhere(observation["location_mask"])
            observation, _, terminated, truncated, info = env.step(actions[rng.integers(len(actions))])
            found.append((info["run_secs"], env.current.state))
            over = terminated or truncated
        told, state = min(found, key=lambda pair: pair[0])
        confirmed = problem.cost(state, confirmed=True).run_secs
        best = info["episode"]
        assert best["run_secs"] <= min(confirmed, found[0][0])
        state = found[best["step"]][1]
        assert Plan.of(best["plan"]) == state.plan
        assert best["run_secs"] == (problem.cost(state, confirmed=True).run_secs if best["step"] else found[0][0])
        wrong += confirmed != told
        others += best["run_secs"] < min(confirmed, found[0][0])
    assert wrong
    assert others  # the one that seemed cheapest was none, and hid another


def test_an_episode_begins_at_a_remembered_graph(env):
    """With its whole horizon, and rewards for what is cheaper than that graph alone."""
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=3)
    over = False
    while not over:
        actions = np.argwhere(observation["location_mask"][:-1])
        observation, _, terminated, truncated, info = env.step(actions[rng.integers(len(actions))])
        over = terminated or truncated
    start = json.loads(json.dumps(info["episode"]))
    for seed in range(4):
        _, first = env.reset(seed=seed, options={"start": start})
        assert (env.model, first["run_secs"]) == (start["model"], start["run_secs"])
        assert env.current.plan == Plan.of(start["plan"])
        assert env.current.best_cost.run_secs == min(start["run_secs"], env.current.problem.start_secs)
        assert env.current._steps == 0
    env.reset(seed=3)
    assert len(env.current.plan) == 0
    with pytest.raises(EnvError, match="no model other here"):
        env.reset(seed=0, options={"start": {**start, "model": "other"}})


def test_episodes_begin_at_the_end_of_a_given_plan():
    """With their whole horizon; rewards, in percent of that graph's cost, and the limit are reckoned from there."""
    problem = RewriteProblem(MODELS["conv_net"](), FakeCostModel(), default_rules(LANES))
    settled = exhausted(problem.start, TERMINATING_FAMILIES["layout"])
    begin_secs = problem.cost(settled).run_secs
    assert begin_secs < problem.start_secs
    inner = GraphRewriteEnv(problem=problem, horizon=1, begin=settled.plan, reward="improvement", limit=1.001)
    env = ManyModelsEnv({"one": inner})
    observation, info = env.reset(seed=0)
    assert (inner.plan, info["run_secs"], inner.best_cost.run_secs) == (settled.plan, begin_secs, begin_secs)
    rewards, ends = set(), set()
    for action in np.argwhere(observation["location_mask"][:-1]):
        env.reset(seed=0)
        _, reward, terminated, truncated, info = env.step(action)
        saved = begin_secs - info["run_secs"]
        if info["run_secs"] <= 1.001 * begin_secs:
            assert reward == pytest.approx(100 * (0.9 * max(0.0, saved) + 0.1 * saved) / begin_secs)
            rewards.add(round(reward, 6))
        assert (info["run_secs"] > 1.001 * begin_secs) <= terminated
        assert terminated or truncated
        ends.add(terminated)
        assert info["episode"]["run_secs"] == min(begin_secs, info["run_secs"])
    assert len(rewards) > 1
    assert ends == {True, False}
    env.reset(seed=0, options={"start": {"model": "one", "plan": dataclasses.asdict(problem.start.plan)}})
    assert (len(inner.plan), inner.best_cost.run_secs) == (0, problem.start_secs)
    cost = FakeCostModel(fails=lambda node: node.op == "relax.nn.conv2d" and node.value.attrs.out_layout != "NCHW")
    with pytest.raises(EnvError, match="cannot be priced"):
        GraphRewriteEnv(problem=RewriteProblem(MODELS["conv_net"](), cost, default_rules(LANES)), begin=settled.plan)


def test_a_replay_counts_from_where_its_episode_began():
    problem = RewriteProblem(MODELS["conv_net"](), FakeCostModel(), default_rules(LANES))
    settled = exhausted(problem.start, TERMINATING_FAMILIES["layout"])
    env = GraphRewriteEnv(problem=problem, horizon=3, begin=settled.plan)
    observation, _ = env.reset(seed=0)
    observation, *_ = env.step(np.argwhere(observation["location_mask"][:-1])[0])
    env.replay(env.plan)
    ends = []
    for _ in range(2):
        observation, _, _, truncated, _ = env.step(np.argwhere(observation["location_mask"][:-1])[0])
        ends.append(truncated)
    assert ends == [False, True]  # the second and the third of three steps
    env.replay(problem.start.plan)  # it does not lead through there
    assert (env.run_secs, env.best_cost.run_secs) == (problem.start_secs, problem.start_secs)
    _, _, terminated, truncated, _ = env.step([env.rule_names.index("block_conv"), 0])
    assert not terminated
    assert not truncated


def test_where_a_remembered_graph_cannot_be_priced_the_episode_begins_at_its_model(env, monkeypatch, caplog):
    """As on a machine on which a kernel of it fails."""
    name = next(iter(MODELS))
    observation, _ = env.reset(seed=0, options={"start": {"model": name}})
    rule, location = np.argwhere(observation["location_mask"][:-1])[0]
    env.step(np.array([rule, location]))
    start = {"model": name, "run_secs": 1.0, "plan": json.loads(json.dumps(dataclasses.asdict(env.current.plan)))}
    failed = dataclasses.replace(env.current.cost, run_secs=float("inf"), failed=("conv2d",))
    monkeypatch.setattr(RewriteProblem, "surest_cost", lambda self, state: failed)
    env.reset(seed=1, options={"start": start, "patience": 3})
    assert (env.model, len(env.current.plan)) == (name, 0)
    assert "not at a remembered graph: the plan's graph cannot be priced: kernel conv2d fails" in caplog.text


def test_an_episode_begins_at_a_model_that_is_told(env):
    assert env.models == tuple(MODELS)
    for name in MODELS:
        for seed in range(3):
            _, info = env.reset(seed=seed, options={"start": {"model": name}})
            assert (env.model, info["run_secs"], len(env.current.plan)) == (name, env.current.problem.start_secs, 0)


def test_no_models_are_refused():
    with pytest.raises(EnvError, match="at least one"):
        ManyModelsEnv({})


def test_models_with_other_rules_are_refused():
    other = make_env("algebra", RuleSet(CATALOGUE[:3], LANES))
    with pytest.raises(EnvError, match="one rule set"):
        ManyModelsEnv({"a": make_env("conv_net"), "b": other})


def test_close_closes_all():
    class Closing(GraphRewriteEnv):
        closed = False

        def close(self) -> None:
            self.closed = True

    problem = RewriteProblem(MODELS["algebra"](), FakeCostModel(), default_rules(LANES))
    envs = {name: Closing(problem=problem) for name in "ab"}
    ManyModelsEnv(envs).close()
    assert all(env.closed for env in envs.values())


def test_patience_is_handed_on(env):
    rng, waited = np.random.default_rng(1), []
    for seed in range(8):
        observation, info = env.reset(seed=seed, options={"patience": 2})
        secs, over = [info["run_secs"]], False
        while not over:
            actions = np.argwhere(observation["location_mask"])
            observation, _, terminated, truncated, info = env.step(actions[rng.integers(len(actions))])
            secs.append(info["run_secs"])
            over = terminated or truncated
        if not terminated and len(secs) - 1 < env.current.horizon:
            waited.append(len(secs) - 1 - int(np.argmin(secs)))
    assert set(waited) == {2}
