"""Writing what a search found as an ONNX file, checked before it is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import tvm

from rlflow_tvm.errors import FrontendError, RewriteError
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs, saved, to_onnx
from rlflow_tvm.frontend.load import one_line
from rlflow_tvm.verify import TOLERANCE, range_error


def export(mod: tvm.IRModule, path: Path, original: Path, seed: int = 0) -> float | None:
    """Write `mod` (bound form) to `path`, after `onnx.checker` and, where onnxruntime is installed, a run beside the
    `original` file on random inputs: the largest difference of their outputs, as a share of the output's range; None
    without onnxruntime. Nothing is written where one of them finds something wrong.

    Raises:
        FrontendError: ONNX cannot say an operator of it, the file cannot be written, or is refused by the checker or
            by ONNX Runtime.
        RewriteError: the outputs differ by more than `verify.TOLERANCE`.
    """
    with saved(to_onnx(mod), path) as file:
        try:
            onnx.checker.check_model(str(file))
        except onnx.checker.ValidationError as refused:
            raise FrontendError(
                f"{path}: onnx.checker refuses it ({one_line(refused)}): this is a bug, please report it"
            ) from refused
        if importlib.util.find_spec("onnxruntime") is None:
            return None
        inputs = random_inputs(mod, seed)
        error = range_error(onnxruntime_outputs(str(file), inputs), onnxruntime_outputs(str(original), inputs))
        if not error <= TOLERANCE:
            raise RewriteError(
                f"{path}: its outputs differ from those of {original} by {error:.1e} of their range ({TOLERANCE:g} is "
                "allowed) with ONNX Runtime: it was not written; this is a bug, please report it with the plan"
            )
        return error
