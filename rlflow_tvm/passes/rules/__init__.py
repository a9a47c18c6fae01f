"""The catalogue: one file a family, each a tuple `RULES`. Adding a rule is adding one value to one of them."""

from __future__ import annotations

from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.rules import (
    activation,
    algebra,
    attention,
    concat,
    conv_algebra,
    convolution,
    elementwise,
    gather,
    layout,
    matmul,
    motion,
    normalise,
    reduction,
    transpose,
)

CATALOGUE: tuple[RewriteRule, ...] = (
    *elementwise.RULES,
    *matmul.RULES,
    *convolution.RULES,
    *transpose.RULES,
    *concat.RULES,
    *algebra.RULES,
    *activation.RULES,
    *normalise.RULES,
    *attention.RULES,
    *reduction.RULES,
    *gather.RULES,
    *conv_algebra.RULES,
    *motion.RULES,
    *layout.RULES,
)

# Families whose rules, applied wherever they apply, come to an end; settling rules stand before opening ones.
TERMINATING_FAMILIES: dict[str, tuple[str, ...]] = {"layout": layout.TERMINATING}
