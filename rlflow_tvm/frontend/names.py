"""Names of parameters: a model's input names where they are identifiers, else the nearest identifiers.

TVM writes parameter names into the CUDA source and TVMScript as they are, so that `gpu_0/data_0` compiles to nothing
there; Caffe2's and TensorFlow's exporters make such names.

What the file calls its inputs and outputs stays with the module, in attributes of the module: those of a function
would change its structural hash, and with it what plans are for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tvm

_INPUTS, _OUTPUTS = "onnx_inputs", "onnx_outputs"


@dataclass(frozen=True)
class Names:
    """Of a model's inputs and outputs, in order, all different."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def with_names(mod: tvm.IRModule, names: Names) -> tvm.IRModule:
    """`mod`, which remembers what the file called its inputs and outputs."""
    return mod.with_attr(_INPUTS, list(names.inputs)).with_attr(_OUTPUTS, list(names.outputs))


def names_of(mod: tvm.IRModule, parameters: Sequence[str], outputs: int) -> Names:
    """The names that `mod` remembers; where it has none, or not as many as there are now, its `parameters` and
    `output`, of several `output_0` and so on."""
    given = _remembered(mod, _INPUTS, len(parameters)) or tuple(parameters)
    found = _remembered(mod, _OUTPUTS, outputs)
    if found is None:
        stems = ["output"] if outputs == 1 else [f"output_{i}" for i in range(outputs)]
        found = tuple(_other_than(given, stem) for stem in stems)
    return Names(given, found)


def _remembered(mod: tvm.IRModule, key: str, count: int) -> tuple[str, ...] | None:
    names = tuple(map(str, mod.attrs[key])) if mod.attrs is not None and key in mod.attrs else ()
    return names if len(names) == count else None


def _other_than(taken: Sequence[str], name: str) -> str:
    while name in taken:
        name += "_"
    return name


def parameter_names(inputs: Iterable[str]) -> dict[str, str]:
    """Input name -> name of the parameter of `main`, in order; different inputs get different names."""
    names = list(inputs)
    taken = {name for name in names if _is_identifier(name)}
    found = {}
    for name in names:
        if _is_identifier(name):
            found[name] = name
            continue
        stem = re.sub(r"\W", "_", name, flags=re.ASCII)
        stem = stem if _is_identifier(stem) else f"input_{stem}"
        fresh, count = stem, 0
        while fresh in taken:
            count += 1
            fresh = f"{stem}_{count}"
        taken.add(fresh)
        found[name] = fresh
    return found


def _is_identifier(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", name, flags=re.ASCII) is not None
