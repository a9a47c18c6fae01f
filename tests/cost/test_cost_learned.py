"""What is learned of kernels' times, against a known law; and where a search may rely on it."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from cost_kernels import add, matmul

from rlflow_tvm.cost import LearnedCost, Sample
from rlflow_tvm.cost.features import kernel_features
from rlflow_tvm.cost.learned import LEAST_SAMPLES
from rlflow_tvm.errors import CostError

OF = ("this target", "this version")


def law(features: dict[str, float], cold: str) -> float:
    """Seconds of a made-up machine: a rate of arithmetic, bytes that cost by temperature, and a start."""
    moved = sum(features[f"bytes:{i}"] * (4.0 if digit > "1" else 1.0) for i, digit in enumerate(cold))
    return 1e-6 + features["flops"] / 2e11 + moved / 5e10


def samples(count: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        n, k, m = (int(2 ** rng.uniform(2, 9)) for _ in range(3))
        features = kernel_features(matmul(n, k, m))
        cold = "".join(rng.choice(list("0134"), 3))
        made.append(Sample(f"{seed}-{i}", features, cold, law(features, cold)))
    return made


@pytest.fixture(scope="module")
def learned() -> LearnedCost:
    return LearnedCost.fit(samples(600, 0), *OF, seed=3, usual_secs=1e-4)


def test_a_law_is_learned(learned):
    new = samples(100, 1)
    predictions = learned.predict([(s.features, s.cold) for s in new])
    errors = [abs(p.run_secs / s.run_secs - 1) for p, s in zip(predictions, new, strict=True)]
    assert np.mean(errors) < 0.1
    assert np.median([p.deviation for p in predictions]) < 0.15


def test_deviations_are_of_the_errors_size(learned):
    new = samples(300, 1)
    predictions = learned.predict([(s.features, s.cold) for s in new])
    errors = np.log([p.run_secs / s.run_secs for p, s in zip(predictions, new, strict=True)])
    within = np.abs(errors) < 2 * np.array([p.deviation for p in predictions])
    assert within.mean() > 0.85


def test_what_is_unlike_everything_seen_is_less_sure(learned):
    known = learned.predict([(s.features, s.cold) for s in samples(50, 1)])
    strange = learned.predict([(kernel_features(add(4096, 4096)), "444")])
    assert strange[0].deviation > np.median([p.deviation for p in known])


def test_the_same_samples_give_the_same_model():
    first, second = (LearnedCost.fit(samples(LEAST_SAMPLES, 0), *OF, seed=1) for _ in range(2))
    asked = [(s.features, s.cold) for s in samples(10, 1)]
    assert first.predict(asked) == second.predict(asked)


def test_it_is_kept_as_json(learned, tmp_path):
    path = tmp_path / "cost.json"
    learned.save(path)
    json.loads(path.read_text())
    again = LearnedCost.load(path, *OF)
    asked = [(s.features, s.cold) for s in samples(10, 1)]
    assert again.predict(asked) == learned.predict(asked)
    assert again.trained_on == learned.trained_on == 600
    assert again.usual_secs == learned.usual_secs == 1e-4
    assert learned.predict([]) == []


def full_disk(path: Path, text: str) -> None:
    """In place of `Path.write_text`."""
    with path.open("w") as file:
        file.write(text[:100])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_cannot_be_written(learned, tmp_path, monkeypatch):
    """The one before is left as it was, and nothing beside it."""
    path = tmp_path / "cost.json"
    learned.save(path)
    before = path.read_text()
    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(CostError, match=r"cost\.json: .* cannot be written \(No space left on device\)"):
        learned.save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("other", [("another target", OF[1]), (OF[0], "another version")])
def test_a_model_of_something_else_is_refused(other, learned, tmp_path):
    learned.save(tmp_path / "cost.json")
    with pytest.raises(CostError, match="it was trained for this target, this version"):
        LearnedCost.load(tmp_path / "cost.json", *other)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "another"}', '{"format": "rlflow_tvm.learned_cost/3"}']
)
def test_another_file_is_refused(content, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(CostError, match=r"cost\.json: no learned cost model .*train it again"):
        LearnedCost.load(path, *OF)


def test_too_little_to_learn_from():
    with pytest.raises(CostError, match="49 measured kernels are too few"):
        LearnedCost.fit(samples(LEAST_SAMPLES - 1, 0), *OF)
