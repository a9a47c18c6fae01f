"""Mutants: wrong rules are rejected, each kind of them, and right ones are told as such."""

from __future__ import annotations

import pytest

from rlflow_tvm.passes import CATALOGUE, RewriteRule
from rlflow_tvm.passes.proof.mutants import KINDS, Mutant, mutants, why_right
from rlflow_tvm.passes.verify import Counterexample, Proof, verify_rule

BY_NAME = {rule.name: rule for rule in CATALOGUE}


def of(name: str, kind: str) -> list[Mutant]:
    return [mutant for mutant in mutants(BY_NAME[name]) if mutant.kind == kind]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("matmul_associate_right", "swap"),
        ("transpose_of_matmul", "swap"),
        ("matmul_distribute_left", "drop"),
        ("fold_scale_into_conv", "drop"),
        ("double_to_scale", "constant"),
        ("merge_matmuls", "axis"),
        ("compose_permutes", "axis"),
        ("concat_after_linear", "condition"),
    ],
)
def test_the_wrong_ones_are_rejected(name, kind):
    outcomes = {mutant.changed: verify_rule(mutant.rule) for mutant in of(name, kind)}
    rejected = [outcome for outcome in outcomes.values() if isinstance(outcome, Counterexample)]
    assert rejected
    assert all(outcome.reason for outcome in rejected)
    proved = [changed for changed, outcome in outcomes.items() if isinstance(outcome, Proof)]
    assert not proved or kind == "condition", proved


def test_every_kind_occurs_and_every_mutant_is_another_rule():
    every = [mutant for rule in CATALOGUE for mutant in mutants(rule)]
    assert {mutant.kind for mutant in every} == set(KINDS)
    rules: list[RewriteRule] = [mutant.rule for mutant in every]
    assert len({rule.name for rule in rules}) == len(rules)
    digests = {rule.digest for rule in CATALOGUE}
    same = [rule.name for rule in rules if rule.digest in digests]
    assert len(same) < len(rules) / 100, same  # a mutant of one rule may be another of the catalogue


def test_a_condition_that_says_when_it_pays_is_told_as_such():
    (mutant,) = (m for m in of("split_matmul_columns", "condition") if m.changed == "without is_weight(w)")
    assert isinstance(verify_rule(mutant.rule), Proof)
    assert "says when the rewrite pays" in why_right(mutant, BY_NAME["split_matmul_columns"])
