"""Which operators are legalised in another way than TVM's on a GPU."""

from __future__ import annotations

from tvm import relax
from tvm.target import Target

from ..choice import Implementation, LegalizeFunc
from .conv_legalize import legalize_conv2d
from .matmul_legalize import is_weight_product, legalize_matmul, legalize_weight_matmul

LEGALIZE: dict[str, LegalizeFunc] = {"relax.matmul": legalize_matmul, "relax.nn.conv2d": legalize_conv2d}
"""Operators with one implementation, or whose several do not take the call."""


def _is_weight_product(call: relax.Call, weight: bool, _target: Target) -> bool:
    return weight and is_weight_product(call)


IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "relax.matmul": (
        Implementation("transposed", _is_weight_product, lambda _target: legalize_weight_matmul, lambda *_: 0.0),
    ),
}
"""Adding an implementation is one entry here; its `cost` is compared with those of its neighbours only."""
