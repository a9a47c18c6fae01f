"""Which operators are legalised in another way than TVM's on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from .conv_legalize import legalize_conv2d
from .matmul_legalize import legalize_matmul
from .pool_legalize import legalize_adaptive_avg_pool2d

CUDA_LEGALIZE: dict[str, Callable[[relax.BlockBuilder, relax.Call], relax.Expr]] = {
    "relax.matmul": legalize_matmul,
    "relax.nn.adaptive_avg_pool2d": legalize_adaptive_avg_pool2d,
    "relax.nn.conv2d": legalize_conv2d,
}
