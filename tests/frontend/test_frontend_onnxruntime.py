"""Whole models as ONNX Runtime's optimizer and quantizer write them: they compute what ONNX Runtime computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from frontend_error import message
from onnx import numpy_helper

from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs, random_inputs, zoo

ort = pytest.importorskip("onnxruntime")
quantization = pytest.importorskip("onnxruntime.quantization")


def _operators(file: Path) -> set[str]:
    return {node.op_type for node in onnx.load(file).graph.node}


def _optimised(file: Path, level: str) -> Path:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(file.with_suffix(f".{level.lower()}.onnx"))
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors only: it warns that such a file is for this machine
    ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return Path(options.optimized_model_filepath)


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], Path]:
    """A small model of the zoo, as a file that may be written beside."""
    return partial(_saved, tmp_path)


def _saved(folder: Path, name: str) -> Path:
    if name != "demo":
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    file = folder / f"{name}.onnx"
    onnx.save(zoo.load(name), file)
    return file


def _differences(file: Path, run: Callable) -> list[float]:
    """The largest of each output, in parts of its range, between TVM and ONNX Runtime on the same file."""
    mod = from_onnx(file)
    inputs = random_inputs(mod, 9)
    pairs = zip(run(mod, inputs), onnxruntime_outputs(str(file), inputs), strict=True)
    return [float(np.abs(found - expected).max() / np.ptp(expected)) for found, expected in pairs]


_FUSED = {
    "demo": {"FusedConv"},
    "bert-tiny": {"FusedMatMul", "SkipLayerNormalization"},
}


@pytest.mark.parametrize("name", sorted(_FUSED))
def test_optimised_models(name: str, model: Callable[[str], Path], run) -> None:
    file = _optimised(model(name), "EXTENDED")
    assert _FUSED[name] <= _operators(file)
    assert max(_differences(file, run)) < 1e-5


def test_blocked_models_are_refused(model: Callable[[str], Path]) -> None:
    file = _optimised(model("demo"), "ALL")
    assert "com.microsoft.nchwc.Conv, in blocks for the CPU" in message(lambda: from_onnx(file))


def test_models_of_the_optimizer_for_transformers(model: Callable[[str], Path], run) -> None:
    file = model("bert-tiny")
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    fused = optimizer.optimize_model(str(file), "bert", num_heads=2, hidden_size=128, opt_level=2)
    fused.save_model_to_file(str(file.with_suffix(".fused.onnx")))
    assert {"SkipLayerNormalization", "BiasGelu"} <= _operators(file.with_suffix(".fused.onnx"))
    assert max(_differences(file.with_suffix(".fused.onnx"), run)) < 1e-5


class _Samples(quantization.CalibrationDataReader):
    """Four samples of a model's inputs, for its quantisation."""

    def __init__(self, file: Path) -> None:
        mod = from_onnx(file)
        self._samples: Iterator[dict[str, np.ndarray]] = iter([random_inputs(mod, seed) for seed in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._samples, None)


def _quantised(file: Path, kind: str) -> Path:
    out = file.with_suffix(f".{kind}.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "dynamic":
            quantization.quantize_dynamic(file, out, weight_type=quantization.QuantType.QInt8)
        else:
            quantization.quantize_static(
                file,
                out,
                _Samples(file),
                quant_format=quantization.QuantFormat.QDQ if kind == "qdq" else quantization.QuantFormat.QOperator,
                per_channel=kind == "channels",
            )
    return out


_KINDS = {
    "dynamic": {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"},
    "static": {"QLinearConv", "QLinearAdd", "QLinearConcat", "QLinearGlobalAveragePool", "QGemm"},
    "channels": {"QLinearConv", "QLinearAdd", "QLinearConcat", "QLinearGlobalAveragePool", "QGemm"},
    "qdq": {"QuantizeLinear", "DequantizeLinear"},
}


@pytest.mark.parametrize("optimised", [False, True])
@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_quantised_networks(kind: str, optimised: bool, model: Callable[[str], Path], run) -> None:
    file = _quantised(model("demo"), kind)
    assert _operators(file) >= _KINDS[kind]
    file = _optimised(file, "EXTENDED") if optimised else file
    assert max(_differences(file, run)) < 1e-5


def test_our_kernels_of_a_quantised_network(model: Callable[[str], Path], run) -> None:
    """Winograd's convolutions of whole numbers are no whole numbers: a result may be the neighbouring one."""
    file = _quantised(model("demo"), "static")
    written = onnx.load(file).graph
    assert written.node[-1].op_type == "DequantizeLinear"
    (step,) = (numpy_helper.to_array(t) for t in written.initializer if t.name == written.node[-1].input[1])
    mod = from_onnx(file)
    inputs = random_inputs(mod, 9)
    (found,), (expected,) = run(mod, inputs, ours=True), onnxruntime_outputs(str(file), inputs)
    steps = np.abs(found - expected) / step
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
    assert steps.max() < 1.5
    assert steps.mean() < 0.5


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_quantised_transformers(kind: str, model: Callable[[str], Path], run) -> None:
    """What is computed in floats between, norms and softmaxes, may fall on either side of a half."""
    file = _quantised(_optimised(model("bert-tiny"), "BASIC"), kind)
    assert ("MatMulInteger" if kind == "dynamic" else "QLinearMatMul") in _operators(file)
    assert max(_differences(file, run)) < 0.02
