"""Mutants of the catalogue's rules, tried by the prover: every wrong one has to be rejected with a counterexample.

    python scripts/mutants.py --wrong 200

Mutants are taken kind by kind in turn (operands swapped, an operator left out, a number or an axis changed, a condition
left out), of rules in random order, until so many were rejected. Those that were proved are told with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlflow_tvm.passes import CATALOGUE
from rlflow_tvm.passes.proof.mutants import KINDS, Mutant, mutants, why_right
from rlflow_tvm.passes.verify import Counterexample, Proof, verify_all

BATCH = 40


def in_turn(seed: int) -> Iterator[Mutant]:
    """One mutant of each kind after the other, each kind's in random order."""
    rng = np.random.default_rng(seed)
    every = [mutant for rule in CATALOGUE for mutant in mutants(rule)]
    queues = {kind: [mutant for mutant in every if mutant.kind == kind] for kind in KINDS}
    for queue in queues.values():
        rng.shuffle(queue)  # type: ignore[arg-type]
    while any(queues.values()):
        for queue in queues.values():
            if queue:
                yield queue.pop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", type=int, default=200, help="how many rejected ones to see")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write all of it to this file")
    options = parser.parse_args()
    originals = {rule.name: rule for rule in CATALOGUE}
    queue, rows = in_turn(options.seed), []
    rejected: Counter[str] = Counter()
    while rejected.total() < options.wrong:
        batch = [mutant for _, mutant in zip(range(BATCH), queue, strict=False)]
        if not batch:
            break
        outcomes = verify_all([mutant.rule for mutant in batch], jobs=options.jobs)
        for mutant, (rule, outcome) in zip(batch, outcomes, strict=True):
            row = {"name": rule.name, "kind": mutant.kind, "changed": mutant.changed, "equation": str(rule)}
            if isinstance(outcome, Counterexample):
                rejected[mutant.kind] += 1
                row.update(outcome="rejected", reason=outcome.reason)
            elif isinstance(outcome, Proof):
                original = originals[rule.name.rsplit(f"_{mutant.kind}_", 1)[0]]
                row.update(outcome="right", reason=why_right(mutant, original))
                print(f"right: {rule.name}: {row['reason']}", flush=True)
            else:
                row.update(outcome="undecided", reason=outcome.reason)
                print(f"undecided: {rule.name}: {mutant.changed}: {outcome.reason}", flush=True)
            rows.append(row)
    counts = Counter(row["outcome"] for row in rows)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(rejected.items()))
    print(f"{len(rows)} mutants: {counts['rejected']} rejected with a counterexample ({kinds}), "
          f"{counts['right']} right, {counts['undecided']} undecided")  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
