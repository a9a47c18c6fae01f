"""ONNX models as files: whole or not at all, and with the weights in a file beside where one file cannot hold them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import TensorProto

from rlflow_tvm.errors import FrontendError

MOST_BYTES = 2_000_000_000
"""Of weights in one file: Protocol Buffers end at 2 GiB, nodes included."""
_APART = 1024  # bytes; shapes and numbers stay in the model, for whoever reads it without the other file
_PAGE = 4096  # what the standard asks offsets to be multiples of, so that the file can be mapped into memory


@contextmanager
def put_in_place(path: str | Path) -> Iterator[Path]:
    """A file to write, which `path` becomes in the end, with others that stand beside it then; where an error is raised
    nothing is left.

    Raises:
        FrontendError: they cannot be written.
    """
    path = Path(os.path.realpath(path))  # what a link leads to is what is written
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            yield Path(folder) / path.name
            for file in sorted(Path(folder).iterdir(), reverse=True):  # the weights first: the model reads them
                os.replace(file, path.with_name(file.name))
    except OSError as error:
        raise FrontendError(f"{path}: cannot be written ({error.strerror}): give another path") from error


@contextmanager
def saved(model: onnx.ModelProto, path: str | Path, most_bytes: int = MOST_BYTES) -> Iterator[Path]:
    """A copy of the file that `path` becomes in the end, to look at; where that raises an error nothing is left.

    Weights of more than `most_bytes` in all go to `path` with `.data` behind its name (ONNX's external data).

    Raises:
        FrontendError: the file cannot be written.
    """
    with put_in_place(path) as temporary:
        _write(model, temporary, most_bytes)
        yield temporary


def save_onnx(model: onnx.ModelProto, path: str | Path, most_bytes: int = MOST_BYTES) -> None:
    """Write a model of any size; see `saved`."""
    with saved(model, path, most_bytes):
        pass


def _write(model: onnx.ModelProto, file: Path, most_bytes: int) -> None:
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > most_bytes:
        model = _with_data_beside(model, file.with_name(f"{file.name}.data"))
    file.write_bytes(model.SerializeToString())


def _with_data_beside(model: onnx.ModelProto, data: Path) -> onnx.ModelProto:
    """The model with its large weights in the file `data`; `model` stays as it is."""
    light = onnx.ModelProto()
    for field, value in model.ListFields():
        if field.name != "graph":
            light.MergeFrom(onnx.ModelProto(**{field.name: value}))
    for field, value in model.graph.ListFields():
        if field.name != "initializer":
            light.graph.MergeFrom(onnx.GraphProto(**{field.name: value}))
    with data.open("wb") as stream:
        for tensor in model.graph.initializer:
            length = len(tensor.raw_data)
            if length < _APART:
                light.graph.initializer.append(tensor)
                continue
            offset = stream.seek(-(-stream.tell() // _PAGE) * _PAGE)
            stream.write(tensor.raw_data)
            apart = TensorProto(
                name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
            )
            for key, value in (("location", data.name), ("offset", offset), ("length", length)):
                apart.external_data.add(key=key, value=str(value))
            light.graph.initializer.append(apart)
    return light
