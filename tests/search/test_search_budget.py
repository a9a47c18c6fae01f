"""Budgets: what is understood, and that searches end when one is spent or somebody stops them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from small_models import conv_net
from test_search_searches import NAMES, Scripted, problem_of, searches

from rlflow_tvm.errors import UsageError
from rlflow_tvm.search import SEARCHES, Budget, make_search
from rlflow_tvm.search.agent_search import AgentSearch
from rlflow_tvm.search.result import Incumbent, moves


@pytest.mark.parametrize(
    ("text", "steps", "secs"),
    [
        ("20000", 20_000, math.inf),
        ("90s", math.inf, 90),
        ("5m", math.inf, 300),
        ("0.5h", math.inf, 1800),
        (" 7 ", 7, math.inf),
    ],
)
def test_budgets_are_read(text, steps, secs):
    assert Budget.parse(text) == Budget(steps, secs)


@pytest.mark.parametrize("text", ["", "0", "0s", "-3", "2.5", "5 minutes", "1d", "nan", "inf", "1e3"])
def test_what_is_no_budget_is_told(text):
    with pytest.raises(UsageError, match="--budget"):
        Budget.parse(text)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_budget_takes_the_place_of_the_searchs_own(name):
    assert make_search(name, budget=Budget(7)).budget == Budget(7)
    assert make_search(name).budget.steps >= 1000


@pytest.mark.parametrize("name", SEARCHES)
def test_seconds_are_kept(name, monkeypatch):
    """By a clock of a second a move: as many moves as seconds, and one more that was under way."""
    problem = problem_of(conv_net(), blocked_conv=98.5)
    monkeypatch.setattr("time.monotonic", lambda: float(problem.moves))
    calls = []
    result = make_search(name, budget=Budget(secs=12)).run(problem, lambda *call: calls.append(call[:2]))
    assert 12 <= result.env_steps <= 13
    assert {total for _, total in calls} == {12}


def test_a_search_without_end_tells_how_far_it_is():
    calls = []
    result = make_search("greedy", budget=Budget()).run(problem_of(conv_net()), lambda *call: calls.append(call[:2]))
    assert calls[-1] == (calls[-1][0],) * 2
    assert result.env_steps > 0


@pytest.mark.parametrize(("share", "budget", "told"), [(0.8, Budget(secs=12), True), (0.2, Budget(secs=12), False),
                                                    (0.8, Budget(steps=12), False)])  # fmt: skip
def test_a_time_that_went_into_measuring_is_told(share, budget, told, monkeypatch, caplog):
    problem = problem_of(conv_net())
    monkeypatch.setattr("time.monotonic", lambda: float(problem.moves))
    monkeypatch.setattr(type(problem.cost_model), "measuring_secs", property(lambda _: share * problem.moves))
    with caplog.at_level("WARNING", "rlflow_tvm"):
        make_search("random", budget=budget).run(problem)
    assert ("10 of the search's 12 s went into measuring kernels" in caplog.text) == told


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_search_hands_back_its_best(name):
    problem = problem_of(conv_net())

    def stop_at(done: int, _total: int, _best: float) -> None:
        problem.stopped = done >= 12

    result = searches(problem)[name].run(problem, stop_at)
    assert 12 <= result.env_steps <= 13
    assert problem.cost(result.state).run_secs == result.run_secs_after <= result.run_secs_before


@pytest.mark.parametrize("wrong_by", [0.0, 0.3])
@pytest.mark.parametrize("name", ["greedy", "variable-depth", "family"])
def test_what_is_priced_when_a_budget_ends_is_not_lost(name, wrong_by, monkeypatch):
    """Though not all of the level is priced, out of which the best is taken."""
    sites = sum(map(len, problem_of(conv_net()).start.sites.values()))
    truth = problem_of(conv_net())
    for steps in (sites // 2, sites - 1):
        problem, seen = problem_of(conv_net(), wrong_by=wrong_by), []
        successor = problem.successor

        def priced(*args, successor=successor, seen=seen, **how):
            following = successor(*args, **how)
            seen += [] if following is None else [(following[1].run_secs - following[1].deviation_secs, following[0])]
            return following

        monkeypatch.setattr(problem, "successor", priced)
        result = make_search(name, budget=Budget(steps)).run(problem)
        hoped = min(seen, key=lambda each: each[0])[1]
        assert result.run_secs_after <= truth.cost(hoped).run_secs
        assert result.run_secs_after == truth.cost(result.state).run_secs
        assert result.run_secs_after < result.run_secs_before or wrong_by


def test_where_the_cheapest_price_was_wrong_the_next_counts():
    """Of what was priced when the budget ended, and not offered."""
    problem = problem_of(conv_net())
    states = [after for action in moves(problem.start) if (after := problem.successor(problem.start, action))]
    states = sorted((state for state, _ in states), key=lambda state: problem.cost(state).run_secs)
    cheapest, dearest = states[0], states[-1]
    secs = [problem.cost(state).run_secs for state in (cheapest, dearest)]
    assert secs[0] < problem.start_secs < secs[1]
    best = Incumbent(problem, Budget(steps=1), None)
    best.hope(dearest, 0.5 * secs[0])  # by a first price that is wrong
    best.hope(cheapest, secs[0])
    problem.stopped = True
    result = best.result()
    assert result.state is cheapest
    assert result.run_secs_after == secs[0]


def test_budgets_are_what_they_say():
    assert make_search("greedy", budget="5m").budget == Budget(secs=300)
    assert make_search("greedy", budget=20).budget == Budget.parse(20) == Budget(20)
    with pytest.raises(UsageError, match="--budget soon"):
        make_search("greedy", budget="soon")


@pytest.mark.parametrize("name", ["greedy", "family"])
def test_a_move_that_is_confirmed_and_taken_counts_once(name, monkeypatch):
    """As for an agent, whose moves are priced when they are made."""
    problem, tried = problem_of(conv_net()), []
    successor = problem.successor

    def recorded(state, action, **how):
        tried.append((state.structural_hash, str(action)))
        return successor(state, action, **how)

    monkeypatch.setattr(problem, "successor", recorded)
    result = make_search(name).run(problem)
    assert result.env_steps == len(set(tried)) < len(tried)


def test_an_agent_that_stops_at_once_now_and_then_spends_its_budget():
    class Hesitates(Scripted):
        """Each episode of the first three batches ends with its first step."""

        def draw(self, observations: Any, rng: np.random.Generator, episodes: Any) -> np.ndarray:
            if len(self.begun) < 5:  # the first is that of the likeliest actions
                return np.array([[len(self.names), 0]] * len(observations))
            return super().draw(observations, rng, episodes)

    problem = problem_of(conv_net())
    policy = Hesitates((), tuple(rule.name for rule in problem.ruleset.rules))
    assert AgentSearch(policy, settled=False, horizon=5, budget=Budget(40)).run(problem).env_steps == 40
