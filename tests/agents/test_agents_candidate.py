"""The candidate agent: order and number of candidates do not matter, and it solves what greed does not."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from training_checks import assert_same_training, most_of

from rlflow_tvm.agents import load_agent
from rlflow_tvm.agents.act import Agent
from rlflow_tvm.agents.candidate.config import PRESETS, CandidateConfig
from rlflow_tvm.agents.candidate.observation import CandidateObservation, CandidateSizes, collate, compact
from rlflow_tvm.agents.candidate.policy import CandidatePolicy
from rlflow_tvm.agents.messages import pack_episode, unpack_episode
from rlflow_tvm.agents.pool import Workers
from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.agents.training import train
from rlflow_tvm.errors import AgentError

CONFIG = CandidateConfig(hidden=16, heads=2, rounds=2, steps_per_update=32, n_epochs=2)


@pytest.fixture(scope="module")
def candidates(toy):
    """The module `toy_candidates` beside this file."""
    spec = importlib.util.spec_from_file_location("toy_candidates", Path(__file__).with_name("toy_candidates.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_candidates"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def policy(candidates) -> CandidatePolicy:
    """A small policy whose head is not yet flattened, so that its probabilities differ."""
    sizes = CandidateSizes.from_space(candidates.ToyCandidateEnv().observation_space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = CandidatePolicy(sizes, CONFIG)
        torch.nn.init.normal_(made.score_head.weight)
    return made.eval()


def observations(candidates, number: int = 6, order=None) -> list[dict]:
    """Those of a random walk."""
    env, rng = candidates.ToyCandidateEnv(length=7, order=order, random_start=True), np.random.default_rng(0)
    found = []
    for seed in range(number):
        observation, _ = env.reset(seed=seed)
        for _ in range(seed):
            observation, _, terminated, *_ = env.step(rng.integers(int(observation["candidate_mask"].sum()) - 1))
            if terminated:
                break
        found.append(observation)
    return found


def permuted(observation: dict, order: np.ndarray) -> dict:
    """The same candidates in another order: number i is what was `order[i]`."""
    count, owner = len(order), observation["node_candidate"]
    rank = np.empty(count, int)
    rank[order] = np.arange(count)
    own = np.flatnonzero(owner < 0)
    added = np.concatenate([np.flatnonzero(owner == each) for each in order] or [own[:0]])
    moved = np.concatenate([own, added])
    where = np.empty(len(owner), int)
    where[moved] = np.arange(len(owner))
    graph = observation["graph"]
    removed = observation["removed"].copy()
    removed[:, 0] = rank[removed[:, 0]]
    places, rules = observation["candidate_places"].copy(), observation["candidate_rules"].copy()
    places[:count], rules[:count] = places[order], rules[order]
    relabelled = np.where(owner < 0, -1, rank[np.maximum(owner, 0)])
    return {
        **observation,
        "graph": graph._replace(nodes=graph.nodes[moved], edge_links=where[graph.edge_links]),
        "node_candidate": relabelled[moved].astype(np.int32),
        "removed": removed,
        "candidate_places": places,
        "candidate_rules": rules,
    }


def test_the_toy_is_an_environment(candidates):
    check_env(candidates.ToyCandidateEnv(), skip_render_check=True)


def test_permuting_the_candidates_permutes_the_probabilities(policy, candidates):
    rng = np.random.default_rng(0)
    for observation in observations(candidates):
        count = int(observation["candidate_mask"].sum()) - 1
        order = rng.permutation(count)
        before = policy.probabilities(policy.compact(observation))
        after = policy.probabilities(policy.compact(permuted(observation, order)))
        np.testing.assert_allclose(after[:count], before[order], rtol=0, atol=1e-6)
        assert abs(after[-1] - before[-1]) < 1e-6
        assert before.sum() == pytest.approx(1.0, abs=1e-6)
        assert not before[count:-1].any()
        assert len(set(before[:count].round(6))) > 1


def _alike(kept):
    """Of how many sites the rule is the same, of each, itself included."""
    return np.array([(kept.site_rules == rule).sum() for rule in kept.site_rules])


def test_candidates_do_not_see_each_other(policy, candidates):
    """Odds between two candidates are the same whether a third one is there or not, but for what its rule shares."""
    for observation in observations(candidates):
        count = int(observation["candidate_mask"].sum()) - 1
        whole = policy.probabilities(policy.compact(observation))
        kept = policy.compact(observation)
        shared = _alike(kept)[: count - 1]
        owner = kept.node_candidate
        alive = np.flatnonzero(owner < count - 1)
        where = np.full(len(owner), -1)
        where[alive] = np.arange(len(alive))
        links = np.isin(kept.edge_links, alive).all(axis=1)
        less = dataclasses.replace(
            kept,
            nodes=kept.nodes[alive],
            edges=kept.edges[links],
            edge_links=where[kept.edge_links[links]].astype(np.int32),
            node_candidate=owner[alive],
            removed=kept.removed[kept.removed[:, 0] < count - 1],
            site_numbers=np.delete(kept.site_numbers, count - 1),
            site_rules=np.delete(kept.site_rules, count - 1),
            site_places=np.delete(kept.site_places, count - 1, axis=0),
            site_known=np.delete(kept.site_known, count - 1, axis=0),
        )
        without = policy.probabilities(less)
        left = _alike(less)[: count - 1]
        assert (left <= shared).all()
        assert np.unique(shared[left < shared]).size <= 1, "only one rule lost a candidate"
        odds, before = without[: count - 1] / without[-1], whole[: count - 1] / whole[-1]
        np.testing.assert_allclose(odds * left, before * shared, rtol=1e-4)


@pytest.mark.parametrize("by_rule", [True, False])
def test_what_a_new_policy_draws(policy, candidates, by_rule):
    """Each rule, and stop more seldom; or each candidate, stop among them."""
    new = CandidatePolicy(policy.sizes, dataclasses.replace(CONFIG, by_rule=by_rule))
    torch.nn.init.zeros_(new.score_head.weight)
    for observation in observations(candidates):
        count = int(observation["candidate_mask"].sum()) - 1
        probabilities, rules = new.probabilities(new.compact(observation)), observation["candidate_rules"][:count]
        each = (
            [probabilities[:count][rules == rule].sum() for rule in np.unique(rules)]
            if by_rule
            else probabilities[:count]
        )
        np.testing.assert_allclose(each, probabilities[-1] * np.exp(3.0 if by_rule else 0.0), rtol=1e-5)


def test_a_batch_gives_what_its_members_give_alone(policy, candidates):
    kept = [policy.compact(observation) for observation in observations(candidates)]
    with torch.inference_mode():
        together, alone = policy(collate(kept)), [policy(collate([each])) for each in kept]
    for name in ("log_probs", "values", "entropy"):
        joined = torch.cat([getattr(each, name) for each in alone])
        torch.testing.assert_close(getattr(together, name), joined, rtol=1e-4, atol=1e-5)


def test_acting_and_updating_agree_and_masked_actions_are_never_taken(policy, candidates):
    kept = [policy.compact(observation) for observation in observations(candidates)]
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        batch = collate(kept)
        output = policy(batch)
    for number, each in enumerate(kept):
        for _ in range(20):
            site, log_prob, value = policy.choose(each, rng)
            assert log_prob == pytest.approx(float(output.log_probs[batch.site_offsets[number] + site]), abs=1e-5)
            assert value == pytest.approx(float(output.values[number]), abs=1e-5)
            assert policy.action(each, site) in each.site_numbers


@pytest.mark.parametrize("by_rule", [True, False])
def test_the_likeliest_is_of_the_likeliest_rule(policy, candidates, by_rule):
    """Where candidates were drawn by rule: else those of which a rule has many would be outvoted by single ones."""
    policy.by_rule, outvoted = by_rule, 0
    for observation in observations(candidates):
        kept = policy.compact(observation)
        probabilities = policy.probabilities(kept)[kept.site_numbers]
        rules = {rule: probabilities[kept.site_rules == rule].sum() for rule in set(kept.site_rules.tolist())}
        chosen, likeliest = policy.choose(kept, None)[0], int(np.argmax(probabilities))
        if by_rule:
            own = kept.site_rules == max(rules, key=rules.__getitem__)
            assert own[chosen]
            assert probabilities[chosen] == probabilities[own].max()
            outvoted += int(chosen != likeliest)
        else:
            assert chosen == likeliest
    assert bool(outvoted) == by_rule


def test_what_saves_in_many_places_is_likelier_than_what_nobody_knows(policy, candidates):
    """As the paddings of each block of a ResNeXt are."""
    new = CandidatePolicy(policy.sizes, CONFIG)
    torch.nn.init.zeros_(new.score_head.weight)
    kept = new.compact(observations(candidates)[0])
    alike = kept.site_rules == kept.site_rules[0]
    assert alike.sum() > 2
    told = kept.site_known.copy()
    told[alike, -1] = 0.2  # below the logarithm of their number
    assert alike[new.choose(dataclasses.replace(kept, site_known=told), None)[0]]


def test_every_parameter_gets_a_gradient(policy, candidates):
    kept = [policy.compact(observation, lambda places: np.ones((len(places), 7), np.float32))
            for observation in observations(candidates)]  # fmt: skip
    output = policy(collate(kept))
    (output.log_probs[::3].sum() + output.values.sum()).backward()
    without = [name for name, each in policy.named_parameters() if each.grad is None or not each.grad.abs().sum()]
    assert without == ["prior.trust"] or without == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate_mask": np.zeros(25, np.int8)}, "candidate_mask"),
        ({"node_candidate": "reversed"}, "node_candidate"),
        ({"graph": "narrow"}, "node columns"),
    ],
)
def test_observations_that_clash_are_refused(policy, candidates, change, message):
    observation = observations(candidates)[-1]
    if change.get("node_candidate") is not None:
        change = {"node_candidate": observation["node_candidate"][::-1]}
    if isinstance(change.get("graph"), str):
        graph = observation["graph"]
        change = {"graph": graph._replace(nodes=graph.nodes[:, :2])}
    with pytest.raises(AgentError, match=message):
        policy.compact({**observation, **change})


def test_other_spaces_are_refused(toy):
    with pytest.raises(AgentError, match="use CandidateEnv"):
        CandidateSizes.from_space(toy.ToyRewriteEnv().observation_space)


@pytest.mark.parametrize(
    ("settings", "message"), [({"heads": 3}, "multiple of heads"), ({"change_rounds": 0}, "at least 1"),
                              ({"learning": 1}, "no setting learning")]
)  # fmt: skip
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(AgentError, match=f"CandidateConfig.*{message}"):
        CandidateConfig.from_dict(settings)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings(name):
    assert CandidateConfig.from_dict(PRESETS[name]).as_dict().items() >= PRESETS[name].items()


def test_messages_keep_every_bit(policy, candidates):
    kept = [policy.compact(observation) for observation in observations(candidates)]
    episode = Episode(kept, [0] * len(kept), [1.0] * len(kept), [0.1] * len(kept), [-0.3] * len(kept))
    again = unpack_episode(pack_episode(episode), CandidateObservation)
    for one, other in zip(kept, again.observations, strict=True):
        for name, value in vars(one).items():
            np.testing.assert_array_equal(getattr(other, name), value)
            assert getattr(other, name).dtype == value.dtype


def run(candidates, folder, steps: int, **options):
    env = candidates.ToyCandidateEnv(length=5, horizon=10)
    return train(env, CONFIG, steps, 0, folder, policy="candidate", checkpoint_secs=0.0, **options)


@pytest.fixture(scope="module")
def short(candidates, tmp_path_factory) -> Path:
    """The folder of a short training."""
    folder = tmp_path_factory.mktemp("short")
    run(candidates, folder, 60)
    return folder


def test_a_resumed_training_equals_an_uninterrupted_one(candidates, short, tmp_path):
    run(candidates, tmp_path / "straight", 120)
    shutil.copytree(short, tmp_path / "broken")
    run(candidates, tmp_path / "broken", 120, resume=True)
    assert_same_training(tmp_path / "straight", tmp_path / "broken")


@pytest.mark.usefixtures("copied_workers")
def test_workers_give_the_training_of_one_process(candidates, tmp_path):
    run(candidates, tmp_path / "alone", 90)
    workers = Workers("toy_candidates:ToyCandidateEnv", {"length": 5, "horizon": 10}, 2)
    run(candidates, tmp_path / "together", 90, workers=workers)
    assert_same_training(tmp_path / "alone", tmp_path / "together")


def test_a_stored_agent_acts_as_it_did(candidates, short):
    env = candidates.ToyCandidateEnv(length=5, horizon=10)
    agent = load_agent(short / "agent.safetensors", env.observation_space)
    assert isinstance(agent, Agent)
    observation, _ = env.reset(seed=0)
    probabilities = agent.probabilities(observation)
    assert agent.act(observation) == int(np.argmax(probabilities))
    rng = np.random.default_rng(0)
    drawn = [agent.draw([observation, observation], rng, [0, 1]) for _ in range(200)]
    assert {type(action) for pair in drawn for action in pair} == {int}
    share = np.mean([action == agent.act(observation) for pair in drawn for action in pair])
    assert share == pytest.approx(probabilities.max(), abs=0.15)
    agent.tried([observation], [0], [50.0])
    assert agent.probabilities(observation)[0] > probabilities[0], "what saved much is likelier"
    assert agent.fresh().probabilities(observation)[0] == probabilities[0]


def test_an_agent_that_never_looked_at_places_does_not_begin_to(candidates, tmp_path):
    env = candidates.ToyCandidateEnv(length=5, horizon=10)
    config = dataclasses.replace(CONFIG, informed_share=0.0)
    agent = load_agent(train(env, config, 40, 0, tmp_path, policy="candidate").checkpoint)
    observation, _ = env.reset(seed=0)
    before = agent.probabilities(observation)
    agent.tried([observation], [0], [50.0])
    np.testing.assert_array_equal(agent.probabilities(observation), before)


def test_more_candidates_than_it_was_trained_with_do_no_harm(candidates, short):
    wide = candidates.ToyCandidateEnv(most=200, length=12)
    agent = load_agent(short / "agent.safetensors", wide.observation_space)
    observation, _ = wide.reset(seed=0)
    assert agent.probabilities(observation).shape == (201,)
    assert agent.act(observation) in (*range(24), 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_solves_what_greedy_does_not(toy, candidates, tmp_path):
    env = candidates.ToyCandidateEnv(length=4, horizon=12)
    env.reset(seed=0)
    start = env.chain.state
    assert toy.greedy(start) < toy.optimum(start)

    def solves(seed: int) -> bool:
        config = CandidateConfig(hidden=32, rounds=2, heads=2, learning_rate=2e-3, ent_coef=0.12)
        result = train(env, config, 4000, seed, tmp_path / str(seed), policy="candidate")
        agent = load_agent(result.checkpoint)
        observation, total, over = env.reset(seed=0)[0], 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
            total, over = total + reward, terminated or truncated
        return total == toy.optimum(start)

    assert most_of(5, solves)


def test_what_is_kept_is_checked_against_the_sizes(policy, candidates):
    sizes = dataclasses.replace(policy.sizes, num_operators=1)
    with pytest.raises(AgentError, match="operators below 1"):
        compact(observations(candidates)[-1], sizes)


def test_a_rule_weighs_as_its_most_promising_candidate(policy, candidates):
    """By what is known of places; candidates of which less is known do not count against it."""
    new = CandidatePolicy(policy.sizes, CONFIG)
    torch.nn.init.zeros_(new.score_head.weight)
    torch.nn.init.zeros_(new.known.weight)
    observation = observations(candidates)[0]
    kept = new.compact(observation)
    rule = int(kept.site_rules[0])
    alike = np.flatnonzero(kept.site_rules == rule)
    assert len(alike) > 2
    told = kept.site_known.copy()
    told[alike[1], -1] = 30.0  # as much as the prior believes
    told[alike[2], -1] = -2.0
    probabilities = new.probabilities(dataclasses.replace(kept, site_known=told))
    each, rules = probabilities[kept.site_numbers[:-1]], kept.site_rules[:-1]
    others = set(rules.tolist()) - {rule}
    assert others
    for other in others:
        assert each[rules == rule].sum() / each[rules == other].sum() == pytest.approx(np.exp(4.0), rel=1e-3)
