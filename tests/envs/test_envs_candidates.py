"""X-RLflow's environment: which graphs it offers, and what it tells of them."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import numpy as np
import pytest
from fake_cost import FakeCostModel
from gymnasium.utils.env_checker import check_env
from small_models import LANES, MODELS, conv_net, module
from tvm.relax import op as rx

from rlflow_tvm.envs import CandidateEnv, RewriteProblem
from rlflow_tvm.envs.observation import IS_OUTPUT, USERS, WORK, graph_arrays
from rlflow_tvm.errors import EnvError
from rlflow_tvm.passes import GraphState, RewriteRule, RuleSet, default_rules


def make_env(mod=None, rules: RuleSet | None = None, cost: FakeCostModel | None = None, **options) -> CandidateEnv:
    problem = RewriteProblem(mod or conv_net(), cost or FakeCostModel(), rules or default_rules(LANES))
    return CandidateEnv(problem=problem, **{"limit": math.inf, **options})


def walk(env: CandidateEnv, steps: int, seed: int = 0):
    """The observations of a random walk."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    yield observation
    for _ in range(steps):
        observation, _, terminated, truncated, _ = env.step(int(rng.integers(len(env.candidates))))
        yield observation
        if terminated or truncated:
            return


@pytest.mark.parametrize("name", MODELS)
def test_gymnasium_finds_nothing_wrong(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Not able to test alternative render modes")
        check_env(make_env(MODELS[name](), horizon=20))


@pytest.mark.parametrize("name", MODELS)
def test_candidates_are_the_graphs_a_rewrite_away_each_once(name):
    env = make_env(MODELS[name]())
    for observation in walk(env, 6):
        graphs = [env.state.apply(each.action).structural_hash for each in env.candidates]
        assert len(graphs) == len(set(graphs))
        everywhere = set()
        for rule, sites in env.state.sites.items():
            for site in sites:
                following = env.problem.successor(env.state, type(env.candidates[0].action)(rule, site))
                if following is not None:
                    everywhere.add(following[0].structural_hash)
        assert everywhere == set(graphs)
        assert observation["candidate_mask"].sum() == len(graphs) + 1
        assert observation["candidate_mask"][env.stop] == 1
        rules = [env.rule_names.index(each.action.rule) for each in env.candidates]
        assert observation["candidate_rules"][: len(rules)].tolist() == rules
        assert observation["candidate_rules"][env.stop] == len(env.rule_names)
        assert observation["candidate_places"][: len(rules)].any(axis=1).all()


def _rows(nodes: np.ndarray) -> Counter:
    """Of each node what does not depend on others that read it."""
    return Counter(row.tobytes() for row in np.delete(nodes, [WORK % 14, USERS % 14, IS_OUTPUT % 14], axis=1))


def _whole(nodes: np.ndarray) -> Counter:
    """Of each node all but its share of its own graph's work."""
    return Counter(row.tobytes() for row in np.delete(nodes, [WORK % 14], axis=1))


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_with_a_candidates_changes_is_the_candidate(name):
    env = make_env(MODELS[name]())
    for observation in walk(env, 6):
        graph, owner = observation["graph"], observation["node_candidate"]
        links, first = graph.edge_links, int((owner < 0).sum())
        np.testing.assert_array_equal(graph.nodes[:first], graph_arrays(env.state.graph, env.whole_work).nodes)
        for number, each in enumerate(env.candidates):
            following = graph_arrays(env.state.apply(each.action).graph)
            gone = observation["removed"][observation["removed"][:, 0] == number, 1]
            kept = np.setdiff1d(np.arange(first), gone)
            added = np.flatnonzero(owner == number)
            assert _rows(following.nodes) == _rows(graph.nodes[np.concatenate([kept, added])])
            assert not _whole(graph.nodes[added]) - _whole(following.nodes), "users and outputs of what is added"
            # edges: those that stay, the candidate's, and what read a removed node and now reads one that was there
            own = np.isin(links, added).any(axis=1)
            staying = np.isin(links, kept).all(axis=1)
            moved = (links[:, 1] < first) & np.isin(links[:, 0], gone) & np.isin(links[:, 1], kept)
            replaced = int(moved.sum()) - int((own & (links[:, 1] < first)).sum())
            assert len(following.links) == staying.sum() + own.sum() + replaced
            assert not np.isin(links[own], gone).any(), "what is removed has no edges to what is added"
            work = following.nodes[:, WORK] * following.whole / env.whole_work
            shown = graph.nodes[np.concatenate([kept, added]), WORK]
            assert math.isclose(work.sum(), shown.sum(), rel_tol=1e-4)


def test_a_step_goes_to_the_candidate():
    env = make_env()
    env.reset(seed=0)
    for number, each in enumerate(env.candidates):
        wanted = env.state.apply(each.action).structural_hash
        other = env.fork()
        _, _, _, _, info = other.step(number)
        assert other.state.structural_hash == wanted
        assert info["rule"] == each.action.rule


@pytest.mark.parametrize("action", [-1, 499])
def test_what_is_no_candidate_changes_nothing(action):
    env = make_env()
    env.reset(seed=0)
    before = env.state
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info["invalid"]) == (-100.0, False, False, True)
    assert env.state is before


def test_stopping_ends_the_episode():
    env = make_env()
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(env.stop)
    assert (reward, terminated, truncated, info["rule"]) == (0.0, True, False, "stop")
    with pytest.raises(EnvError, match="reset"):
        env.step(0)


def test_equal_graphs_are_offered_once():
    def body(emit, x):
        return rx.tanh(emit(rx.nn.relu(emit(rx.nn.relu(x)))))

    rules = RuleSet(
        (
            RewriteRule("inner", "none", "relu(relu(x)) => relu(x)"),
            RewriteRule("outer", "none", "tanh(relu(relu(x))) => tanh(relu(x))"),
        ),
        LANES,
    )
    env = make_env(module({"x": (2, 3)}, {}, body), rules)
    _, info = env.reset(seed=0)
    assert [each.action.rule for each in env.candidates] == ["inner"]
    assert (info["candidates"], info["duplicates"], info["dropped"]) == (1, 1, 0)


def test_a_candidate_that_cannot_be_is_offered_no_more():
    cost = FakeCostModel(fails=lambda node: node.op == "relax.layout_transform")
    env = make_env(cost=cost)
    env.reset(seed=0)
    refused = next(i for i, each in enumerate(env.candidates) if each.action.rule == "block_conv")
    before = [each.action for each in env.candidates]
    _, reward, terminated, _, info = env.step(refused)
    assert (reward, terminated, info["refused"]) == (0.0, False, str(before[refused]))
    assert [each.action for each in env.candidates] == before[:refused] + before[refused + 1 :]


def test_what_cannot_be_does_not_come_again_by_another_rule():
    def body(emit, x):
        return rx.tanh(emit(rx.nn.relu(emit(rx.nn.relu(x)))))

    equations = ("relu(relu(x)) => exp(x)", "tanh(relu(relu(x))) => tanh(exp(x))", "tanh(x) => sigmoid(x)")
    rules = RuleSet(tuple(RewriteRule(f"rule{i}", "none", each) for i, each in enumerate(equations)), LANES)
    env = make_env(module({"x": (2, 3)}, {}, body), rules, FakeCostModel(fails=lambda node: node.op == "relax.exp"))
    _, info = env.reset(seed=0)
    assert [each.action.rule for each in env.candidates] == ["rule0", "rule2"]
    assert info["duplicates"] == 1
    *_, info = env.step(0)
    assert "refused" in info
    assert [each.action.rule for each in env.candidates] == ["rule2"]


def test_what_reads_a_roots_new_value_is_linked_to_it():
    def body(emit, x):
        return rx.tanh(emit(rx.exp(emit(rx.nn.relu(x)))))

    rules = RuleSet((RewriteRule("rule", "none", "relu(x), exp(y) => sigmoid(x), exp(abs(y))"),), LANES)
    env = make_env(module({"x": (2, 3)}, {}, body), rules)
    observation, _ = env.reset(seed=0)
    graph, first = observation["graph"], int((observation["node_candidate"] < 0).sum())
    links = [tuple(link) for link in graph.edge_links.tolist() if max(link) >= first]
    tanh = first - 1
    assert links == [(0, first), (first, first + 1), (first + 1, first + 2), (first + 2, tanh)]
    assert graph.nodes[first:, USERS].tolist() == [1 / 8] * 3


@pytest.mark.parametrize("most", [1, 7, 25])
def test_of_too_many_each_rule_has_its_share(most):
    full, env = make_env(), make_env(most=most)
    full.reset(seed=0)
    observation, info = env.reset(seed=0)
    everywhere = Counter(each.action.rule for each in full.candidates)
    offered = Counter(each.action.rule for each in env.candidates)
    assert len(env.candidates) == most < len(full.candidates)
    assert info["dropped"] == len(full.candidates) - most
    assert env.observation_space.contains(observation)
    least = min(offered[rule] for rule in everywhere if offered[rule] < everywhere[rule])
    assert max(offered.values()) <= least + 1
    assert offered <= everywhere
    first = [each.action for each in env.candidates]
    env.reset(seed=1)
    assert [each.action for each in env.candidates] == first


def test_whole_runs_are_told_beside_the_sum_of_kernels():
    env = make_env(reward="end-to-end", horizon=7)
    told = []
    env.reset(seed=0)
    for _ in range(7):
        _, reward, _, truncated, info = env.step(0)
        told.append("end_to_end_secs" in info)
        assert told[-1] or reward == 0.1
    assert truncated
    assert told == [False] * 4 + [True, False, True]
    assert info["end_to_end_secs"] == pytest.approx(info["run_secs"])


def test_replaying_a_plan_gives_the_same_candidates():
    env = make_env(horizon=5)
    *_, last = walk(env, 4)
    plan, offered = env.plan, [each.action for each in env.candidates]
    observation, _ = env.reset(seed=3, options={"plan": plan})
    assert [each.action for each in env.candidates] == offered
    for name in ("node_candidate", "removed", "candidate_mask", "candidate_rules", "candidate_places"):
        np.testing.assert_array_equal(observation[name], last[name])
    state = GraphState.from_module(env.problem.start.start.mod, env.problem.ruleset)
    assert env.state.structural_hash == state.replay(plan).structural_hash


def test_what_is_removed_is_asked_anew_where_something_below_has_changed():
    def body(emit, x, p):
        y = emit(rx.nn.silu(p))
        return rx.tanh(emit(rx.maximum(x, emit(rx.minimum(x, y)))))

    env = make_env(module({"x": (2, 3), "p": (2, 3)}, {}, body))
    env.reset(seed=0)
    walked, *_ = env.step(next(i for i, each in enumerate(env.candidates) if each.action.rule == "silu_to_sigmoid"))
    there = make_env(module({"x": (2, 3), "p": (2, 3)}, {}, body))
    begun, _ = there.reset(seed=0, options={"plan": env.plan})
    assert [each.action for each in env.candidates] == [each.action for each in there.candidates]
    np.testing.assert_array_equal(walked["removed"], begun["removed"])


def test_a_replayed_plan_can_be_gone_on_from():
    env = make_env()
    env.reset(seed=0)
    env.step(0)
    plan, offered = env.plan, [each.action for each in env.candidates]
    env.reset(seed=0)
    env.replay(plan)
    assert [each.action for each in env.candidates] == offered
    assert "invalid" not in env.step(0)[-1]


def test_what_reads_a_candidates_node_and_whether_it_is_an_output():
    def both(emit, x):
        return rx.nn.relu(x), rx.exp(emit(rx.tanh(x)))

    rules = RuleSet((RewriteRule("one", "none", "relu(x), tanh(x) => sigmoid(x), sigmoid(x)"),), LANES)
    env = make_env(module({"x": (2, 3)}, {}, both), rules)
    observation, _ = env.reset(seed=0)
    (added,) = observation["graph"].nodes[observation["node_candidate"] == 0]
    assert (added[IS_OUTPUT], added[USERS]) == (1.0, 1 / 8)
    rules = RuleSet((RewriteRule("twice", "none", "relu(x) => add(tanh(x), tanh(x))"),), LANES)
    env = make_env(module({"x": (2, 3)}, {}, lambda emit, x: rx.exp(emit(rx.nn.relu(x)))), rules)
    observation, _ = env.reset(seed=0)
    added = observation["graph"].nodes[observation["node_candidate"] == 0]
    assert added[:, USERS].tolist() == [1 / 8, 1 / 8]


def test_too_few_candidates_are_refused():
    with pytest.raises(EnvError, match="most 0"):
        make_env(most=0)
