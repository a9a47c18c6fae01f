"""Which of a search's kernels are predicted, which measured, and what is learned in between."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cost_kernels import add, matmul, two_layers
from fake_workers import workers_by
from test_cost_learned import full_disk, law

from rlflow_tvm.cost import (
    CostModel,
    KernelDatabase,
    KernelTimer,
    LearnedCost,
    Measurement,
    Prediction,
    PredictionPolicy,
)
from rlflow_tvm.cost.estimator import KernelEstimator, learned_path, train_model
from rlflow_tvm.cost.features import kernel_features
from rlflow_tvm.cost.learned import LEAST_SAMPLES
from rlflow_tvm.cost.schema import ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.errors import CostError, KernelError
from rlflow_tvm.ir import detach
from rlflow_tvm.kernels import Kernel

ALL = PredictionPolicy(share=1.0, deviation=10.0)


class LawTimer(KernelTimer):
    """Kernels take what a law says, in a graph and alone; nothing runs."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._workers = workers_by(law)()
        self.graph_version = self.version


class Estimator(KernelEstimator):
    """Of kernels that are in no graph; nor does a `LawTimer` ask for one."""

    def estimate(self, asked, **options):
        return super().estimate(asked, graph=tuple, **options)


@cache
def kernels(count: int, seed: int) -> list[Kernel]:
    """Products of random shapes, none of another seed among them; not to be changed."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        n, k, m = (int(2 ** rng.uniform(2, 9)) for _ in range(3))
        made.append(Kernel(matmul(n, k, m), f"{seed}-{i}", "matmul", 1 + i % 3, "".join(rng.choice(list("0134"), 3))))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """A database that holds 400 kernels."""
    folder = tmp_path_factory.mktemp("learned")
    with KernelDatabase(folder / "k.sqlite") as database, LawTimer(target, database) as timer:
        timer.measure(kernels(400, 0))
    return folder


@pytest.fixture(scope="module")
def taught(folder, target, tmp_path_factory):
    """As that, with what is learnt from it beside."""
    taught = shutil.copytree(folder, tmp_path_factory.mktemp("taught") / "learned")
    with KernelDatabase(taught / "k.sqlite") as database, LawTimer(target, database) as timer:
        Estimator(timer, ALL).estimate(kernels(1, 1))
        assert learned_path(database.path, timer.target_key, timer.version).exists()
        assert timer.measured == 0
    return taught


@pytest.fixture
def timer(taught, target, tmp_path):
    """All that it measures is of this test alone."""
    mine = shutil.copytree(taught, tmp_path / "learned")
    with KernelDatabase(mine / "k.sqlite") as database, LawTimer(target, database) as timer:
        yield timer


def take(database: KernelDatabase, folder: Path, only: str = "true") -> None:
    """What is held there."""
    with database.transaction(folder / "k.sqlite") as execute:
        execute(f"INSERT INTO measurement SELECT * FROM other.measurement WHERE {only}")
        execute("INSERT INTO description SELECT * FROM other.description")


def test_by_default_all_is_measured(timer):
    estimator = Estimator(timer)
    found = estimator.estimate(kernels(10, 1))
    assert all(isinstance(each, Measurement) for each in found)
    assert (timer.measured, estimator.predicted) == (10, 0)


def test_sure_ones_are_predicted(timer):
    estimator = Estimator(timer, ALL)
    asked = kernels(20, 1)
    found = estimator.estimate(asked)
    assert all(isinstance(each, Prediction) for each in found)
    assert (timer.measured, estimator.predicted) == (0, 20)
    errors = [abs(p.run_secs / law(kernel_features(k.func), k.cold) - 1) for k, p in zip(asked, found, strict=True)]
    assert np.mean(errors) < 0.15


def test_those_that_cannot_be_described_are_measured(timer, monkeypatch):
    """Once: what measuring finds is stored with a description."""
    asked = kernels(3, 1)
    describe, strange = timer.descriptions.of, [asked[1].key]

    def described(kernel):
        if kernel.key in strange:
            strange.remove(kernel.key)
            raise KernelError("no schedule rule takes it")
        return describe(kernel)

    monkeypatch.setattr(timer.descriptions, "of", described)
    found = Estimator(timer, ALL).estimate(asked)
    assert [isinstance(each, Measurement) for each in found] == [False, True, False]


def test_known_ones_are_not(timer):
    found = Estimator(timer, ALL).estimate([*kernels(3, 0), *kernels(2, 1)])
    assert [isinstance(each, Measurement) for each in found] == [True] * 3 + [False] * 2


def test_unsure_ones_are_measured(timer):
    asked = kernels(20, 1)
    sure = {p.deviation for p in Estimator(timer, ALL).estimate(asked)}
    limit = float(np.median(list(sure)))
    found = Estimator(timer, PredictionPolicy(share=1.0, deviation=limit)).estimate(asked)
    predicted = [each for each in found if isinstance(each, Prediction)]
    assert len(predicted) == 10
    assert max(each.deviation for each in predicted) <= limit


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_share_of_a_graphs_time(timer, share):
    asked = kernels(20, 1)
    found = Estimator(timer, PredictionPolicy(share=share, deviation=10.0)).estimate(asked)
    secs = [k.count * each.run_secs for k, each in zip(asked, found, strict=True)]
    predicted = sum(s for s, each in zip(secs, found, strict=True) if isinstance(each, Prediction))
    # the share is of what was thought before the others were measured
    assert 0 < predicted <= 1.2 * share * sum(secs)
    assert timer.measured > 0


def test_all_measured_on_demand(timer):
    estimator = Estimator(timer, ALL)
    estimator.estimate(kernels(5, 1))
    found = estimator.estimate(kernels(5, 1), confirmed=True)
    assert all(isinstance(each, Measurement) for each in found)
    assert timer.measured == 5
    assert estimator.estimate(kernels(5, 1)) == found


def test_trained_again_as_the_database_grows(timer):
    estimator = Estimator(timer, ALL)
    strange = [Kernel(add(n, m), f"add-{n}-{m}", "add", 1, "000") for n in (3, 40, 500) for m in (3, 40, 500)]
    before = estimator.estimate(strange)
    timer.measure(
        [Kernel(add(n, m), f"a{n},{m}", "add", 1, "000") for n in range(4, 404, 36) for m in range(7, 407, 36)]
    )
    after = estimator.estimate(strange)

    def error(found):
        right = [law(kernel_features(kernel.func), "000") for kernel in strange]
        return np.mean([abs(math.log(p.run_secs / secs)) for p, secs in zip(found, right, strict=True)])

    assert error(after) < error(before)


def test_too_little_to_learn_from_measures(target):
    with KernelDatabase(":memory:") as database, LawTimer(target, database) as timer:
        estimator = Estimator(timer, ALL)
        estimator.estimate(kernels(LEAST_SAMPLES - 1, 0))
        estimator.estimate(kernels(2, 1))
        assert (timer.measured, estimator.predicted) == (LEAST_SAMPLES + 1, 0)
        estimator.estimate(kernels(2, 2))
        assert estimator.predicted == 2
    with LawTimer(target) as timer:
        assert Estimator(timer, ALL).estimate(kernels(2, 1))[0].repeats == 7
        with pytest.raises(CostError, match="no kernel database"):
            train_model(timer)


@pytest.mark.usefixtures("quick_fits")
def test_the_model_lies_beside_the_database(folder, target, caplog):
    with KernelDatabase(folder / "k.sqlite") as database, LawTimer(target, database) as timer:
        path = learned_path(database.path, timer.target_key, timer.version)
        assert learned_path(database.path, timer.target_key, "another") != path
        first = Estimator(timer, ALL).estimate(kernels(5, 1))
        content = json.loads(path.read_text())
        assert (content["trained_on"], content["target"]) == (400, timer.target_key)
        written = path.stat().st_mtime_ns
        assert Estimator(timer, ALL).estimate(kernels(5, 1)) == first
        assert path.stat().st_mtime_ns == written
        path.write_text("{}")
        assert Estimator(timer, ALL).estimate(kernels(5, 1)) == first
        assert "train it again" in caplog.text
        assert LearnedCost.load(path, timer.target_key, timer.version).trained_on == 400


@pytest.mark.usefixtures("quick_fits")
def test_a_model_goes_with_the_times_it_was_learned_from(timer, target):
    """Its database was moved away, and the new one has another reference; or a part of it was dropped."""
    path = learned_path(timer.database.path, timer.target_key, timer.version)
    moved = Path(timer.database.path).with_name("moved.sqlite")
    with KernelDatabase(moved) as database, LawTimer(target, database) as anew:
        anew._times.store(REFERENCE_KEY, ONCE_VERSION, Measurement(run_secs=3e-4))
        take(database, Path(timer.database.path).parent, "kernel <> 'reference'")
        estimator = Estimator(anew, ALL)
        assert isinstance(estimator.estimate(kernels(1, 1))[0], Prediction)
        trained = LearnedCost.load(path, timer.target_key, timer.version)
        assert (trained.trained_on, trained.usual_secs) == (400, 3e-4)
        with database.transaction(timer.database.path) as execute:
            execute("DELETE FROM main.measurement WHERE kernel LIKE '0-1%'")
        anew.measure(kernels(1, 2))
        estimator.estimate(kernels(1, 3))
        trained = LearnedCost.load(path, timer.target_key, timer.version)
        assert LEAST_SAMPLES < trained.trained_on < 400
        with database.transaction(timer.database.path) as execute:
            execute("DELETE FROM main.measurement")
        anew.measure(kernels(1, 4))
        assert isinstance(estimator.estimate(kernels(1, 5))[0], Measurement)
        assert not path.exists()


@pytest.mark.usefixtures("quick_fits")
def test_a_model_that_cannot_be_kept_serves_this_process(folder, target, tmp_path, monkeypatch, caplog):
    with KernelDatabase(tmp_path / "k.sqlite") as database, LawTimer(target, database) as timer:
        take(database, folder)
        monkeypatch.setattr(Path, "write_text", full_disk)
        estimator = Estimator(timer, ALL)
        assert all(isinstance(each, Prediction) for each in estimator.estimate(kernels(5, 1)))
        assert "No space left on device" in caplog.text
        assert not list(tmp_path.glob("learned-*"))
        caplog.clear()
        estimator.estimate(kernels(5, 2))
        assert not caplog.text


@pytest.mark.parametrize("settings", [{"share": -0.1}, {"share": 1.5}, {"deviation": 0.0}, {"share": math.nan}])
def test_a_policy_out_of_range(settings):
    with pytest.raises(CostError, match=r"prediction (share|deviation)"):
        PredictionPolicy(**settings)


def test_a_graphs_cost_tells_what_is_predicted(timer, target):
    model = CostModel(target, timer=timer, policy=ALL)
    mod = detach(two_layers(width=48)).mod
    predicted = model.cost(mod)
    (kernel,) = model.kernels(mod)
    assert (predicted.predicted, model.predicted, model.measured) == (2, 1, 0)
    assert 0 < predicted.deviation_secs < predicted.run_secs
    assert model.cost(mod) is predicted
    measured = model.cost(mod, confirmed=True)
    assert (measured.predicted, measured.deviation_secs, model.measured) == (0, 0.0, 1)
    assert measured.run_secs == pytest.approx(2 * law(kernel_features(kernel.func), kernel.cold) + 2e-7)
    assert model.cost(mod) is measured


def test_a_predicted_cost_follows_what_was_measured_since(timer, target):
    model = CostModel(target, timer=timer, policy=ALL)
    mod = detach(two_layers(width=48)).mod
    assert model.cost(mod).predicted == 2
    timer.measure(model.kernels(mod))
    assert model.cost(mod).predicted == 0
