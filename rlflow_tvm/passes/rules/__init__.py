"""The catalogue: one file a family, each a tuple `RULES`. Adding a rule is adding one value to one of them."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.rules import (
    activation,
    algebra,
    attention,
    branches,
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
    resize,
    transpose,
)

FAMILIES: dict[str, tuple[RewriteRule, ...]] = {
    "elementwise": elementwise.RULES,
    "matmul": matmul.RULES,
    "convolution": convolution.RULES,
    "transpose": transpose.RULES,
    "concat": concat.RULES,
    "algebra": algebra.RULES,
    "activation": activation.RULES,
    "normalise": normalise.RULES,
    "attention": attention.RULES,
    "reduction": reduction.RULES,
    "gather": gather.RULES,
    "conv-algebra": conv_algebra.RULES,
    "branches": branches.RULES,
    "resize": resize.RULES,
    "motion": motion.RULES,
    "layout": layout.RULES,
}

CATALOGUE: tuple[RewriteRule, ...] = tuple(rule for rules in FAMILIES.values() for rule in rules)


@dataclass(frozen=True)
class TerminatingFamily:
    """Rules that, applied wherever they apply, come to an end; settling rules stand before opening ones.

    `sole`: only where nothing else reads what a rewrite does away with, as it would have to stay beside its successor
    (or, of a rewrite of one operation, what that reads).
    """

    rules: tuple[str, ...]
    sole: bool = False


TERMINATING_FAMILIES: dict[str, TerminatingFamily] = {
    "branches": TerminatingFamily(branches.TERMINATING, sole=True),
    "resize": TerminatingFamily(resize.TERMINATING, sole=True),
    "permute": TerminatingFamily(transpose.TERMINATING),
    "layout": TerminatingFamily(layout.TERMINATING),
    "take": TerminatingFamily(gather.TERMINATING, sole=True),
}
