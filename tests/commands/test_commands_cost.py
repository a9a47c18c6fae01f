"""`python -m rlflow_tvm.cost`, as a user calls it."""

from __future__ import annotations

import json

import pytest
from fake_workers import workers_by
from tvm import te, tirx

from rlflow_tvm.cost import KernelDatabase, KernelTimer, target_key, timer
from rlflow_tvm.cost.rehearsal import Step
from rlflow_tvm.evaluation import Score, measure_rewritten, model_kernels
from rlflow_tvm.frontend import from_onnx, zoo
from rlflow_tvm.frontend.random_network import random_network
from rlflow_tvm.kernels import Kernel, as_target


def product(n: int, k: int) -> tirx.PrimFunc:
    a, b = te.placeholder((n, k), name="a"), te.placeholder((k, 16), name="b")
    j = te.reduce_axis((0, k), name="j")
    return te.create_prim_func([a, b, te.compute((n, 16), lambda x, y: te.sum(a[x, j] * b[j, y], axis=j), name="c")])


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A database of made-up times, of products and of a bundled model."""
    path = tmp_path_factory.mktemp("cost") / "kernels.sqlite"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer, "LocalWorkers", workers_by(lambda features, _cold: 1e-6 + 1e-8 * features["flops"]))
        sizes = [(n, k) for n in range(2, 12) for k in range(3, 13)]
        kernels = [Kernel(product(n, k), f"{n},{k}", "matmul", 1, "000") for n, k in sizes]
        with KernelDatabase(path) as database, KernelTimer(as_target(None), database) as opened:
            opened.measure(kernels, None, lambda: tuple(Step(k.func, k.key, k.cold, (0, 1, 2)) for k in kernels))
            model_kernels(from_onnx(zoo.path("light_squeezenet")), as_target(None), database, 0, 0, 0)
    return path


def test_train_leaves_the_model_beside_the_database(run, filled):
    done = run("cost", "train", "--database", filled)
    assert done.returncode == 0, done.stderr
    assert "trained on 1" in done.stdout
    (model,) = filled.parent.glob("learned-*.json")
    assert json.loads(model.read_text())["target"] == target_key(as_target(None))


def test_too_little_to_train_on(run, tmp_path):
    KernelDatabase(tmp_path / "empty.sqlite").close()
    done = run("cost", "train", "--database", tmp_path / "empty.sqlite")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 0 measured kernels are too few")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("learned-*"))


def test_evaluate_tells_how_good_predictions_are(run, filled, tmp_path):
    """One model from made-up products: bad predictions, honestly told."""
    done = run(
        "cost", "evaluate", "zoo:light_squeezenet", "--walks", 0, "--database", filled, "--json", tmp_path / "s.json"
    )
    assert done.returncode == 0, done.stderr
    (score,) = json.loads((tmp_path / "s.json").read_text())
    assert set(score) == set(Score.__dataclass_fields__)
    assert (score["model"], score["trained_on"]) == ("zoo:light_squeezenet", 100)
    assert score["kernels"] >= 10
    assert f"{score['mape']:.1%}" in done.stdout


def test_calibrate_goes_on_where_it_was(run, tmp_path):
    """All is known: the same kernels are found again, and none is measured."""
    path = tmp_path / "k.sqlite"
    with pytest.MonkeyPatch.context() as patch, KernelDatabase(path) as database:
        patch.setattr(timer, "LocalWorkers", workers_by(lambda features, _cold: 1e-6 + 1e-8 * features["flops"]))
        own = [measure_rewritten(from_onnx(random_network(n)), as_target(None), database, 1, 2, n) for n in (5, 6)]
        held = database.rows(("kernel", "run_secs"))
    done = run("cost", "calibrate", "--networks", 2, "--seed", 5, "--walks", 1, "--steps", 2, "--database", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(own[0] | own[1])} kernels of 2 networks are known")
    with KernelDatabase(path) as database:
        assert database.rows(("kernel", "run_secs")) == held


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--database", "nowhere.sqlite"), "nowhere.sqlite: no such kernel database"),
        (("evaluate", "zoo:nothing"), "nothing"),
        (("evaluate", "--json", "no/such/folder.json"), "does not exist"),
    ],
)
def test_wrong_use_is_one_line(run, arguments, message):
    done = run("cost", *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_database_is_not_written_over_by_what_is_told_of_it(run, tmp_path):
    path = tmp_path / "kernels.sqlite"
    KernelDatabase(path).close()
    before = path.read_bytes()
    for arguments in (("export", path), ("stats", "--json", path)):
        done = run("cost", *arguments, "--database", path)
        assert done.returncode == 2
        assert "kernels.sqlite: is read too" in done.stderr
    assert path.read_bytes() == before
