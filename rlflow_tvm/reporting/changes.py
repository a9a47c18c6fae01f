"""What of one graph is not in another that rewrites have made of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import tvm_ffi
from tvm import relax

from rlflow_tvm.dataflow import Node
from rlflow_tvm.passes.difference import kind
from rlflow_tvm.passes.graph import Graph


class Mark(StrEnum):
    """What became of a node, or where it came from.

    MATCHED: what a rule matched. REMOVED: only the graph before has it. ADDED: only the graph after. REWIRED: it
    computes the same of other operands.
    """

    MATCHED = "matched"
    REMOVED = "removed"
    ADDED = "added"
    REWIRED = "rewired"


Marks = Mapping[relax.Var, Mark]
"""Variable -> what is to be told of its node; of a node that is as it was, nothing."""


def changes(before: Graph, after: Graph) -> tuple[Marks, Marks]:
    """The marks of the two graphs' nodes. Nodes are held to be one where they bind the same variable."""
    gone: dict[relax.Var, Mark] = {}
    new: dict[relax.Var, Mark] = {}
    old = {node.var: node for node in before.nodes}
    for node in after.nodes:
        was = old.get(node.var)
        if was is None or kind(was) != kind(node):
            new[node.var] = Mark.ADDED
        elif not _equal(was, node):
            new[node.var] = gone[node.var] = Mark.REWIRED
    kept = {node.var for node in after.nodes if new.get(node.var) is not Mark.ADDED}
    gone.update({node.var: Mark.REMOVED for node in before.nodes if node.var not in kept})
    return gone, new


def _equal(one: Node, other: Node) -> bool:
    return one is other or (one.inputs == other.inputs and tvm_ffi.structural_equal(one.value, other.value))
