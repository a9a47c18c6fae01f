"""What TVM's `Resize` gets wrong, refused: TVM computes with the ratio of the extents, ONNX with the scale given."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

_WHOLE = 1e-4  # how far from a whole number a scaled extent may be, of rounding


def check_resize(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr | None:
    """A converter that leaves the work to TVM's; ValueError where the two would differ."""
    mode = attrs.get("coordinate_transformation_mode", b"half_pixel")
    if mode == b"half_pixel_symmetric":
        raise ValueError("TVM has no coordinate_transformation_mode half_pixel_symmetric")
    if isinstance(inputs[2], tvm.ir.GenericConst) and not inputs[2].value.numpy().size:
        inputs[2] = None  # so exporters of opset 11 say that the sizes are given
    given = inputs[2] if inputs[3] is None else inputs[3]
    if not isinstance(given, tvm.ir.GenericConst):
        return None
    sizes = given.value.numpy()
    extents = [int(extent) for extent in inputs[0].ty.shape.values]
    if len(sizes) != len(extents):
        raise ValueError(f"it has {len(sizes)} scales or sizes for {len(extents)} dimensions")
    if inputs[3] is None:
        sizes = sizes * np.array(extents, sizes.dtype)
        for i, size in enumerate(sizes):
            if int(size) != round(float(size)) or abs(size - int(size)) > _WHOLE:
                raise ValueError(
                    f"dimension {i} of {extents[i]} times its scale is {size:g}: TVM rounds that before it resizes, "
                    "ONNX does not; export the model with a scale that gives a whole number, or with sizes"
                )
    if mode == b"align_corners" and any(int(size) == 1 for size in sizes[2:]):
        raise ValueError("TVM divides by zero where coordinates are by align_corners and an output extent is 1")
    return None
