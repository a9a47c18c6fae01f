"""Converters of norms of halves: TVM's importer squares them as halves, whose range ends before 256 squared. Here they
are computed in float32, as runtimes do."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from rlflow_tvm.frontend.reductions import REDUCTIONS, Converter
from rlflow_tvm.frontend.writer import dtype_of

_HALVES = ("bfloat16", "float16")


def _in_singles(operator: str, before: Converter | None = None) -> Converter:
    """TVM's converter, with casts around it where its data are halves; `before` comes first, where it gives any."""

    def convert(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
        found = before(bb, inputs, attrs, opset) if before is not None else None
        dtype = dtype_of(inputs[0])
        if found is not None or dtype not in _HALVES:
            return found
        for i, given in enumerate(inputs):
            if given is not None and dtype_of(given) == dtype:
                inputs[i] = bb.normalize(relax.op.astype(given, "float32"))
        theirs = onnx_frontend._get_convert_map()[operator].get_converter(opset)
        return relax.op.astype(bb.normalize(theirs(bb, inputs, attrs, [{}, {}])), dtype)

    return convert


HALVES: dict[str, Converter] = {
    **{name: _in_singles(name) for name in ("GlobalLpPool", "InstanceNormalization", "LRN", "LpPool")},
    "ReduceL2": _in_singles("ReduceL2", before=REDUCTIONS["ReduceL2"]),
}
