"""Searches: never worse than the start, the same twice, within their budget, and across plateaus."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_cost import COSTS, FakeCostModel
from small_models import LANES, MODELS, conv_chain, conv_net, module
from tvm.relax import op as rx

from rlflow_tvm.agents.places import Places
from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.errors import UsageError
from rlflow_tvm.passes import CATALOGUE, GraphState, RewriteAction, RuleSet, default_rules
from rlflow_tvm.search import (
    SEARCHES,
    Budget,
    FamilySearch,
    Greedy,
    RandomSearch,
    SearchResult,
    make_search,
    random_action,
)
from rlflow_tvm.search.agent_search import AgentSearch

PLATEAU = {**COSTS, "relax.layout_transform": 1.0}
"""With blocked convolutions at 98.5, blocking one of two costs 0.5 % more: only meeting transforms pay."""


LAYOUT = RuleSet(
    tuple(
        default_rules(LANES)[name]
        for name in (
            "block_conv", "unpack_after_unary", "unpack_after_binary", "pack_before_unary", "pack_before_binary",
            "cancel_pack_of_unpack", "cancel_unpack_of_pack",
        )
    ),
    LANES,
)  # fmt: skip
"""The rules that the figures below are worked out for."""

NAMES = (*SEARCHES, "agent")


def problem_of(mod, rules: RuleSet | None = None, **cost) -> RewriteProblem:
    return RewriteProblem(mod, FakeCostModel(**cost), rules or default_rules(LANES))


class Scripted:
    """A policy that plays what it is told, and stops where that is not legal; sampled episodes are random."""

    def __init__(self, rules: tuple[str, ...], names: tuple[str, ...]) -> None:
        self.rules, self.names = rules, names
        self.acted = 0
        self.drawn: list[list[int]] = []  # the episodes asked for, each time
        self.begun: list[int] = []
        self.told: list[tuple[int, float]] = []  # the rule of each action, and what it saved
        self._next = 0

    def fresh(self) -> Scripted:
        self.told.clear()
        return self

    def tried(self, observations: Any, actions: np.ndarray, saved: Any) -> None:
        assert len(observations) == len(actions) == len(saved)
        self.told += [(int(action[0]), each) for action, each in zip(actions, saved, strict=True)]

    def begin(self, number: int = 1) -> None:
        self.begun.append(number)

    def draw(self, observations: Any, rng: np.random.Generator, episodes: Any) -> np.ndarray:
        self.drawn.append(list(episodes))
        legal = [np.argwhere(each["location_mask"]) for each in observations]
        return np.stack([actions[int(rng.integers(len(actions)))] for actions in legal])

    def act(self, observation: dict[str, Any], deterministic: bool) -> np.ndarray:
        assert deterministic
        self.acted += 1
        rule = self.names.index(self.rules[self._next]) if self._next < len(self.rules) else len(self.names)
        self._next += 1
        return np.array([rule, 0])


def searches(problem: RewriteProblem) -> dict[str, Any]:
    names = tuple(rule.name for rule in problem.ruleset.rules)
    return {
        **{name: make_search(name) for name in SEARCHES},
        **{name: make_search(name, budget=Budget(400)) for name in ("backtracking", "beam", "variable-depth")},
        "random": RandomSearch(seed=3, budget=Budget(150), horizon=20),
        "agent": AgentSearch(
            Scripted(("block_conv", "unpack_after_binary"), names), seed=1, samples=2, horizon=15, settled=False
        ),
    }


@cache
def searched(name: str, model: str) -> tuple[RewriteProblem, SearchResult, list[tuple[int, int, float]]]:
    """What a search finds in a model, and what it tells on its way."""
    calls: list[tuple[int, int, float]] = []
    problem = problem_of(MODELS[model]())
    return problem, searches(problem)[name].run(problem, lambda *call: calls.append(call)), calls


def run(name: str, mod, rules: RuleSet | None = None, **cost) -> SearchResult:
    problem = problem_of(mod, rules, **cost)
    return searches(problem)[name].run(problem)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("search", NAMES)
def test_result_is_never_worse_than_the_start(search, model):
    problem, result, _ = searched(search, model)
    assert result.run_secs_before == problem.start_secs
    assert result.run_secs_after <= result.run_secs_before
    assert result.run_secs_after == problem.cost(result.state).run_secs
    assert problem.start.replay(result.plan).structural_hash == result.state.structural_hash


@pytest.mark.parametrize("search", NAMES)
def test_result_is_the_same_twice(search):
    one, two = searched(search, "conv_net")[1], run(search, conv_net())
    assert one.plan == two.plan
    assert (one.curve, one.env_steps) == (two.curve, two.env_steps)


@pytest.mark.parametrize("search", NAMES)
def test_curve_only_falls(search):
    _, result, _ = searched(search, "conv_net")
    steps, costs = zip(*result.curve, strict=True)
    assert (steps[0], costs[0]) == (0, result.run_secs_before)
    assert list(steps) == sorted(steps)
    assert all(a > b for a, b in pairwise(costs))
    assert costs[-1] == result.run_secs_after
    assert steps[-1] <= result.env_steps
    assert len(costs) > 1


@pytest.mark.parametrize("search", NAMES)
def test_progress_is_reported(search):
    _, result, calls = searched(search, "conv_net")
    assert calls[-1][0] == result.env_steps
    assert calls[-1][2] == result.run_secs_after
    assert all(done <= budget for done, budget, _ in calls)
    assert [best for *_, best in calls] == sorted((best for *_, best in calls), reverse=True)


def test_module_without_sites_is_handed_back():
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.floor(x))
    for name in NAMES:
        problem = problem_of(mod)
        search = searches(problem)[name]
        if name == "agent":
            search.policy.rules = ()
        result = search.run(problem)
        assert (len(result.plan), result.env_steps) == (0, 0)
        assert result.run_secs_after == result.run_secs_before


def test_greedy_takes_the_best_move_first():
    result = run("greedy", conv_chain(), LAYOUT)
    assert result.plan.actions[0].startswith("block_conv@")
    assert result.run_secs_after == pytest.approx((60 + 60 + 2 + 2 * 3) * 1e-6)  # only the outer transforms are left


def test_greedy_crosses_a_plateau():
    cost = {"costs": PLATEAU, "blocked_conv": 98.5}
    problem = problem_of(conv_chain(), LAYOUT, **cost)
    assert Greedy(patience=0).run(problem).run_secs_after == problem.start_secs  # no single move gains anything
    result = run("greedy", conv_chain(), LAYOUT, **cost)
    assert result.run_secs_after == pytest.approx((98.5 * 2 + 2 + 2) * 1e-6)
    rules = [action.split("@")[0] for action in result.plan.actions]
    assert rules.count("block_conv") == 2
    assert rules[-1] == "cancel_pack_of_unpack"


def test_greedy_does_not_climb_above_its_tolerance():
    cost = {"costs": {**PLATEAU, "relax.layout_transform": 4.0}, "blocked_conv": 98.5}
    problem = problem_of(conv_chain(), LAYOUT, **cost)
    assert Greedy(tolerance=0.01).run(problem).run_secs_after == problem.start_secs  # blocking costs 3.2 % more
    better = Greedy(tolerance=0.04).run(problem_of(conv_chain(), LAYOUT, **{**cost, "blocked_conv": 90.0}))
    assert better.run_secs_after < problem.start_secs


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
def test_greedy_keeps_to_its_budget(budget):
    """One move more than the budget may be counted."""
    problem = problem_of(conv_net(), costs=PLATEAU, blocked_conv=98.5)
    result = Greedy(budget=Budget(budget)).run(problem)
    assert result.env_steps <= budget + 1
    assert result.run_secs_after <= result.run_secs_before


def test_family_search_pays_for_the_first_of_two_convolutions():
    cost = {"costs": {**PLATEAU, "relax.layout_transform": 4.0}, "blocked_conv": 95.0}
    assert run("greedy", conv_chain(), LAYOUT, **cost).run_secs_after == pytest.approx(202e-6)
    assert run("family", conv_chain(), LAYOUT, **cost).run_secs_after == pytest.approx((95 * 2 + 2 + 4 * 2) * 1e-6)


@pytest.mark.parametrize("budget", [1, 10, 100])
def test_family_search_keeps_to_its_budget(budget):
    result = FamilySearch(budget=Budget(budget)).run(problem_of(conv_net(), costs=PLATEAU, blocked_conv=98.5))
    assert result.env_steps <= budget + 1


def test_family_that_cannot_be_priced_is_passed_over():
    def blocked(node) -> bool:
        return node.op == "relax.nn.conv2d" and node.value.attrs.out_layout != "NCHW"

    result = run("family", conv_net(), fails=blocked)
    assert math.isfinite(result.run_secs_after)
    assert not any(blocked(node) for node in result.state.graph.nodes)


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_random_keeps_to_its_budget(budget):
    problem = problem_of(conv_net())
    result = RandomSearch(seed=0, budget=Budget(budget), horizon=10).run(problem)
    assert result.env_steps == problem.moves == budget


def test_random_is_another_for_another_seed():
    plans = [RandomSearch(seed=seed, budget=Budget(60)).run(problem_of(conv_net())).plan for seed in range(4)]
    assert len(set(plans)) > 1


def test_random_walks_are_no_longer_than_the_horizon():
    problem = RewriteProblem(conv_net(), FakeCostModel(), default_rules(LANES))
    seen: list[int] = []
    apply = problem.successor

    def successor(state: GraphState, action):
        seen.append(len(state.actions))
        return apply(state, action)

    problem.successor = successor
    RandomSearch(seed=0, budget=Budget(100), horizon=4).run(problem)
    assert max(seen) == 3


def test_random_action_is_uniform_over_rules_then_sites():
    state = GraphState.from_module(conv_net(), default_rules(LANES))
    rng = np.random.default_rng(0)
    rules = [rule for rule, sites in state.sites.items() if sites]
    draws = [random_action(state, rng) for _ in range(200 * (len(rules) + 1))]
    counts = {rule: sum(d is not None and d.rule == rule for d in draws) for rule in rules}
    assert all(120 < count < 280 for count in (*counts.values(), draws.count(None)))
    big = max(rules, key=lambda rule: len(state.sites[rule]))
    assert {d.site for d in draws if d is not None and d.rule == big} == set(state.sites[big])


def test_refused_moves_do_not_stop_a_search():
    for name in NAMES:
        result = run(name, conv_net(), fails=lambda node: node.op == "relax.layout_transform")
        assert math.isfinite(result.run_secs_after)
        graph = result.state.graph
        transforms = [node.var for node in graph.nodes if node.op == "relax.layout_transform"]
        assert graph.weight_only.issuperset(transforms)


def test_random_walks_go_on_from_remembered_graphs():
    """So that a plan becomes longer than any walk."""
    budget = Budget(600)
    short = RandomSearch(seed=0, budget=budget, horizon=3).run(problem_of(conv_chain(), LAYOUT))
    long = RandomSearch(seed=0, budget=budget, horizon=3, remembered=8).run(problem_of(conv_chain(), LAYOUT))
    assert len(short.plan) <= 3 < len(long.plan)
    assert long.run_secs_after < short.run_secs_after


def test_random_walks_are_given_up_at_their_limit(monkeypatch):
    problem = problem_of(conv_chain(), LAYOUT, blocked_conv=200.0)
    left_from: list[float] = []
    successor = problem.successor

    def asked(state, action, **options):
        left_from.append(problem.cost(state).run_secs / problem.start_secs)
        return successor(state, action, **options)

    monkeypatch.setattr(problem, "successor", asked)
    RandomSearch(seed=0, budget=Budget(300), horizon=20).run(problem)
    assert max(left_from) > 1.02
    left_from.clear()
    RandomSearch(seed=0, budget=Budget(300), horizon=20, limit=1.01).run(problem)
    assert max(left_from) <= 1.01


def test_agent_search_follows_the_policy_once_then_samples():
    problem = problem_of(conv_chain(), LAYOUT)
    script = ("block_conv", "unpack_after_binary", "unpack_after_unary", "block_conv", "cancel_pack_of_unpack")
    policy = Scripted(script, tuple(rule.name for rule in problem.ruleset.rules))
    result = AgentSearch(policy, settled=False, samples=0).run(problem)
    assert tuple(action.split("@")[0] for action in result.plan.actions) == script
    assert policy.acted == len(script)  # then nothing is left to rewrite
    assert [policy.names[rule] for rule, _ in policy.told] == list(script)
    after = problem.cost(problem.replay(result.plan)).run_secs
    assert sum(saved for _, saved in policy.told) == pytest.approx(100 * (1 - after / problem.start_secs))
    sampling = Scripted((), policy.names)
    AgentSearch(sampling, settled=False, samples=19, horizon=5).run(problem_of(conv_chain(), LAYOUT))
    assert (sampling.acted, sampling.begun) == (1, [1, 16, 3])
    assert [episodes for episodes in sampling.drawn if len(episodes) == 16] == [list(range(16))]
    assert all(set(episodes) <= set(range(16)) for episodes in sampling.drawn)
    limited = Scripted((), policy.names)
    found = AgentSearch(limited, settled=False, horizon=5, budget=Budget(40)).run(problem_of(conv_chain(), LAYOUT))
    assert found.env_steps == 40
    assert sum(rule < len(limited.names) for rule, _ in limited.told) == 40  # the rest were stops


def test_an_action_is_not_told_of_what_was_wrong_with_the_price_before_it(monkeypatch):
    """Pricing what comes after a graph may confirm times that its own price rests on."""
    monkeypatch.setattr(GraphRewriteEnv, "_priced_again", lambda _, cost: replace(cost, run_secs=0.9 * cost.run_secs))
    problem = problem_of(conv_chain(), LAYOUT)
    policy = Scripted(("block_conv",), tuple(rule.name for rule in problem.ruleset.rules))
    AgentSearch(policy, settled=False, samples=0, horizon=1).run(problem)
    ((_, saved),) = policy.told
    after = problem.cost(problem.start.apply(RewriteAction("block_conv", problem.start.sites["block_conv"][0])))
    assert saved == pytest.approx(100 * (0.9 - after.run_secs / problem.start_secs))


def test_agent_search_ends_where_the_policy_stops_at_once():
    class Stops(Scripted):
        def draw(self, observations: Any, rng: np.random.Generator, episodes: Any) -> np.ndarray:
            return np.array([[len(self.names), 0]] * len(observations))

    problem = problem_of(conv_chain(), LAYOUT)
    policy = Stops((), tuple(rule.name for rule in problem.ruleset.rules))
    found = AgentSearch(policy, settled=False, horizon=5, budget=Budget(40)).run(problem)
    assert (found.env_steps, policy.begun) == (0, [1, *[16] * 16])


@pytest.mark.parametrize("sampled", [False, True])
def test_agent_search_that_is_stopped_while_the_policy_computes_hands_back_the_best_so_far(sampled):
    class Interrupted(Scripted):
        """As by Ctrl-C in the second step."""

        places = Places()

        def tried(self, observations: Any, actions: np.ndarray, saved: Any) -> None:
            super().tried(observations, actions, saved)
            self.places.tried([np.array([int(rule) + 1]) for rule, _ in actions], saved)  # as trained agents do

        def act(self, observation: dict[str, Any], deterministic: bool) -> np.ndarray:
            problem.stopped = self.acted == 1
            return super().act(observation, deterministic)

        def draw(self, observations: Any, rng: np.random.Generator, episodes: Any) -> np.ndarray:
            problem.stopped = len(self.drawn) == 1
            return super().draw(observations, rng, episodes)

    problem = problem_of(conv_chain(), LAYOUT)
    script = () if sampled else ("block_conv", "unpack_after_binary")
    policy = Interrupted(script, tuple(rule.name for rule in problem.ruleset.rules))
    found = AgentSearch(policy, settled=False, horizon=5).run(problem)
    assert problem.stopped
    assert found.run_secs_after < found.run_secs_before
    assert len(found.plan) == 1


def test_agent_search_hands_back_the_best_state_not_the_last():
    problem = problem_of(conv_chain(), LAYOUT)
    names = tuple(rule.name for rule in problem.ruleset.rules)
    script = ("block_conv", "unpack_after_binary", "unpack_after_unary", "block_conv", "unpack_after_binary")
    result = AgentSearch(Scripted(script[:4], names), settled=False, samples=0).run(problem)
    assert len(result.plan) == 4
    costly = problem_of(conv_chain(), LAYOUT, blocked_conv=150.0)
    assert len(AgentSearch(Scripted(script[:4], names), settled=False, samples=0).run(costly).plan) == 0


def test_measurements_are_counted_from_the_search_on():
    problem = problem_of(conv_chain())
    before = problem.cost_model.measured
    result = Greedy().run(problem)
    assert result.kernels_measured == problem.cost_model.measured - before > 0


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_are_made_by_name(name):
    problem = problem_of(conv_chain(), RuleSet(CATALOGUE[:5], LANES))
    assert make_search(name, seed=4).run(problem).run_secs_after <= problem.start_secs


def test_unknown_search_is_refused():
    with pytest.raises(UsageError, match="no search is called 'best': there are greedy"):
        make_search("best")


@pytest.mark.parametrize("name", SEARCHES)
def test_negative_seed_is_refused(name):
    with pytest.raises(UsageError, match="seed -1: give 0 or more"):
        make_search(name, seed=-1)
