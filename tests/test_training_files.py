"""What a training keeps beside its agent, by prices that are not those of the day before, or of another machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_cost import FakeCostModel
from small_models import MODELS

from rlflow_tvm import training_files
from rlflow_tvm.envs import GraphRewriteEnv, ManyModelsEnv, RewriteProblem
from rlflow_tvm.passes import Plan, default_rules
from rlflow_tvm.search import Greedy


class Slower(FakeCostModel):
    """Another machine, or another day: everything takes `share` times as long."""

    share = 1.5

    def cost(self, mod, *, reach=None, confirmed=False):
        found = super().cost(mod, reach=reach, confirmed=confirmed)
        return type(found)(**{**vars(found), "run_secs": self.share * found.run_secs})


def problem_of(cost_model: FakeCostModel) -> RewriteProblem:
    return RewriteProblem(MODELS["algebra"](), cost_model, default_rules(16))


def test_what_another_machine_finds_is_reckoned_to_our_prices(tmp_path: Path) -> None:
    ours, theirs = problem_of(FakeCostModel()), problem_of(Slower())
    assert theirs.start_secs == pytest.approx(1.5 * ours.start_secs)
    env, rng = ManyModelsEnv({"one": GraphRewriteEnv(problem=theirs, horizon=5)}), np.random.default_rng(0)
    plans, found, best = training_files.BestPlans(tmp_path, {"one": ours}), [], ours.start_secs
    for seed in range(12):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            actions = np.argwhere(observation["location_mask"])
            observation, _, terminated, truncated, info = env.step(actions[rng.integers(len(actions))])
            over = terminated or truncated
        summary = info["episode"]
        training_files.by_our_prices(summary, ours)
        plan = Plan.of(summary["plan"])
        own = ours.cost(ours.replay(plan)).run_secs
        assert summary["run_secs"] == pytest.approx(own)
        assert "start_secs" not in summary
        plans.offer("one", plan, summary["run_secs"], 0)
        best = min(best, own)
        found.append(own)
    assert plans.outcomes()[0].run_secs_after == pytest.approx(best)
    assert ours.start_secs / 1.5 < best < ours.start_secs, "by their own seconds none of it would count"


def test_seconds_of_this_machine_stay_what_they_are() -> None:
    problem = problem_of(FakeCostModel())
    summary = {"run_secs": 0.1 + 0.2, "start_secs": problem.start_secs}
    training_files.by_our_prices(summary, problem)
    assert summary == {"run_secs": 0.1 + 0.2}


@pytest.mark.parametrize("now", [1.0, float("inf")], ids=["it gains nothing", "a kernel of it fails"])
def test_a_best_plan_that_is_none_any_more_is_not_handed_out(
    now: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a training goes on with other prices."""
    problem = problem_of(FakeCostModel())
    found = Greedy().run(problem)
    plans = training_files.BestPlans(tmp_path, {"one": problem})
    plans.offer("one", found.plan, found.run_secs_after, 3)
    with monkeypatch.context() as patches:
        patches.setattr(training_files.BestPlans, "_priced", lambda *_: now * problem.start_secs)
        with caplog.at_level("WARNING", "rlflow_tvm"):
            again = training_files.BestPlans(tmp_path, {"one": problem})
    (outcome,) = again.outcomes()
    assert (outcome.run_secs_after, outcome.plan_length) == (problem.start_secs, 0)
    assert len(Plan.load(outcome.plan)) == 0
    assert "what is cheaper than the model takes its place" in caplog.text
    assert training_files.BestPlans(tmp_path, {"one": problem}).outcomes() == plans.outcomes()
    assert Plan.load(outcome.plan) == found.plan
