"""Predictions judged with one model left out: nothing of that model is learned from."""

from __future__ import annotations

import pytest
from fake_workers import workers_by
from small_models import MODELS, TARGET

from rlflow_tvm import evaluation
from rlflow_tvm.cost import KernelDatabase, KernelTimer, LearnedCost, timer
from rlflow_tvm.cost.temperature import Temperatures
from rlflow_tvm.errors import CostError
from rlflow_tvm.evaluation import leave_one_out, model_kernels
from rlflow_tvm.kernels import Lowering


def law(features, _cold) -> float:
    moved = sum(value for name, value in features.items() if name.startswith("bytes:"))
    return 1e-6 + features["flops"] / 1e11 + moved / 2e10


@pytest.fixture(scope="module")
def priced(tmp_path_factory):
    """The database and the kernels of each model, of which the times follow a law."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "LocalWorkers", workers_by(law))
        path = tmp_path_factory.mktemp("evaluation") / "k.sqlite"
        with KernelDatabase(path) as database, KernelTimer(TARGET, database) as opened:
            kernels = {
                name: model_kernels(build(), TARGET, database, walks=3, steps=8, seed=1)
                for name, build in MODELS.items()
            }
            yield database, opened, kernels


def test_kernels_of_the_start_and_of_what_walks_reach(priced):
    database, opened, kernels = priced
    held = {f"{key}/{cold}" for key, _, cold, _ in database.samples(opened.target_key, opened.graph_version)}
    for name, own in kernels.items():
        start = Temperatures(TARGET).kernels(Lowering(TARGET).launches(MODELS[name]()))
        assert len(own.launched) > len(start)
        assert own.launched <= held
        assert {known.split("/")[0] for known in own.launched} <= own.touched
    assert any(len(own.touched) > len({known.split("/")[0] for known in own.launched}) for own in kernels.values())


def test_the_same_seed_gives_the_same_kernels(priced):
    database, _, kernels = priced
    again = model_kernels(MODELS["algebra"](), TARGET, database, walks=3, steps=8, seed=1)
    assert again == kernels["algebra"]


@pytest.mark.usefixtures("quick_fits")
def test_nothing_of_the_model_left_out_is_learned_from(priced, monkeypatch):
    database, opened, kernels = priced
    monkeypatch.setattr(evaluation, "LEAST_KERNELS", 5)
    learned: list[set[str]] = []
    fit = LearnedCost.fit

    def noted(samples, *args):
        learned.append({sample.key for sample in samples})
        return fit(samples, *args)

    monkeypatch.setattr(LearnedCost, "fit", noted)
    scores = leave_one_out(kernels, database, opened.target_key, opened.graph_version)
    assert [score.model for score in scores] == list(kernels)
    for keys, score, own in zip(learned, scores, kernels.values(), strict=True):
        assert not keys & own.touched
        assert keys
        assert score.trained_on == len(
            [1 for key, *_ in database.samples(opened.target_key, opened.graph_version) if key in keys]
        )
        assert score.kernels == len(own.launched)
        assert 0 < score.median_error < score.mape * 2  # the median of positive numbers
        assert -1 <= score.spearman <= 1


def test_a_right_and_a_wrong_prediction(monkeypatch, priced):
    database, opened, kernels = priced
    monkeypatch.setattr(evaluation, "LEAST_KERNELS", 5)
    truth = {tuple(sorted(f.items())): s for _, f, _, s in database.samples(opened.target_key, opened.graph_version)}

    class Half:
        """Says half of the truth."""

        trained_on = 7

        def predict(self, asked):
            return [type("P", (), {"run_secs": 0.5 * truth[tuple(sorted(features.items()))]}) for features, _ in asked]

    monkeypatch.setattr(LearnedCost, "fit", lambda *_: Half())
    one = {"algebra": kernels["algebra"]}
    (score,) = leave_one_out(one, database, opened.target_key, opened.graph_version)
    assert (score.mape, score.median_error, score.total_error) == (pytest.approx(0.5),) * 3
    assert score.spearman == pytest.approx(1.0)
    assert score.trained_on == 7


def test_too_little_of_a_model_is_told_before_any_is_learnt_from(priced, monkeypatch):
    database, opened, kernels = priced
    few = {"algebra": kernels["algebra"]}
    few["few"] = evaluation.ModelKernels(frozenset(sorted(kernels["algebra"].launched)[:3]), frozenset())
    monkeypatch.setattr(LearnedCost, "fit", lambda *_: pytest.fail("that takes long"))
    with pytest.raises(CostError, match="few: 3 measured kernels are too few"):
        leave_one_out(few, database, opened.target_key, opened.graph_version)
