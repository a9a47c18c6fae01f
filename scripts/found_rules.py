"""Which rules of the catalogue a search for rules found again, and what it found beyond them.

    python -m rlflow_tvm.rules generate --out found.json
    python scripts/found_rules.py found.json

Of each rule of the catalogue that can be made of the search's operators: whether found rules do what its instances do,
at once or in steps, and where not, how many operators its sides have (the search looks at so many, and at larger ones
of two kinds).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from rlflow_tvm.cli import write_json
from rlflow_tvm.errors import RlflowError
from rlflow_tvm.passes import CATALOGUE, RewriteRule
from rlflow_tvm.passes.ops import CLASSES
from rlflow_tvm.passes.proofs import read_rules
from rlflow_tvm.passes.synthesis.coverage import RuleIndex, covered, instances
from rlflow_tvm.passes.synthesis.generalise import Point
from rlflow_tvm.passes.synthesis.ground import parts_of
from rlflow_tvm.passes.term import Apply, Number, Scalar, subterms

_DRAWN, _KEPT = 80, 6  # instances of a rule, before and after those with other operators are left out


def of_operators(rule: RewriteRule, operators: set[str]) -> bool:
    """Whether both sides can be made of these operators."""
    terms = [t for term in (*rule.equation.left, *rule.equation.right) for t in subterms(term)]
    if any(isinstance(t, Number | Scalar) for t in terms):
        return False
    return all(set(CLASSES.get(t.head, (t.head,))) & operators for t in terms if isinstance(t, Apply))


def sizes(points: list[Point]) -> tuple[int, int]:
    """Operators of the left and of the right terms, at most."""
    left, right = (
        max(len(frozenset().union(*(root.work for root in side))) for side in sides)
        for sides in ([p.left for p in points], [p.right for p in points])
    )
    return left, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what `rules generate` wrote")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    try:
        report(options)
    except RlflowError as error:
        sys.exit(f"error: {error}")


def report(options: argparse.Namespace) -> None:
    """Print the table, and write it where `options` say."""
    index = RuleIndex(read_rules(options.file))
    data = json.loads(options.file.read_text())
    operators = set(data["search"]["operators"])
    rows = []
    for rule in CATALOGUE:
        if not of_operators(rule, operators):
            continue
        points = [
            point for point in instances(rule, _DRAWN)
            if all(part.operator in operators or not part.operator for root in (*point.left, *point.right)
                   for part in parts_of(root))
        ][:_KEPT]  # fmt: skip
        if not points:
            rows.append({"rule": rule.name, "found": "no instance", "left": 0, "right": 0, "by": []})
            continue
        outcome = covered(points, index)
        told = "at once" if outcome.at_once == len(points) else "in steps" if not outcome.not_at_all else "no"
        if told == "no" and outcome.not_at_all < len(points):
            told = f"in part ({len(points) - outcome.not_at_all} of {len(points)} instances)"
        left, right = sizes(points)
        rows.append({"rule": rule.name, "found": told, "left": left, "right": right, "by": list(outcome.by)})
        print(f"{rule.name}: {told}; {left} and {right} operators; {', '.join(outcome.by)}", flush=True)
    for told, count in Counter(row["found"].split(" (")[0] for row in rows).items():
        print(f"{count} {told}")
    new = [entry for entry in data["rules"] if not entry["catalogue"]]
    print(f"{len(new)} of {len(data['rules'])} found rules are not in the catalogue")
    write_json(options.json, {"catalogue": rows, "new": [entry["equation"] for entry in new]})


if __name__ == "__main__":
    main()
