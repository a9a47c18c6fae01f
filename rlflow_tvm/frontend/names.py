"""Names of parameters: a model's input names where they are identifiers, else the nearest identifiers.

TVM writes parameter names into the CUDA source and TVMScript as they are, so that `gpu_0/data_0` compiles to nothing
there; Caffe2's and TensorFlow's exporters make such names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


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
