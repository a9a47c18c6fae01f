"""Searches that look further than one move: what they reach that descent cannot, and what they leave alone."""

from __future__ import annotations

import pytest
from small_models import conv_chain, conv_net
from test_search_searches import LAYOUT, PLATEAU, problem_of

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.passes import GraphState, RewriteAction
from rlflow_tvm.search import Backtracking, Beam, Budget, Greedy, VariableDepth
from rlflow_tvm.search.greedy import _Walk
from rlflow_tvm.search.variable_depth import opened

HILL = {"costs": {**PLATEAU, "relax.layout_transform": 4.0}, "blocked_conv": 95.0}
"""Blocking one convolution costs 3 % more; blocking both, with transforms that meet, 1 % less."""

LOWEST = pytest.approx((95 * 2 + 2 + 4 * 2) * 1e-6)


def hill() -> RewriteProblem:
    return problem_of(conv_chain(), LAYOUT, **HILL)


@pytest.mark.parametrize(
    ("search", "stuck"),
    [
        (Backtracking(), Backtracking(alpha=1.02)),
        (Beam(), Beam(patience=0)),
        (VariableDepth(depth=5), VariableDepth(depth=4)),
        (VariableDepth(depth=5), VariableDepth(depth=5, tolerance=0.02)),
    ],
)
def test_what_costs_more_at_first_is_found_within_limits(search, stuck):
    assert Greedy().run(hill()).run_secs_after == hill().start_secs
    assert search.run(hill()).run_secs_after == LOWEST
    assert stuck.run(hill()).run_secs_after == hill().start_secs


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_greedy_search_crosses_a_plateau_as_far_as_its_patience_goes(patience, monkeypatch):
    """On a plateau that takes more than three moves to cross."""
    taken = []
    take = _Walk.take
    monkeypatch.setattr(_Walk, "take", lambda walk, key: taken.append(key) or take(walk, key))
    problem = problem_of(conv_chain(), LAYOUT, costs=PLATEAU, blocked_conv=98.5)
    assert Greedy(patience=patience).run(problem).run_secs_after == problem.start_secs
    assert len(taken) == patience


def costs_of_expanded(problem: RewriteProblem) -> list[float]:
    """The costs of the states whose successors are asked for, each once, in order; filled while a search runs."""
    costs: dict[int, float] = {}
    apply = problem.successor

    def successor(state: GraphState, action: RewriteAction, *, confirmed: bool = False):
        costs[state.structural_hash] = problem.cost(state).run_secs
        return apply(state, action, confirmed=confirmed)

    problem.successor = successor
    return costs


def test_backtracking_expands_the_cheapest_first_and_none_above_alpha():
    problem = problem_of(conv_net(), LAYOUT, blocked_conv=98.0)
    costs = costs_of_expanded(problem)
    result = Backtracking(alpha=1.1, budget=Budget(300)).run(problem)
    expanded = list(costs.values())
    assert len(expanded) > 3
    best = expanded[0]
    for cost in expanded:
        assert cost <= 1.1 * best * (1 + 1e-12)
        best = min(best, cost)
    assert best >= result.run_secs_after


def test_backtracking_with_alpha_below_what_any_move_costs_descends_only():
    problem = problem_of(conv_net(), LAYOUT)
    expanded = costs_of_expanded(problem)
    Backtracking(alpha=1.0, budget=Budget(300)).run(problem)
    assert len(expanded) > 2
    assert list(expanded.values()) == sorted(expanded.values(), reverse=True)


def test_backtracking_keeps_graphs_small():
    """At most `growth` times the operators of the start are looked at: at 1.0 none that adds any."""
    problem = hill()
    assert Backtracking(growth=1.0).run(problem).run_secs_after == problem.start_secs
    assert Backtracking(growth=1.0, alpha=2.0).run(hill()).env_steps == sum(map(len, hill().start.sites.values()))


def test_beam_of_one_is_steepest_descent():
    problem = problem_of(conv_net(), LAYOUT)
    result = Beam(width=1, patience=0).run(problem)
    state, cost = problem.start, problem.start_secs
    while True:
        moves = [RewriteAction(rule, site) for rule, sites in state.sites.items() for site in sites]
        after, best = min(
            ((s, c.run_secs) for s, c in (problem.successor(state, move) for move in moves)), key=lambda each: each[1]
        )
        if best >= cost:
            break
        state, cost = after, best
    assert result.run_secs_after == cost


def test_beam_is_no_wider_than_it_says():
    problem = problem_of(conv_net(), LAYOUT, blocked_conv=99.0)
    lengths: dict[int, set[int]] = {}
    apply = problem.successor

    def successor(state: GraphState, action: RewriteAction, *, confirmed: bool = False):
        lengths.setdefault(len(state.actions), set()).add(state.structural_hash)
        return apply(state, action, confirmed=confirmed)

    problem.successor = successor
    Beam(width=3, budget=Budget(300)).run(problem)
    assert max(map(len, lengths.values())) == 3
    assert len(lengths) > 5


def test_opened_moves_are_those_beside_the_change():
    """After blocking the second of two convolutions: at it, at its transforms and what they read, not further up."""
    start = problem_of(conv_chain(), LAYOUT).start
    second = max(start.sites["block_conv"])
    after = start.apply(RewriteAction("block_conv", second))
    rules = {action.rule for action in opened(start, after)}
    assert rules == {"pack_before_unary"}
    assert set(opened(start, after)) <= {
        RewriteAction(rule, site) for rule, sites in after.sites.items() for site in sites
    }


@pytest.mark.parametrize("search", [Backtracking, Beam, VariableDepth])
@pytest.mark.parametrize("budget", [1, 5, 40])
def test_budget_in_steps_is_kept(search, budget):
    problem = problem_of(conv_net(), costs=PLATEAU, blocked_conv=98.5)
    result = search(budget=Budget(budget)).run(problem)
    assert result.env_steps <= budget + 1
    assert result.run_secs_after <= result.run_secs_before
