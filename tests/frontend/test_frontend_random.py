"""Random networks: valid, the same for the same seed, of all kinds; and computed as ONNX Runtime computes them."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest

from rlflow_tvm.frontend.random_network import random_network

SEEDS = range(24)


@pytest.fixture(scope="module")
def networks() -> dict[int, onnx.ModelProto]:
    return {seed: random_network(seed) for seed in SEEDS}


@pytest.mark.parametrize("seed", SEEDS)
def test_they_are_valid(networks, seed) -> None:
    onnx.checker.check_model(networks[seed], full_check=True)
    names = [tensor.name for tensor in networks[seed].graph.initializer]
    assert len(set(names)) == len(names)


def test_the_same_seed_gives_the_same_network(networks) -> None:
    assert random_network(3) == networks[3]
    inputs = {str(network.graph.input) for network in networks.values()}
    assert len(inputs) > len(SEEDS) / 2


def test_they_hold_what_models_hold(networks) -> None:
    operators = Counter(node.op_type for network in networks.values() for node in network.graph.node)
    assert {
        "Conv", "Relu", "Sigmoid", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Gemm", "MatMul", "Softmax",
        "LayerNormalization", "Gather", "Erf", "Tanh", "Transpose", "Reshape", "LRN",
    } < set(operators)  # fmt: skip
    names = Counter(network.graph.name for network in networks.values())
    assert len(names) == 2
    assert min(names.values()) > len(SEEDS) / 5


@pytest.mark.parametrize("seed", [2, 6, 11, 17])
def test_they_compute_what_onnxruntime_computes(networks, seed, assert_imports_right) -> None:
    assert_imports_right(networks[seed])
