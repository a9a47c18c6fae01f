"""Searches on predicted costs: what they hand back was measured, and is as good."""

from __future__ import annotations

from functools import cache

import pytest
from fake_cost import FakeCostModel
from small_models import LANES, MODELS
from test_search_searches import NAMES, searches

from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.passes import default_rules
from rlflow_tvm.search import Greedy, SearchResult


def problem_of(model: str, **cost) -> RewriteProblem:
    return RewriteProblem(MODELS[model](), FakeCostModel(**cost), default_rules(LANES))


@cache
def greedily_measured(model: str) -> SearchResult:
    return Greedy().run(problem_of(model))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("search", NAMES)
def test_results_are_measured(search, model):
    problem = problem_of(model, wrong_by=0.3)
    result = searches(problem)[search].run(problem)
    truth = problem_of(model)
    assert result.run_secs_before == truth.start_secs
    assert result.run_secs_after == truth.cost(result.state).run_secs
    assert result.run_secs_after <= result.run_secs_before
    assert result.kernels_predicted > 0 or result.env_steps == 0


@pytest.mark.parametrize("wrong_by", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_finds_as_good_a_graph_where_deviations_are_right(model, wrong_by):
    assert Greedy().run(problem_of(model, wrong_by=wrong_by)).run_secs_after == pytest.approx(
        greedily_measured(model).run_secs_after
    )


def test_greedy_measures_less():
    measured = greedily_measured("conv_net")
    predicted = Greedy().run(problem_of("conv_net", wrong_by=0.002))
    assert predicted.run_secs_after == measured.run_secs_after
    assert 0 < predicted.kernels_measured < 0.7 * measured.kernels_measured


def test_a_kernel_that_fails_is_found_out_before_it_is_taken():
    """Whatever was predicted of it."""
    fails = {"fails": lambda node: node.op == "relax.nn.conv2d" and node.value.attrs.out_layout != "NCHW"}
    for search in NAMES:
        problem = problem_of("conv_net", wrong_by=0.1, **fails)
        result = searches(problem)[search].run(problem)
        assert problem.cost(result.state, confirmed=True).failed == ()
