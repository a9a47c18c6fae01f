"""Rewriting on Relax: terms, rules, matching, application, plans."""

from __future__ import annotations

from rlflow_tvm.passes.matcher import RuleSet
from rlflow_tvm.passes.ordering import OrderedPasses
from rlflow_tvm.passes.plan import Plan
from rlflow_tvm.passes.proofs import catalogue_proofs, require_proofs
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.rules import CATALOGUE
from rlflow_tvm.passes.state import GraphState, RewriteAction, Site


def default_rules(lanes: int = 16) -> RuleSet:
    """The whole catalogue for a target with `lanes` float32 vector lanes.

    With one lane, as a GPU has, nothing is blocked: the rules of the layout family then have no site.
    RewriteError if a rule has no recorded proof.
    """
    require_proofs(CATALOGUE, catalogue_proofs(), "the catalogue")
    return RuleSet(CATALOGUE, lanes)


__all__ = [
    "CATALOGUE", "GraphState", "OrderedPasses", "Plan", "RewriteAction", "RewriteRule", "RuleSet", "Site",
    "default_rules",
]  # fmt: skip
