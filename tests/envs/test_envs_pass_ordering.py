"""The environment in which passes are put in order."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import tvm
from gymnasium.utils.env_checker import check_env

from rlflow_tvm.envs import PassOrderingEnv
from rlflow_tvm.envs.ordering_states import OrderingStates, Recent
from rlflow_tvm.envs.pass_ordering import METRICS, kernel_count, operation_count
from rlflow_tvm.errors import CostError, EnvError
from rlflow_tvm.frontend.corpus import corpus_module
from rlflow_tvm.passes import ordering
from rlflow_tvm.passes.ordering import PASSES, apply_pass
from tests.small_models import TARGET, conv_chain, wasteful


def made(**options) -> PassOrderingEnv:
    return PassOrderingEnv({"wasteful": wasteful(), "convs": conv_chain()}, **options)


def act(env: PassOrderingEnv, name: str):
    return env.step(env.passes.index(name))


def test_it_is_an_environment_of_gymnasiums():
    check_env(made(horizon=5), skip_render_check=True)
    by_name = gymnasium.make("rlflow_tvm.envs:rlflow_tvm/PassOrdering-v0", graphs={"g": wasteful()})
    by_name.reset(seed=0)
    assert by_name.action_space.n == len(PASSES) + 1


def test_an_episode_is_told_by_its_operations():
    env = made(reward="saving")
    observation, info = env.reset(options={"graph": "wasteful"})
    assert (info["operations"], info["transcendentals"], info["flops"]) == (6, 32, 2 * 2 * 4 * 6 * 8 + 64)
    assert observation[env.operators.index("relax.matmul")] == pytest.approx(np.log(3))
    observation, reward, terminated, truncated, info = act(env, "DeadCodeElimination")
    assert reward == pytest.approx(1 / 6)
    assert not terminated
    assert not truncated
    assert (info["operations"], info["transcendentals"]) == (5, 0)
    assert info["pass_secs"] > 0
    assert info["order"] == info["best_order"] == ("DeadCodeElimination",)
    assert observation[-METRICS] == pytest.approx(np.log(5 / 6))
    assert observation[-METRICS - 1] == pytest.approx(31 / 32)
    assert "83.3 %" in env.render()


def test_what_changed_nothing_is_masked_until_something_changes():
    env = made()
    env.reset(options={"graph": "wasteful"})
    act(env, "LambdaLift")
    masked = [*env.passes].index("LambdaLift")
    assert not env.action_masks()[masked]
    assert env.action_masks().sum() == len(PASSES)
    observation = act(env, "LambdaLift")[0]
    assert observation[len(env.operators) + masked] == 1
    act(env, "DeadCodeElimination")
    assert env.action_masks().all()


def test_a_pass_that_fails_changes_nothing_and_is_recorded(monkeypatch):
    @tvm.transform.module_pass(opt_level=0)
    def broken(_mod, _context):
        raise ValueError("it cannot be")

    monkeypatch.setitem(ordering.PASSES, "Broken", lambda: broken)
    env = made(passes=("Broken", "DeadCodeElimination"))
    env.reset(options={"graph": "wasteful"})
    info = act(env, "Broken")[4]
    assert "it cannot be" in info["refused"]
    assert (info["operations"], info["order"]) == (6, ())
    assert list(env.action_masks()) == [False, True, True]
    assert "it cannot be" in env.refusals["wasteful", "Broken"]


def test_stopping_is_worth_as_much_as_staying():
    returns = []
    for stop in (True, False):
        env = made(horizon=6, gamma=0.9)
        env.reset(options={"graph": "wasteful"})
        total, discount = 0.0, 1.0
        actions = ["DeadCodeElimination", *(["stop"] if stop else ["LambdaLift"] * 5)]
        for name in actions:
            action = len(env.passes) if name == "stop" else env.passes.index(name)
            _, reward, terminated, _, _ = env.step(action)
            total += discount * reward
            discount *= 0.9
        assert terminated
        returns.append(total)
    assert returns[0] == pytest.approx(returns[1])
    assert returns[0] == pytest.approx(-(5 / 6) * (1 - 0.9**6) / 0.1)


@pytest.mark.parametrize("reward", ["count", "saving"])
def test_shaping_adds_the_same_to_every_return(reward):
    """Potentials telescope: what is added to a return depends on where it began alone."""
    added = set()
    for order in (["DeadCodeElimination", "stop"], ["LambdaLift", "rules:transpose", "stop"], ["LambdaLift"] * 4):
        totals = []
        for shaping in (True, False):
            env = made(reward=reward, shaping=shaping, horizon=4, gamma=0.9)
            env.reset(options={"graph": "wasteful"})
            total = 0.0
            for number, name in enumerate(order):
                action = len(env.passes) if name == "stop" else env.passes.index(name)
                total += 0.9**number * env.step(action)[1]
            totals.append(total)
        added.add(round(totals[0] - totals[1], 9))
    assert added == {1.0}


def test_kernels_can_be_counted_instead():
    env = made(objective=kernel_count(TARGET), reward="saving")
    _, info = env.reset(options={"graph": "wasteful"})
    assert 0 < info["objective"] < info["operations"]
    assert act(env, "rules:transpose")[1] >= 0


def test_what_the_objective_cannot_be_told_of_is_refused():
    def objective(_mod, operations):
        if "relax.exp" in operations.counts:
            return float(operations.total)
        if operations.total == 5:
            raise CostError("it cannot be told")
        return float("inf")

    env = made(objective=objective, passes=("DeadCodeElimination", "rules:transpose", "EliminateCommonSubexpr"))
    env.reset(options={"graph": "wasteful"})
    assert "it cannot be told" in act(env, "DeadCodeElimination")[4]["refused"]
    assert "fails" in act(env, "rules:transpose")[4]["refused"]
    assert act(env, "EliminateCommonSubexpr")[4]["operations"] == 5
    with pytest.raises(EnvError, match="cannot be priced as it is"):
        env.reset(options={"graph": "convs"})


def test_random_episodes_end_where_their_orders_lead():
    graphs = {family: corpus_module(family, True, [2]) for family in ("gpt2", "resnet")}
    env = PassOrderingEnv(graphs, horizon=8)
    rng = np.random.default_rng(0)
    for name in graphs:
        env.reset(seed=0, options={"graph": name})
        ended = False
        while not ended:
            _, _, ended, _, info = env.step(int(rng.choice(np.flatnonzero(env.action_masks()[:-1]))))
        mod = graphs[name]
        for each in info["order"]:
            mod = apply_pass(mod, each)
        tvm.ir.assert_structural_equal(mod, env.module)
        assert info["best_objective"] <= info["objective"]


def test_a_forgotten_module_is_made_again():
    states = OrderingStates(operation_count)
    states._modules = Recent(1)
    start = wasteful()
    first = states.add(start)
    following = states.step(first, "DeadCodeElimination", start, ()).key
    assert states.step(first, "LambdaLift", start, ()).key == first
    assert states.facts(following, start, ("DeadCodeElimination",)).operations.total == 5
    assert len(states._modules) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"reward": "gold"}, "no reward is called 'gold'"),
        ({"passes": ("Nonesuch",)}, "no pass is called 'Nonesuch'"),
    ],
)
def test_what_cannot_be_is_told(options, told):
    with pytest.raises(EnvError, match=told):
        made(**options)
    with pytest.raises(EnvError, match="give one at least"):
        PassOrderingEnv({})
    with pytest.raises(EnvError, match="horizon 0: an episode needs at least one step"):
        made(horizon=0)
    env = made()
    with pytest.raises(EnvError, match="call reset first"):
        env.step(0)
    with pytest.raises(EnvError, match="no graph is called 'x'"):
        env.reset(options={"graph": "x"})
    env.reset()
    env.step(len(env.passes))
    with pytest.raises(EnvError, match="call reset"):
        env.step(0)


def test_a_graph_that_costs_nothing_is_refused():
    """By an objective of one's own; nothing could be left of it."""
    env = made(objective=lambda _mod, _operations: 0.0)
    with pytest.raises(EnvError, match="graph wasteful costs nothing by this objective"):
        env.reset(options={"graph": "wasteful"})


def test_a_graph_of_which_nothing_is_left_looks_like_it():
    """Not like one of which all is left."""
    env = made(objective=lambda _mod, operations: float(operations.total - 5), passes=("DeadCodeElimination",))
    before, info = env.reset(options={"graph": "wasteful"})
    assert info["objective"] > 0
    after, _, _, _, info = act(env, "DeadCodeElimination")
    assert info["objective"] == 0
    assert before[-3] == 0
    assert after[-3] < -10
    assert env.observation_space.contains(after)
