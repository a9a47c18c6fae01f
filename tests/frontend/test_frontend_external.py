"""Data that a model keeps in other files: read where they lie beside it, otherwise one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from frontend_error import message
from onnx import helper

from rlflow_tvm.frontend import from_onnx, zoo

node = helper.make_node


def _with_external_data(tmp_path: Path) -> Path:
    path = tmp_path / "outside.onnx"
    model = zoo.load("demo")
    onnx.save(model, path, save_as_external_data=True, location="outside.data", size_threshold=0)
    return path


def test_external_data_is_read(tmp_path: Path) -> None:
    assert len(from_onnx(_with_external_data(tmp_path))["main"].params) == 1


def test_missing_external_data(tmp_path: Path) -> None:
    path = _with_external_data(tmp_path)
    (tmp_path / "outside.data").unlink()
    text = message(lambda: from_onnx(path))
    assert "outside.onnx: its external data cannot be read" in text
    assert "outside.data" in text


def test_a_store_of_models_holds_links_to_them(tmp_path: Path) -> None:
    """As Hugging Face's: all of them into one folder, under other names."""
    stored, shown = tmp_path / "blobs", tmp_path / "snapshot"
    shown.mkdir()
    path = _with_external_data(tmp_path)
    stored.mkdir()
    for number, name in enumerate(("outside.onnx", "outside.data")):
        (tmp_path / name).rename(stored / f"{number}")
        (shown / name).symlink_to(Path("..") / "blobs" / f"{number}")
    assert len(from_onnx(shown / path.name)["main"].params) == 1
    (shown / "outside.data").unlink()
    (tmp_path / "elsewhere").mkdir()
    (stored / "1").rename(tmp_path / "elsewhere" / "1")
    (shown / "outside.data").symlink_to(Path("..") / "elsewhere" / "1")
    assert "its external data cannot be read" in message(lambda: from_onnx(shown / path.name))


def test_external_data_outside_of_the_folder(tmp_path: Path) -> None:
    path = _with_external_data(tmp_path)
    (tmp_path / "outside.data").rename(tmp_path.parent / "escaped.data")
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "../escaped.data"
    onnx.save(model, path)
    assert "its external data cannot be read" in message(lambda: from_onnx(path))


def test_a_model_whose_external_data_was_not_loaded(tmp_path: Path) -> None:
    model = onnx.load(_with_external_data(tmp_path), load_external_data=False)
    text = message(lambda: from_onnx(model))
    assert "load_external_data=True" in text


def _outside() -> onnx.TensorProto:
    tensor = onnx.TensorProto(data_type=1, dims=[3], name="w", data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    return tensor


def _in_an_attribute(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, node("Constant", [], ["w"], value=_outside()))


def _in_a_subgraph(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "b", [], [helper.make_tensor_value_info("w", 1, [3])], [_outside()])
    model.graph.node.insert(0, node("If", ["c"], ["w"], then_branch=branch, else_branch=branch))
    model.graph.input.append(helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))


def _in_a_function(model: onnx.ModelProto) -> None:
    body = [node("Constant", [], ["w"], value=_outside())]
    model.functions.append(helper.make_function("local", "W", [], ["w"], body, [helper.make_opsetid("", 18)]))
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.node.insert(0, node("W", [], ["w"], domain="local"))


@pytest.mark.parametrize("place", [_in_an_attribute, _in_a_subgraph, _in_a_function])
def test_no_data_are_read_from_the_working_directory(
    place: Callable[[onnx.ModelProto], None], make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model([node("Add", ["x", "w"], ["y"])], {"x": (3,)}, ["y"])
    place(model)
    (tmp_path / "w.bin").write_bytes(np.ones(3, np.float32).tobytes())
    monkeypatch.chdir(tmp_path)
    assert "the data of weight 'w' was not loaded" in message(lambda: from_onnx(model))
