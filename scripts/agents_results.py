"""What scripts left in files, and of `scripts/agents.py` the runs, and what they gained."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rlflow_tvm.errors import UsageError
from rlflow_tvm.passes import Plan
from rlflow_tvm.search import SEARCHES
from rlflow_tvm.training_files import model_name

Row = dict[str, Any]
Found = dict[str, dict[tuple[str, int], list[Row]]]
RUN = ("model", "method", "steps", "seed", "start_secs", "best_secs", "env_steps", "curve", "wall_secs", "actions")
"""What each run has told since the first version of `scripts/agents.py`."""
OPTIONS = ("settings", "predict", "horizon")
"""What the seeds of a method must have in common; an episode's steps, the last, are nothing to a search."""
SCORES = {
    "nll": "-log p(z'), nats",
    "reward_r2": "R² of savings",
    "rule_mask_f1": "F1 of the mask",
    "rule_change_f1": "F1 of its changes",
    "locations_exact": "counts exact",
}
"""Of a world model on episodes held out."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (nought for one value)."""
    if len(values) < 2:
        return float(np.mean(values)), 0.0
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(np.mean(values)), float(half)


def told(values: Sequence[float], digits: int = 3) -> str:
    mean, half = interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{mean:.{digits}f}"


def gain(row: Row) -> float:
    return float(row["start_secs"] / row["best_secs"])


def plan_of(row: Row) -> Plan:
    """What a run found best; of one that told all of its plan."""
    return Plan.of({"actions": row["actions"], **row["plan"]})


def run_name(row: Row) -> str:
    """What a run, with what it found, is called among its model's: done again, it may find something else."""
    return f"{row['method']}.{row['steps']}.{row['seed']}.{row.get('plan', {}).get('end_hash', 'untold')}"


def anew_path(folder: Path, model: str) -> Path:
    """Where `scripts/agents_anew.py` leaves what it finds."""
    return folder / f"{model_name(model)}.anew.json"


def read_anew(folder: Path, model: str) -> dict[str, Any]:
    """What that is: of which `prices`, and of each of its `databases` the gains by run; empty where there is none."""
    path = anew_path(folder, model)
    return read_json(path) if path.exists() else {}


def gains_anew(folder: Path, model: str, rows: Sequence[Row]) -> list[float]:
    """Of each run that was priced anew, the mean of its databases. UsageError where those are of another machine or of
    other kernels than the runs."""
    anew = read_anew(folder, model)
    databases = anew.get("databases", [])
    if databases and any(row.get("prices", anew["prices"]) != anew["prices"] for row in rows):
        raise UsageError(f"{anew_path(folder, model)}: is of {anew['prices']}, the runs are not; price them anew")
    each = [[known[run_name(row)] for known in databases if run_name(row) in known] for row in rows]
    return [float(np.mean(gains)) for gains in each if gains]


def names_of(methods: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """What (method, steps) are called: with their steps where a method was allowed several numbers of them."""
    methods = list(methods)
    times = Counter(method for method, _ in methods)
    return {(method, steps): method if times[method] == 1 else f"{method}.{steps}" for method, steps in methods}


def gains_along(row: Row, steps: np.ndarray) -> np.ndarray:
    """The best gain after each number of steps."""
    at, secs = np.array(row["curve"]).T
    best = np.minimum.accumulate(secs)
    return row["start_secs"] / best[np.searchsorted(at, steps, side="right") - 1]


def steps_to(row: Row, wanted: float) -> float:
    """Environment steps until a gain was reached; infinite if it never was."""
    return next((step for step, secs in row["curve"] if row["start_secs"] / secs >= wanted), np.inf)


def read_json(path: Path) -> Any:
    """What a script left in a file; UsageError where there is none, or it is no JSON."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); run the script that writes it first") from None
    except ValueError as error:
        raise UsageError(f"{path}: is no JSON ({error}); remove it, and run the script that writes it again") from None


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether no other process holds `path`, a file for nothing else, which this one holds meanwhile; `wait` for it.
    UsageError where it cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); give another --out") from None
    with lock:  # closed, it is free again, also where the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def read_number(value: float | None) -> float:
    """Of a file: there null stands for what is infinite or no number, for which JSON has no word."""
    return np.inf if value is None else value


def check_made(path: Path, rows: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> None:
    """UsageError where one of the results in a file, each of which tells how it was `made`, was made in another way."""
    for row in rows:
        theirs = row.get("made", {})
        for name, value in made.items():
            if theirs.get(name) != value:
                raise UsageError(f"{path}: {name} was {theirs.get(name)}, is {value}; give that, or another --out")


def rows_of(*folders: Path) -> Found:
    """Model -> (method, steps) -> its runs, of all folders. UsageError where there is none, a file is no run, or a
    model's runs are of several machines or versions of the kernels."""
    found: Found = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*/*.json"))]:
        row = read_json(path)
        missing = [name for name in RUN if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{path}: is no result of scripts/agents.py ({missing[0]} is missing); move it away")
        runs = found.setdefault(row["model"], {}).setdefault((row["method"], row["steps"]), [])
        if all(row["seed"] != known["seed"] for known in runs):  # the same one in two folders counts once
            runs.append(row)
    if not found:
        raise UsageError(f"{' '.join(map(str, folders))}: no results here; run scripts/agents.py first")
    for model, methods in found.items():
        prices = sorted({row.get("prices", "an unknown machine") for rows in methods.values() for row in rows})
        if len(prices) > 1:
            raise UsageError(f"{model}: results of {' and '.join(prices)} cannot be held against each other")
        for (method, _), rows in methods.items():
            if len({row.get("begun") for row in rows}) > 1:
                raise UsageError(f"{model} {method}: runs that begin at the model and others cannot be averaged")
            for name in OPTIONS if method not in SEARCHES else OPTIONS[:-1]:
                if len({json.dumps(row.get(name) or None, sort_keys=True) for row in rows}) > 1:
                    raise UsageError(f"{model} {method}: runs of different --{name} cannot be averaged")
    return found
