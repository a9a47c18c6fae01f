"""Features against small kernels counted by hand, and what is learned from them against a known law."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from cost_kernels import add, gather, matmul
from small_models import MODELS, TARGET

from rlflow_tvm.cost.features import kernel_features
from rlflow_tvm.cost.learned import LEAST_SAMPLES, LearnedCost, Sample
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import extract_kernels

F32 = 4


def test_features_of_a_sum():
    features = kernel_features(add(3, 5))
    assert features["flops"] == 15
    assert [features[f"bytes:{i}"] for i in range(3)] == [15 * F32] * 3
    assert (features["params"], features["bits"], features["blocks"], features["reductions"]) == (3, 32, 1, 0)
    assert (features["spatial"], features["spatial:0"], features["spatial:1"]) == (15, 5, 3)
    assert features["reduced"] == 1
    assert features["work:add"] == 15
    assert "work:mul" not in features


def test_features_of_a_product():
    features = kernel_features(matmul(3, 5, 7))
    assert features["flops"] == 2 * 3 * 5 * 7
    assert (features["spatial"], features["spatial:0"], features["spatial:1"]) == (21, 7, 3)
    assert (features["reduced"], features["reduced:0"], features["reductions"]) == (5, 5, 1)
    assert (features["work:mul"], features["work:add"]) == (105, 105)


def test_indices_are_not_counted_as_arithmetic():
    features = kernel_features(gather(10, 4, 3))
    assert features["bytes:1"] == 3 * 8
    assert "work:add" not in features


@pytest.mark.parametrize("name", sorted(MODELS))
def test_features_of_a_models_kernels_are_finite_and_the_same_each_time(name):
    for kernel in extract_kernels(MODELS[name](), TARGET):
        features = kernel_features(kernel.func)
        assert all(math.isfinite(value) for value in features.values())
        assert features == kernel_features(kernel.func)
        json.dumps(features)


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
    return LearnedCost.fit(samples(600, 0), seed=3)


def test_a_law_is_learned(learned):
    new = samples(100, 1)
    predictions = learned.predict([(s.features, s.cold) for s in new])
    errors = [abs(p.run_secs / s.run_secs - 1) for p, s in zip(predictions, new, strict=True)]
    assert np.mean(errors) < 0.1
    assert np.median([p.deviation for p in predictions]) < 0.1


def test_what_is_unlike_everything_seen_is_less_sure(learned):
    known = learned.predict([(s.features, s.cold) for s in samples(50, 1)])
    strange = learned.predict([(kernel_features(add(4096, 4096)), "444")])
    assert strange[0].deviation > np.median([p.deviation for p in known])


def test_the_same_samples_give_the_same_model():
    first, second = (LearnedCost.fit(samples(LEAST_SAMPLES, 0), seed=1, threads=2) for _ in range(2))
    asked = [(s.features, s.cold) for s in samples(10, 1)]
    assert first.predict(asked) == second.predict(asked)


def test_it_is_kept_as_json(learned, tmp_path):
    path = tmp_path / "cost.json"
    learned.save(path)
    json.loads(path.read_text())
    again = LearnedCost.load(path)
    asked = [(s.features, s.cold) for s in samples(10, 1)]
    assert again.predict(asked) == learned.predict(asked)
    assert again.trained_on == learned.trained_on == 600
    assert learned.predict([]) == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "another"}', '{"format": "rlflow_tvm.learned_cost/1"}']
)
def test_another_file_is_refused(content, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(CostError, match=r"cost\.json: no learned cost model .*train it again"):
        LearnedCost.load(path)


def test_too_little_to_learn_from():
    with pytest.raises(CostError, match="49 measured kernels are too few"):
        LearnedCost.fit(samples(LEAST_SAMPLES - 1, 0))
