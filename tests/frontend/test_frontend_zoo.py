"""The evaluation models: names, cache, and errors where an extra is missing. And the random inputs for them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs, random_inputs, zoo
from rlflow_tvm.frontend.zoo_light import light_files, with_random_weights


def test_names_hold_the_evaluation_models() -> None:
    names = zoo.names()
    assert names[0] == "demo"
    assert {"bert-base", "vit-base", "resnet18", "resnet50", "squeezenet1.1", "inception-v3"} < set(names)
    assert {"resnext50", "dalle", "transformer-transducer", "repvgg-a0", "mobileone-s0", "segformer-b0"} < set(names)
    assert {"bert-tiny", "squeezenet-tiny", "light_squeezenet"} < set(names)
    assert len(set(names)) == len(names)


def test_an_unknown_name() -> None:
    with pytest.raises(FrontendError, match="no evaluation model 'alexnet2': there are demo, bert-base"):
        zoo.load("alexnet2")


def test_a_model_at_another_size() -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("transformers")
    extents = {}
    for name in ("squeezenet-tiny", "squeezenet-tiny@40", "bert-tiny@1"):
        model = zoo.load(name)
        extents[name] = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
        assert np.isfinite(onnxruntime_outputs(model, random_inputs(from_onnx(model), 0))[0]).all()
    assert list(extents.values()) == [[1, 3, 56, 56], [1, 3, 40, 40], [1, 1]]
    assert zoo.path("squeezenet-tiny@40") != zoo.path("squeezenet-tiny")


@pytest.mark.parametrize("name", ["vit-base@64", "dalle@1", "squeezenet-tiny@", "squeezenet-tiny@0", "bert-tiny@x"])
def test_a_size_that_a_model_cannot_have(name: str) -> None:
    with pytest.raises(FrontendError, match=f"cannot be had at size '{name.split('@')[1]}'"):
        zoo.load(name)


def test_only_exported_models_have_a_torch_module() -> None:
    with pytest.raises(FrontendError, match="'light_squeezenet' is no torch model: there are bert-base"):
        zoo.torch_module("light_squeezenet")


@pytest.mark.parametrize("missing", ["torch", "transformers", "onnxscript"])
def test_a_missing_extra(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(FrontendError, match=rf"needs {missing}: install it with pip install 'rlflow_tvm\[zoo\]'"):
        zoo.load("bert-tiny")
    assert not list(tmp_path.rglob("*.onnx"))


def test_the_demo_is_the_same_each_time_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path))
    path = zoo.path("demo")
    assert path == tmp_path / "zoo" / f"demo-v{zoo.VERSION}.onnx"
    written = path.stat().st_mtime_ns
    assert zoo.path("demo").stat().st_mtime_ns == written
    assert [p.name for p in path.parent.iterdir()] == [path.name], "a half-written file was left"
    assert onnx.load(path) == zoo.load("demo")


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path / "file"))
    with pytest.raises(FrontendError, match="set RLFLOW_TVM_HOME"):
        zoo.path("demo")


def test_the_demo_has_what_the_rules_look_for() -> None:
    model = zoo.load("demo")
    onnx.checker.check_model(model, full_check=True)
    count = [n.op_type for n in model.graph.node].count
    assert count("Concat") == 2
    assert count("Add") == 2
    kernels = {t.name: tuple(t.dims) for t in model.graph.initializer if len(t.dims) == 4}
    assert all(o % 16 == 0 and i in (3, 16, 32, 64) for o, i, _, _ in kernels.values())


def test_random_weights_make_the_light_models_channels_differ() -> None:
    model = onnx.load(light_files()["light_shufflenet"])
    inputs = random_inputs(from_onnx(model), 0)
    (flat,) = onnxruntime_outputs(model, inputs)
    assert np.ptp(flat) == 0, "the wheel's own weights tell nothing"
    drawn = with_random_weights(model, 1)
    assert not any(n.op_type == "ConstantOfShape" for n in drawn.graph.node)
    (outputs,) = onnxruntime_outputs(drawn, inputs)
    assert np.isfinite(outputs).all()
    assert np.ptp(outputs) > 1e-3
    assert with_random_weights(model, 1) == drawn
    assert with_random_weights(model, 2) != drawn


def test_torch_models_are_kept_and_sane(package_home: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    model = zoo.load("squeezenet-tiny")
    path = zoo.path("squeezenet-tiny")
    assert path.parent == package_home / "zoo"
    assert onnx.load(path) == model
    (outputs,) = onnxruntime_outputs(model, random_inputs(from_onnx(model), 0))
    assert np.isfinite(outputs).all()
    assert 0.05 < outputs.std() < 50


def test_inputs_of_a_language_model() -> None:
    pytest.importorskip("transformers")
    mod = from_onnx(zoo.load("bert-tiny"))
    drawn = random_inputs(mod, 7)
    assert list(drawn) == ["input_ids", "attention_mask", "token_type_ids"]
    assert all(array.dtype == np.int64 for array in drawn.values())
    assert drawn["input_ids"].max() > 100
    assert drawn["input_ids"].max() < 1024
    assert set(drawn["token_type_ids"].ravel()) == {0, 1}
    mask = drawn["attention_mask"]
    assert mask[:, 0].all()
    assert not mask.all()
    assert (np.diff(mask, axis=1) <= 0).all(), "what is masked stands at the end"
    assert not np.array_equal(random_inputs(mod, 8)["input_ids"], drawn["input_ids"])


def test_floats_are_normal() -> None:
    image = random_inputs(from_onnx(zoo.load("demo")), 0)["image"]
    assert image.shape == (1, 3, 32, 32)
    assert image.dtype == np.float32
    assert abs(image.mean()) < 0.1
    assert abs(image.std() - 1) < 0.1
