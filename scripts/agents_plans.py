"""The plans of what `scripts/agents.py` left in a folder, for `rlflow_tvm.compare` to time whole modules by.

    python scripts/agents_plans.py runs/a

Of each model and method the plan of the median seed (of an even number the lower one): sums of kernels' prices are what
runs chose by, and the best of several seeds would be chosen by them once more. Writes FOLDER/plans/MODEL/METHOD.json,
METHOD.STEPS.json where a method was run with several numbers of steps, and tells the command for each model. A plan
without rewrites is left out: `compare` times the unsearched module anyway.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from agents_results import Found, Row, gain, names_of, plan_of, rows_of

from rlflow_tvm.errors import UsageError
from rlflow_tvm.passes import Plan
from rlflow_tvm.training_files import model_name


def median_run(rows: list[Row]) -> Row:
    """The one of the median gain; of an even number, of the lower of the two."""
    return sorted(rows, key=gain)[(len(rows) - 1) // 2]


def save_plans(found: Found, folder: Path) -> dict[str, list[Path]]:
    """Model -> the files of its plans, the best gain first. UsageError, before anything is written, where a run has not
    told all of its plan."""
    plans: dict[str, dict[Path, Plan]] = {}
    for model, methods in found.items():
        names = names_of(methods)
        medians = {names[which]: median_run(rows) for which, rows in methods.items()}
        for name, row in sorted(medians.items(), key=lambda item: -gain(item[1])):
            if not row["actions"]:
                continue
            if "plan" not in row:
                raise UsageError(
                    f"{model} {name} {row['seed']}: an earlier version of scripts/agents.py left no plan; run it again"
                )
            path = folder / model_name(model) / f"{name}.json"
            plans.setdefault(model, {})[path] = plan_of(row)
    for path, plan in [item for each in plans.values() for item in each.items()]:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    return {model: list(each) for model, each in plans.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        written = save_plans(rows_of(options.folder), options.folder / "plans")
    except UsageError as error:
        parser.error(str(error))
    for model, paths in written.items():
        print(shlex.join(["python", "-m", "rlflow_tvm.compare", model, "--plan", *map(str, paths)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
