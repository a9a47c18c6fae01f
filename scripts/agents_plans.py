"""The plans of what `scripts/agents.py` left in a folder, for `rlflow_tvm.compare` to time whole modules by.

    python scripts/agents_plans.py runs/a
    python -m rlflow_tvm.compare zoo:squeezenet1.1 --plan runs/a/plans/squeezenet1.1/*.json

Of each model and method the plan of the median seed (of an even number the lower one): sums of kernels' prices are what
runs chose by, and the best of several seeds would be chosen by them once more. Writes FOLDER/plans/MODEL/METHOD.json,
METHOD.STEPS.json where a method was run with several numbers of steps, and tells the commands; plans of before are
removed. A plan without rewrites is left out: `compare` times the unsearched module anyway.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from agents_results import Found, Row, gain, names_of, rows_of

from rlflow_tvm.errors import UsageError
from rlflow_tvm.passes import Plan
from rlflow_tvm.training import model_name


def median_run(rows: list[Row]) -> Row:
    """The one of the median gain; of an even number, of the lower of the two."""
    return sorted(rows, key=lambda row: (gain(row), row["seed"]))[(len(rows) - 1) // 2]


def save_plans(found: Found, folder: Path) -> dict[str, list[Path]]:
    """Model -> the files of its plans, the best gain first."""
    written: dict[str, list[Path]] = {}
    for model, methods in found.items():
        names = names_of(methods)
        medians = {names[which]: median_run(rows) for which, rows in methods.items()}
        for name, row in sorted(medians.items(), key=lambda item: -gain(item[1])):
            if not row["actions"]:
                continue
            path = folder / model_name(model) / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            Plan.of({"actions": row["actions"], **row["plan"]}).save(path)
            written.setdefault(model, []).append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        found = rows_of(options.folder)
    except UsageError as error:
        parser.error(str(error))
    folder = options.folder / "plans"
    shutil.rmtree(folder, ignore_errors=True)
    for model, paths in save_plans(found, folder).items():
        print(shlex.join(["python", "-m", "rlflow_tvm.compare", model, "--plan", *map(str, paths)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
