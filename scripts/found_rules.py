"""Which rules of the catalogue a search for rules found again, and what it found beyond them.

    python -m rlflow_tvm.rules generate --out found.json
    python scripts/found_rules.py found.json

Of each rule of the catalogue that can be made of the search's operators: whether found rules do what its instances do,
at once or in steps; which instance they do not; and whether the rule lies beyond the search's depth, since one of its
sides has more operators.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from agents_results import read_json

from rlflow_tvm.cli import write_json
from rlflow_tvm.errors import RlflowError
from rlflow_tvm.passes import CATALOGUE, RewriteRule
from rlflow_tvm.passes.ops import CLASSES
from rlflow_tvm.passes.proofs import read_rules
from rlflow_tvm.passes.synthesis.coverage import RuleIndex, covered, instances
from rlflow_tvm.passes.synthesis.generalise import Point
from rlflow_tvm.passes.synthesis.ground import parts_of, tensors_of
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


def written(point: Point) -> str:
    """The two sides and the shapes of their tensors."""
    left, right = ("; ".join(root.text for root in side) for side in (point.left, point.right))
    tensors = dict.fromkeys(tensor for root in point.left for tensor in tensors_of(root))
    return f"{left} => {right} of " + ", ".join(f"{tensor.name}: {list(tensor.shape)}" for tensor in tensors)


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
    data = read_json(options.file)
    operators, depth = set(data["search"]["operators"]), data["search"]["depth"]
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
            rows.append({"rule": rule.name, "found": "no instance", "left": 0, "right": 0, "by": [], "missing": []})
            continue
        outcomes = [covered([point], index) for point in points]
        missing = [point for point, outcome in zip(points, outcomes, strict=True) if outcome.not_at_all]
        by = list(dict.fromkeys(name for outcome in outcomes for name in outcome.by))
        left, right = sizes(points)
        if not missing:
            told = "at once" if all(outcome.at_once for outcome in outcomes) else "in steps"
        else:
            told = "in part" if len(missing) < len(points) else "no"
            told += f", beyond depth {depth}" if max(left, right) > depth else ""
        rows.append({"rule": rule.name, "found": told, "left": left, "right": right, "by": by,
                     "missing": [written(point) for point in missing]})  # fmt: skip
        print(f"{rule.name}: {told}; {left} and {right} operators; {', '.join(by)}", flush=True)
        if missing:
            print(f"    not {written(missing[0])} ({len(missing)} of {len(points)} instances)", flush=True)
    for told, count in Counter(row["found"] for row in rows).items():
        print(f"{count} {told}")
    new = [entry for entry in data["rules"] if not entry["catalogue"]]
    print(f"{len(new)} of {len(data['rules'])} found rules are not in the catalogue")
    write_json(options.json, {"catalogue": rows, "new": [entry["equation"] for entry in new]})


if __name__ == "__main__":
    main()
