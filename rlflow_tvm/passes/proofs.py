"""Recorded proofs: those of the catalogue, which lie beside the code, and rule files that carry theirs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.matcher import RuleSet
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.verify import PROOF_VERSION, Proof

Proofs = Mapping[str, Mapping[str, Any]]
"""Recorded proofs by the rules' names."""

CATALOGUE_PROOFS = "proofs.json"
_FORMAT = 1


def digest(rule: RewriteRule) -> str:
    """What a recorded proof is a proof of: the rule, by these meanings of the operators.

    It tells what was changed afterwards by accident. Who writes a proof by hand can write its digest too: a file of
    somebody else's is for `rules verify` to prove.
    """
    return f"{PROOF_VERSION}:{rule.digest}"


def record(rule: RewriteRule, proof: Proof) -> dict[str, Any]:
    return {"digest": digest(rule), **proof.to_json()}


def recorded_proof(rule: RewriteRule, proofs: Proofs) -> Proof | None:
    """The proof of the rule, as it is, among `proofs`; RewriteError if that is damaged."""
    recorded = proofs.get(rule.name, {})
    if recorded.get("digest") != digest(rule):
        return None
    try:
        return Proof.from_json(recorded)
    except RewriteError as error:
        raise RewriteError(f"rule {rule.name}: {error}") from None


def require_proofs(rules: Iterable[RewriteRule], proofs: Proofs, source: str, file: Path | None = None) -> None:
    """RewriteError naming the first rule for which `proofs` (by the rules' names) holds no proof; `file`: where they
    stand, if in one."""
    which = "" if file is None else f"{file} "
    for rule in rules:
        if proofs.get(rule.name, {}).get("digest") != digest(rule):
            raise RewriteError(
                f"{source}: the rule {rule.name} has no proof, or has changed since it was proved: "
                f"python -m rlflow_tvm.rules verify {which}--record proves it and records that"
            )


@cache
def catalogue_proofs() -> Proofs:
    """The recorded proofs of the catalogue, by the rules' names."""
    text = resources.files("rlflow_tvm.passes").joinpath(CATALOGUE_PROOFS).read_text()
    return json.loads(text)


def catalogue_path() -> Path:
    """Where the catalogue's proofs are recorded."""
    return Path(__file__).with_name(CATALOGUE_PROOFS)


def read_rules(path: Path) -> tuple[RewriteRule, ...]:
    """The rules of a file that `rules_as_json` gave. RewriteError if it is none, or if one has no proof."""
    rules, proofs = read_rule_file(path)
    require_proofs(rules, proofs, str(path), path)
    return rules


def read_rule_file(path: Path) -> tuple[tuple[RewriteRule, ...], Proofs]:
    """The rules of a file and the proofs that it holds, by the rules' names. RewriteError if it is no rule file."""
    entries = _data(path)["rules"]
    try:
        return _rules_of(entries)
    except RewriteError as error:
        raise RewriteError(f"{path}: {error}") from None


def _rules_of(entries: Sequence[Any]) -> tuple[tuple[RewriteRule, ...], Proofs]:
    if not all(isinstance(entry, dict) for entry in entries):
        raise RewriteError("every rule is an object with name, family, equation and when")
    rules = RuleSet(tuple(RewriteRule.from_json(entry) for entry in entries)).rules  # no two of the same name
    proofs = {rule.name: entry.get("proof", {}) for rule, entry in zip(rules, entries, strict=True)}
    for rule in rules:
        if not isinstance(proofs[rule.name], dict):
            raise RewriteError(f"the proof of rule {rule.name} is no object")
        recorded_proof(rule, proofs)
    return rules, proofs


def _data(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise RewriteError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise RewriteError(f"{path}: is no JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("rules"), list):
        raise RewriteError(f'{path}: is no rule file: {{"format": {_FORMAT}, "rules": [...]}} is expected')
    return data


def with_proofs(path: Path, proofs: Proofs) -> dict[str, Any]:
    """What a rule file holds, with these proofs of all its rules in place of its own; RewriteError where it holds other
    rules by now."""
    data = _data(path)
    rules, _ = _rules_of(data["rules"])
    if {rule.name: digest(rule) for rule in rules} != {name: proof["digest"] for name, proof in proofs.items()}:
        raise RewriteError(f"{path}: has changed while it was proved: verify it again")
    return {**data, "rules": [{**entry, "proof": dict(proofs[entry["name"]])} for entry in data["rules"]]}


def rules_as_json(rules: Sequence[RewriteRule], proofs: Proofs) -> dict[str, Any]:
    """What a rule file holds: the rules, each with its proof if there is one."""
    return {"format": _FORMAT, "rules": [
        {**rule.to_json(), **({"proof": dict(proofs[rule.name])} if rule.name in proofs else {})} for rule in rules
    ]}  # fmt: skip
