"""The evaluation models: built here with random weights from a fixed seed, kept on disk as ONNX files.

Nothing is downloaded. `demo` and the `light_*` entries need nothing but onnx; the others need the extra [zoo].
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend.zoo_demo import demo_model
from rlflow_tvm.frontend.zoo_light import light_files, with_random_weights
from rlflow_tvm.home import home_folder

if TYPE_CHECKING:
    import torch

    TorchModel = tuple[torch.nn.Module, dict[str, torch.Tensor]]

VERSION = "1"
"""Part of the cached files' names: changes when a model would."""

_SEED = 20
_OPSET = 18


@dataclass(frozen=True)
class _Image:
    """A network over one image; `build` names a function of `zoo_vision`."""

    build: str
    size: int
    arguments: tuple = ()
    needs = ("torch", "onnxscript")

    def module(self) -> TorchModel:
        import torch

        from rlflow_tvm.frontend import zoo_vision

        image = torch.zeros(1, 3, self.size, self.size)
        return zoo_vision.initialise(getattr(zoo_vision, self.build)(*self.arguments), image, _SEED), {"image": image}


@dataclass(frozen=True)
class _Transformer:
    """A transformer of `zoo_language`; `config` overrides the library's configuration."""

    build: str
    config: tuple[tuple[str, int], ...] = ()
    sequence: int = 0
    needs = ("torch", "onnxscript", "transformers")

    def module(self) -> TorchModel:
        import torch

        from rlflow_tvm.frontend import zoo_attention, zoo_language

        model = zoo_attention.initialise(getattr(zoo_language, self.build)(**dict(self.config)), _SEED)
        if not self.sequence:
            return model, {"pixel_values": torch.zeros(1, 3, 224, 224)}
        names = ("input_ids", "attention_mask", "token_type_ids")
        return model, {name: torch.ones(1, self.sequence, dtype=torch.int64) for name in names}


@dataclass(frozen=True)
class _Pixels:
    """A transformer of `zoo_language` that says something of each pixel of an image; `config` as in `_Transformer`."""

    build: str
    size: int
    config: tuple[tuple[str, Any], ...] = ()
    needs = ("torch", "onnxscript", "transformers")

    def module(self) -> TorchModel:
        import torch

        from rlflow_tvm.frontend import zoo_attention, zoo_language

        model = getattr(zoo_language, self.build)(**dict(self.config))
        return zoo_attention.initialise(model, _SEED), {"pixel_values": torch.zeros(1, 3, self.size, self.size)}


@dataclass(frozen=True)
class _Sequence:
    """A transformer of `zoo_attention`, over tokens or over frames of `features` numbers."""

    build: str
    sequence: int
    features: int = 0
    config: tuple[tuple[str, int], ...] = ()
    needs = ("torch", "onnxscript")

    def module(self) -> TorchModel:
        import torch

        from rlflow_tvm.frontend import zoo_attention

        model = getattr(zoo_attention, self.build)(self.sequence, **dict(self.config))
        if self.features:
            example = {"frames": torch.zeros(1, self.sequence, self.features)}
        else:
            example = {"tokens": torch.ones(1, self.sequence, dtype=torch.int64)}
        return zoo_attention.initialise(model, _SEED), example


_BERT_TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 64,
}
_Model = _Image | _Transformer | _Pixels | _Sequence
TORCH_MODELS: dict[str, _Model] = {
    "bert-base": _Transformer("bert", sequence=128),
    "vit-base": _Transformer("vit"),
    "resnet18": _Image("resnet", 224, ((2, 2, 2, 2), False)),
    "resnet50": _Image("resnet", 224, ((3, 4, 6, 3), True)),
    "squeezenet1.1": _Image("squeezenet", 224),
    "inception-v3": _Image("inception_v3", 299),
    "resnext50": _Image("resnet", 224, ((3, 4, 6, 3), True, 32)),
    "repvgg-a0": _Image("repvgg", 224, ((48, 48, 96, 192, 1280), (2, 4, 14, 1))),
    "mobileone-s0": _Image("mobileone", 224, ((48, 48, 128, 256, 1024), (2, 8, 10, 1), 4)),
    "segformer-b0": _Pixels("segformer", 512),
    "dalle": _Sequence("Dalle", 128),
    "transformer-transducer": _Sequence("TransducerEncoder", 128, 512),
    "bert-tiny": _Transformer("bert", tuple(_BERT_TINY.items()), sequence=32),
    "squeezenet-tiny": _Image("squeezenet_tiny", 56),
}


def names() -> list[str]:
    """The models' names: `demo`, the torch models, and one for each `light_*.onnx` of the onnx wheel."""
    return ["demo", *TORCH_MODELS, *light_files()]


def load(name: str) -> onnx.ModelProto:
    """The model `name`, from the cache where it is kept there (see `path`).

    `NAME@SIZE` is the same model for images of that height and width, or sequences of that length.

    Raises:
        FrontendError: no such model; torch, transformers or onnxscript are needed and not installed; the cache
            cannot be written.
    """
    build = _builder(name)
    return onnx.load(path(name)) if _described(name) else build()


def path(name: str) -> Path:
    """The file of the model `name`, built first where the cache does not hold it (up to a minute for the large ones).

    The cache is `$RLFLOW_TVM_HOME/zoo`, by default `~/.cache/rlflow_tvm/zoo`. Raises as `load`.
    """
    build = _builder(name)
    file = cache_folder() / f"{name}-v{VERSION}.onnx"
    if not file.exists():
        _write(file, build())
    return file


def cache_folder() -> Path:
    """Where the built models are kept; UsageError where nobody knows the user's home."""
    return home_folder() / "zoo"


def _builder(name: str) -> Callable[[], onnx.ModelProto]:
    if name == "demo":
        return lambda: demo_model(_SEED)
    if _described(name):
        return lambda: _export(*torch_module(name))
    light = light_files()
    if name in light:
        return lambda: with_random_weights(onnx.load(light[name]), _SEED)
    raise FrontendError(f"no evaluation model {name!r}: there are {', '.join(names())}")


def _described(name: str) -> _Model | None:
    """What a torch model is built by, None for other models; FrontendError for a size that it cannot have."""
    name, at, size = name.partition("@")
    model = TORCH_MODELS.get(name)
    if model is None or not at:
        return model
    least = 2 if isinstance(model, _Sequence) else 1
    if not size.isdecimal() or int(size) < least or (isinstance(model, _Transformer) and not model.sequence):
        raise FrontendError(
            f"evaluation model {name!r} cannot be had at size {size!r}: change @{size}, or leave it out"
        )
    return replace(model, size=int(size)) if isinstance(model, _Image | _Pixels) else replace(model, sequence=int(size))


def torch_module(name: str) -> TorchModel:
    """The model `name` as it was before its export: a torch module, and example inputs by name, in order.

    FrontendError where there is none (`demo` and the `light_*` are ONNX files from the start) or a library is missing.
    """
    model = _torch_model(name)
    with _quiet():
        return model.module()


def check_torch(name: str) -> None:
    """The errors of `torch_module`, without its work."""
    _torch_model(name)


def _torch_model(name: str) -> _Model:
    model = _described(name)
    if model is None:
        raise FrontendError(f"evaluation model {name!r} is no torch model: there are {', '.join(TORCH_MODELS)}")
    for module in model.needs:
        if find_spec(module) is None:
            raise FrontendError(
                f"evaluation model {name!r} needs {module}: install it with pip install 'rlflow_tvm[zoo]'"
            )
    return model


def save_program(name: str, file: Path) -> None:
    """Write `torch_module` to `file`, as torch writes programs. Raises as `torch_module`."""
    module, inputs = torch_module(name)
    import torch

    with _quiet():
        torch.export.save(torch.export.export(module, tuple(inputs.values())), file)


def _export(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> onnx.ModelProto:
    """Export without torch's optimiser: batch normalisation and shape chains stay, for the cleaning to take out."""
    import torch

    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            model,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=["output"],
            opset_version=_OPSET,
            dynamo=True,
            external_data=False,
            optimize=False,
            verbose=False,
        )
    assert program is not None  # None comes only of the exporter that writes files itself
    return program.model_proto


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hush the exporter, which warns of torchvision's absence and of its own deprecated calls."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


def _write(file: Path, model: onnx.ModelProto) -> None:
    """Write beside the file, then rename: whoever reads at the same time sees no half of it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(model.SerializeToString())
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise FrontendError(
            f"{file}: cannot be written ({error.strerror}): set RLFLOW_TVM_HOME to a folder that can"
        ) from error
