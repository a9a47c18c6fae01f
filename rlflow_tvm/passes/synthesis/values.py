"""The values of ground terms on tensors drawn anew: whether two are equal, or were by chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlflow_tvm.passes.proof.domains import Domain, Tensor, same
from rlflow_tvm.passes.proof.meaning import meaning
from rlflow_tvm.passes.synthesis.enumerate import domain_for
from rlflow_tvm.passes.synthesis.ground import Node, parts_of


def differ(left: Sequence[Node], right: Sequence[Node], draws: int = 3) -> bool:
    """Whether the two sides differ on one of so many draws."""
    domain = domain_for(tuple({part.operator for root in (*left, *right) for part in parts_of(root)}))
    for seed in range(1, draws + 1):
        rng = np.random.default_rng(seed)
        known: dict[Node, Tensor] = {}
        with np.errstate(over="ignore"):
            ours, theirs = ([_value(root, domain, rng, known) for root in side] for side in (left, right))
        if not same(ours, theirs):
            return True
    return False


def _value(node: Node, domain: Domain, rng: np.random.Generator, known: dict[Node, Tensor]) -> Tensor:
    if node not in known:
        if not node.operator:
            known[node] = domain.draw(node.shape, rng)
        else:
            operands = [_value(arg, domain, rng, known) for arg in node.args]
            result = meaning(node.operator, domain, operands, dict(node.attributes))
            known[node] = result if node.item is None else result[node.item]
    return known[node]
