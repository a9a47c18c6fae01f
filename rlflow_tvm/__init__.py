"""rlflow_tvm: a superoptimiser for Apache TVM.

    import rlflow_tvm as rl

    mod = rl.from_onnx("model.onnx")
    mod = rl.Superoptimize("llvm")(mod)
    executable = rl.compile(mod, "llvm", database=rl.default_path())

Importing the package registers the build pipeline "rlflow" with Relax; importing `rlflow_tvm.envs` registers the
environment with gymnasium.
"""

from __future__ import annotations

import importlib
from typing import Any

import tvm_ffi

from rlflow_tvm import errors, kernels

__version__ = "0.1.0"

kernels.register()
# An error that a pass raises travels through TVM's C++: registered classes come out as they went in.
for _error in (*errors.kinds(), errors.Ended, KeyboardInterrupt):
    tvm_ffi.register_error(_error)

# Loaded when first used: a build that only replays a plan needs neither measuring nor environments.
_HOMES = {
    "from_onnx": "rlflow_tvm.frontend",
    "to_onnx": "rlflow_tvm.frontend",
    "Superoptimize": "rlflow_tvm.superoptimize",
    "ApplyPlan": "rlflow_tvm.replay",
    "compile": "rlflow_tvm.replay",
    "pipeline": "rlflow_tvm.kernels",
    "graph_cost": "rlflow_tvm.cost",
    "default_path": "rlflow_tvm.cost",
    "Plan": "rlflow_tvm.passes",
    "RewriteRule": "rlflow_tvm.passes",
}


def __getattr__(name: str) -> Any:
    if name == "passes":  # the room, for `passes.OrderedPasses`
        return importlib.import_module("rlflow_tvm.passes")
    if name not in _HOMES:
        raise AttributeError(f"module 'rlflow_tvm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


__all__ = [*_HOMES]
