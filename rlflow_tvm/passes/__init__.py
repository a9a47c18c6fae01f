"""Rewriting on Relax: terms, rules, matching, application, plans."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rlflow_tvm.passes.matcher import RuleSet
from rlflow_tvm.passes.ordering import OrderedPasses
from rlflow_tvm.passes.plan import Plan
from rlflow_tvm.passes.proofs import catalogue_proofs, read_rules, require_proofs
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.rules import CATALOGUE
from rlflow_tvm.passes.state import GraphState, RewriteAction, Site


def default_rules(lanes: int = 16, own: str | Path | Iterable[RewriteRule] = ()) -> RuleSet:
    """The whole catalogue for a target with `lanes` float32 vector lanes, and `own` (see `own_rules`) behind it.

    With one lane, as a GPU has, nothing is blocked: the rules of the layout family then have no site.
    RewriteError if a rule has no recorded proof, or two have one name.
    """
    require_proofs(CATALOGUE, catalogue_proofs(), "the catalogue")
    others = own_rules(own)
    return RuleSet((*CATALOGUE, *others), lanes) if others else _catalogue_alone(lanes)


@cache
def _catalogue_alone(lanes: int) -> RuleSet:
    """One for all, as it remembers what it has looked up."""
    return RuleSet(CATALOGUE, lanes)


def own_rules(rules: str | Path | Iterable[RewriteRule]) -> tuple[RewriteRule, ...]:
    """Rules beside the catalogue: those of a file, each proved there (`python -m rlflow_tvm.rules verify --record`;
    RewriteError if one is not, or the file is none of rules), or those given, whose proof is left to whoever made them.
    """
    return read_rules(Path(rules)) if isinstance(rules, str | Path) else tuple(rules)


__all__ = [
    "CATALOGUE", "GraphState", "OrderedPasses", "Plan", "RewriteAction", "RewriteRule", "RuleSet", "Site",
    "default_rules", "own_rules",
]  # fmt: skip
