"""What a report tells: costs as the cost model has them, places with what was matched, kernels that add up."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from fake_cost import FakeCostModel
from report_parts import LOG, along_of, planned, start_of, told_of, trained
from small_models import algebra, conv_chain

from rlflow_tvm.cost import GraphCost
from rlflow_tvm.dataflow import Node
from rlflow_tvm.passes import RewriteAction
from rlflow_tvm.reporting import outline, price_along
from rlflow_tvm.reporting.changes import Mark, changes
from rlflow_tvm.reporting.drawing import part, surroundings, whole
from rlflow_tvm.reporting.figures import best_curve, curves, rules_by_model, rules_by_position
from rlflow_tvm.reporting.steps import cost_row, step_rows

LABEL, KIND, MARK, TEXT = 4, 6, 7, 8
"""Places in a drawing's nodes."""


@pytest.fixture(scope="module")
def state():
    return planned()


@pytest.fixture(scope="module")
def told(state):
    return told_of(state, training=trained(state))


def test_costs_along_are_the_cost_models(state):
    told = outline("zoo:small", along_of(state), "llvm")
    model, reached = FakeCostModel(), state.origin()
    assert told["start"]["secs"] == model.cost(reached.graph).run_secs
    for action, step in zip(state.actions, told["steps"], strict=True):
        assert step["before"] == model.cost(reached.graph).run_secs
        reached = reached.apply(action)
        assert step["after"] == step["cost"]["secs"] == model.cost(reached.graph).run_secs
    assert told["gain"] == told["start"]["secs"] / told["end"]["secs"]


def test_steps_name_rule_equation_and_site(state):
    for action, step in zip(state.actions, step_rows(along_of(state)), strict=True):
        rule = state.ruleset[action.rule]
        assert (step["rule"], step["family"], step["site"]) == (rule.name, rule.family, str(action.site))
        assert (step["equation"], step["when"]) == (str(rule.equation), list(rule.when))


def test_places_contain_the_match_before_and_what_came_of_it_after(state):
    reached = state.origin()
    for action, step in zip(state.actions, step_rows(along_of(state)), strict=True):
        matched = reached.match(action).reads
        following = reached.apply(action)
        before, after = step["drawings"]["before"], step["drawings"]["after"]
        marked = Counter(node[TEXT].split(" = ")[0] for node in before["nodes"] if node[MARK] == "matched")
        assert marked == Counter(var.name for var in matched)
        old = {node.var for node in reached.graph.nodes}
        new = Counter(node.var.name for node in following.graph.nodes if node.var not in old)
        added = Counter(node[TEXT].split(" = ")[0] for node in after["nodes"] if node[MARK] == "added")
        assert added >= new
        reached = following


def test_neighbours_are_drawn():
    """Of relu alone, in conv + bias + relu + conv: what it reads and what reads it."""
    state = start_of(conv_chain())
    relu = next(node for node in state.graph.nodes if node.op == "relax.nn.relu")
    drawing = part(state.graph, surroundings(state.graph, [relu.var]), {relu.var: Mark.MATCHED})
    assert [(node[LABEL], node[MARK]) for node in drawing["nodes"] if node[KIND] != "output"] == [
        ("add", ""),
        ("nn.relu", "matched"),
        ("nn.conv2d", ""),
    ]
    assert [edge[:2] for edge in drawing["edges"]][:2] == [[0, 1], [1, 2]]


def test_unmarked_neighbours_beyond_what_fits_are_counted():
    graph = planned().graph
    everything = [*graph.params, *(node.var for node in graph.nodes)]
    drawing = part(graph, everything, {graph.nodes[0].var: Mark.ADDED})
    assert drawing["left_out"] == len(everything) - 25
    assert any(node[MARK] == "added" for node in drawing["nodes"])


def test_whole_graph_has_every_node_input_and_output():
    graph = start_of(conv_chain()).graph
    drawing = whole(graph, {})
    assert Counter(node[KIND] for node in drawing["nodes"]) == {"op": len(graph.nodes), "input": 1, "output": 1}
    conv = next(node for node in drawing["nodes"] if node[LABEL] == "nn.conv2d")
    assert conv[5] == "1×8×6×6"
    assert "padding=(1, 1, 1, 1)" in conv[TEXT]
    assert "w: 8×8×3×3" in conv[TEXT]


def test_attributes_are_plain_numbers():
    split = next(node for node in whole(start_of(algebra()).graph, {})["nodes"] if node[LABEL] == "split")
    assert "indices_or_sections=(3,), axis=1" in split[TEXT]
    assert "T." not in split[TEXT]


def test_changes_of_a_graph_to_itself_are_none():
    graph = start_of(conv_chain()).graph
    assert changes(graph, graph) == ({}, {})


def test_changes_are_seen_from_both_sides():
    state = planned(count=1)
    before, after = state.origin().graph, state.graph
    gone, new = changes(before, after)
    old, now = {node.var for node in before.nodes}, {node.var for node in after.nodes}
    assert old - now <= {var for var, mark in gone.items() if mark is Mark.REMOVED}
    assert now - old <= {var for var, mark in new.items() if mark is Mark.ADDED}
    assert {var for var, mark in gone.items() if mark is Mark.REWIRED} == {
        var for var, mark in new.items() if mark is Mark.REWIRED
    }


def test_kernels_add_up_to_the_cost(told):
    for side, cost in (("before", told["start"]), ("after", told["end"])):
        rows = told["kernels"][side]
        assert sum(row["secs"] for row in rows) + cost["launch_secs"] == pytest.approx(cost["secs"])
        assert sum(row["count"] for row in rows) == cost["kernels"]
        assert [row["secs"] for row in rows] == sorted((row["secs"] for row in rows), reverse=True)
        for row in rows:
            assert row["secs"] == row["count"] * row["each"]
            assert row["share"] == pytest.approx(row["secs"] / cost["secs"])
            assert row["rule"]
            assert row["shapes"]


def test_a_graph_that_cannot_be_priced_has_no_time(state):
    middle = planned(count=1).graph
    added = next(node for node in middle.nodes if node.var not in {n.var for n in state.origin().graph.nodes})

    def fails(node: Node) -> bool:
        return node.op == added.op and node.var.name == added.var.name

    along = price_along(state.origin(), state.plan, FakeCostModel(fails=fails))
    assert any(math.isinf(cost.run_secs) for cost in along.costs)
    assert any(step["after"] is None and step["cost"]["failed"] for step in step_rows(along))


def test_cost_row_tells_no_infinity():
    row = cost_row(GraphCost(math.inf, 0.0, 1, 2, 3, 4, ("conv: build: no",)))
    assert row["secs"] is None
    assert row["failed"] == ["conv: build: no"]


def test_progress_follows_the_pricing(state):
    seen = []
    price_along(state.origin(), state.plan, FakeCostModel(), lambda done, total, text: seen.append((done, total)))
    assert seen == [(n + 1, len(state.actions) + 1) for n in range(len(state.actions) + 1)]


def test_curves_are_the_logs():
    found = {each["name"]: each["points"] for each in curves(LOG)}
    assert found["mean_return"] == [[line["env_steps"], line["mean_return"]] for line in LOG]
    assert set(found) == {"mean_return", "entropy", "approx_kl"}
    assert next(iter(found)) == "mean_return"


def test_curves_take_what_is_no_number_for_nothing():
    odd = [{"env_steps": 1, "a": float("nan"), "b": True, "c": None, "d": "1", "e": 2}, {"e": 3}]
    assert curves(odd) == [{"name": "e", "points": [[1, 2], [1, 3]], "over": "environment steps"}]


def test_curves_of_what_learns_between_steps_are_over_the_lines():
    """A world model's: at most lines no environment step has been made since the one before."""
    log = [{"env_steps": 100 * (n // 10), "held_out/nll": float(n)} for n in range(40)]
    (curve,) = curves(log)
    assert curve == {
        "name": "held_out/nll", "points": [[n + 1, float(n)] for n in range(40)], "over": "line of the log"
    }  # fmt: skip


def test_long_curves_are_thinned():
    (curve,) = curves([{"env_steps": n, "a": 2 * n} for n in range(5000)])
    assert 300 < len(curve["points"]) <= 600
    assert all(y == pytest.approx(2 * x) for x, y in curve["points"])


def test_best_curve_begins_at_the_start():
    lines = [{"env_steps": 5, "model": "m", "run_secs": 2.0}, {"env_steps": 7, "model": "other", "run_secs": 1.0}]
    assert best_curve(lines, "m", 3.0) == [[0, 3.0], [5, 2.0]]
    assert best_curve(lines, "none", 3.0) == []


def test_best_curve_ends_with_the_training():
    best, progress = [{"env_steps": 5, "model": "m", "run_secs": 2.0}], [{"env_steps": 4}, {"env_steps": 30}]
    assert best_curve(best, "m", 3.0, progress) == [[0, 3.0], [5, 2.0], [30, 2.0]]
    assert best_curve(best, "m", 3.0, progress[:1]) == [[0, 3.0], [5, 2.0]]
    assert best_curve([], "m", 3.0, progress) == []


def test_rules_by_position():
    assert rules_by_position(["b", "a", "b"]) == {
        "columns": ["1", "2", "3"],
        "rows": [{"rule": "b", "counts": [1, 0, 1]}, {"rule": "a", "counts": [0, 1, 0]}],
    }
    long = rules_by_position(["a", "b"] * 45)
    assert long["columns"][:2] == ["1-3", "4-6"]
    assert len(long["columns"]) == 30
    assert sum(sum(row["counts"]) for row in long["rows"]) == 90


def test_rules_by_model(told):
    assert rules_by_model({"x": ["a"], "y": ["b", "b"]}) == {
        "columns": ["x", "y"],
        "rows": [{"rule": "b", "counts": [0, 2]}, {"rule": "a", "counts": [1, 0]}],
    }
    assert told["models"]["columns"] == ["zoo:small", "zoo:other"]


def test_an_empty_plan_is_told():
    told = told_of(start_of(conv_chain()))
    assert (told["steps"], told["gain"], told["rules"]["rows"]) == ([], 1.0, [])
    assert not any(node[MARK] for side in ("before", "after") for node in told["graphs"][side]["nodes"])


def test_actions_are_parsed_as_plans_write_them(state):
    assert [RewriteAction.parse(action) for action in state.plan.actions] == list(state.actions)
