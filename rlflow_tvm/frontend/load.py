"""Reading an ONNX file: from a path (or a ModelProto) to a ModelProto that holds all its data, or one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data

from rlflow_tvm.errors import FrontendError


def load_onnx(path_or_model: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """The model and the name by which errors call it.

    A ModelProto is returned as it is (it is not changed by anything in this package). Nothing in the file is
    executed; data files beside it are read by `onnx.load`, which refuses paths that leave the model's folder.

    Raises:
        FrontendError: no such file, not an ONNX file, a truncated file, a missing file of external data.
    """
    if isinstance(path_or_model, onnx.ModelProto):
        label = path_or_model.graph.name or "the model"
        model = path_or_model
        remedy = "load the file with onnx.load(path, load_external_data=True), or give from_onnx the path"
    else:
        path = Path(path_or_model)
        label = str(path)
        model = _read(path)
        remedy = "onnx.load does not look there, store the model in one file"
    missing = next(
        (t for each in (model.graph, *model.functions) for t in _tensors(each) if uses_external_data(t)), None
    )
    if missing is not None:  # numpy_helper would read it from the working directory
        called = f"weight {missing.name!r}" if missing.name else "a constant"
        raise FrontendError(f"{label}: the data of {called} was not loaded: {remedy}")
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise FrontendError(f"{label}: not an ONNX model (it holds no graph): export the model to ONNX again")
    if not model.opset_import and not model.functions:
        raise FrontendError(f"{label}: not an ONNX model (no operator set is named): export the model to ONNX again")
    return model, label


def _tensors(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """All that are stored in a graph or in a function: weights, and those of attributes, in subgraphs too."""
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    if isinstance(graph, onnx.FunctionProto):
        attributes += graph.attribute_proto
        sparse: list[onnx.SparseTensorProto] = []
    else:
        yield from graph.initializer
        sparse = [*graph.sparse_initializer]
    for attribute in attributes:
        yield from (attribute.t, *attribute.tensors)
        sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
        for sub in (attribute.g, *attribute.graphs):
            yield from _tensors(sub)
    for each in sparse:
        yield from (each.values, each.indices)


def _read(path: Path) -> onnx.ModelProto:
    try:
        if not path.exists():
            raise FrontendError(f"{path}: no such file: give the path of an .onnx file")
        if not path.is_file():
            raise FrontendError(f"{path}: not a file: give the path of an .onnx file")
        if path.stat().st_size == 0:
            raise FrontendError(f"{path}: the file is empty: export or download the model again")
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise FrontendError(f"{path}: cannot be read ({error.strerror}): give the path of an .onnx file") from error
    try:
        # The format is named: by the suffix alone onnx.load would read a .json or .txt file as another format.
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise FrontendError(
            f"{path}: not an ONNX file, or a truncated one ({one_line(error)}): export or download the model again"
        ) from error
    except OSError as error:
        raise FrontendError(f"{path}: cannot be read ({one_line(error)}): check the file's permissions") from error
    try:
        onnx.load_external_data_for_model(model, str(_data_folder(path, model)))
    except (OSError, onnx.checker.ValidationError, ValueError) as error:
        raise FrontendError(
            f"{path}: its external data cannot be read ({one_line(error)}): "
            "put the data file that the model was exported with beside it"
        ) from error
    return model


def _data_folder(path: Path, model: onnx.ModelProto) -> Path:
    """Where the data files of the model are. A store of models may hold links to it and to them, all into one other
    folder under other names, as Hugging Face's does: then that one, and the names there are put into the model."""
    there = path.resolve().parent
    if there == path.parent.resolve():
        return path.parent
    entries = [
        entry
        for each in (model.graph, *model.functions)
        for tensor in _tensors(each)
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    ]
    files = {entry.value: path.parent / entry.value for entry in entries}
    if any(Path(name).name != name or file.resolve().parent != there for name, file in files.items()):
        return path.parent
    for entry in entries:
        entry.value = files[entry.value].resolve().name
    return there


def one_line(error: BaseException, limit: int = 300) -> str:
    """The error's text on one line, shortened to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
