"""Taking what one kernel database holds into another: times of several machines, or of one that others learn from."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rlflow_tvm.cost.database import KernelDatabase, reading_name
from rlflow_tvm.cost.measurement import DISTURBED
from rlflow_tvm.cost.reference import rescaled
from rlflow_tvm.cost.schema import LAUNCH_KEY, ONCE_VERSION, REFERENCE_KEY, TAKE_PLACE
from rlflow_tvm.cost.scratch import scratch_folder
from rlflow_tvm.errors import CostError

_REFERENCES = f"""
SELECT target, ours.run_secs, theirs.run_secs
FROM main.measurement AS ours JOIN other.measurement AS theirs USING (kernel, target, version)
WHERE kernel = '{REFERENCE_KEY}' AND version = '{ONCE_VERSION}'
"""
_TO_OUR_SPEED = f"""
UPDATE other.measurement SET run_secs = run_secs * ?
WHERE target = ? AND kernel NOT IN ('{REFERENCE_KEY}', '{LAUNCH_KEY}')
"""
_QUIET = f"coalesce({{0}}.slowdown, 1) <= {DISTURBED}"
_MERGE_MEASUREMENTS = f"""
INSERT INTO main.measurement SELECT * FROM other.measurement WHERE true {TAKE_PLACE}
WHERE measurement.kernel <> '{REFERENCE_KEY}'
  AND (excluded.error IS NULL, {_QUIET.format("excluded")}, excluded.confirmed, excluded.measured_at)
    > (measurement.error IS NULL, {_QUIET.format("measurement")}, measurement.confirmed, measurement.measured_at)
"""
_MERGE_TUNED = """
INSERT INTO main.tuned_schedule SELECT * FROM other.tuned_schedule WHERE true
ON CONFLICT (kernel, target, version) DO UPDATE SET
    trace = excluded.trace, run_secs = excluded.run_secs, rule_secs = excluded.rule_secs,
    trials = excluded.trials, tuned_at = excluded.tuned_at
WHERE CASE
    WHEN excluded.trace IS tuned_schedule.trace
    THEN (excluded.trials, excluded.tuned_at) > (tuned_schedule.trials, tuned_schedule.tuned_at)
    ELSE (excluded.trace IS NOT NULL, excluded.rule_secs / excluded.run_secs, excluded.trials, excluded.tuned_at)
        > (tuned_schedule.trace IS NOT NULL, tuned_schedule.rule_secs / tuned_schedule.run_secs,
           tuned_schedule.trials, tuned_schedule.tuned_at)
    END
"""


@dataclass(frozen=True)
class Merged:
    """What a merge came to, in measurements: new ones, ones in the place of others, and ones that were passed over."""

    added: int
    replaced: int
    kept: int


def merge(database: KernelDatabase, path: str | os.PathLike[str]) -> Merged:
    """Take into `database` everything that the one at `path` holds, of whatever target, all of it or nothing.

    Where both know a kernel, seconds take the place of an error, undisturbed ones that of disturbed ones, confirmed
    ones that of others, and otherwise the later measurement that of the earlier; of tuning a schedule that of which
    none came, one that gained more that of one that gained less, and otherwise more trials that of fewer.
    Where both know the reference kernel of a target, its times there are reckoned to ours. The other file is not
    changed. CostError where it is missing, no database of ours, or damaged.
    """
    with scratch_folder() as folder:
        copy = Path(folder) / Path(path).name
        check_there(path)
        _copy_database(Path(path), copy)
        try:
            with KernelDatabase(copy) as other:  # which brings it to the present schema
                other.check()
                total = len(other)
        except CostError as error:
            reason = error.__cause__ or str(error).replace(str(copy), "it").split(":")[0]
            raise CostError(f"{path} cannot be merged ({reason}): give the path of a kernel database") from error
        with database.transaction(copy) as execute:
            # In the copy. Their times are reckoned to their reference kernel's, which another machine of the same name
            # may have found otherwise.
            for target, ours, theirs in execute(_REFERENCES).fetchall():
                execute(_TO_OUR_SPEED, (rescaled(ours, theirs), target))
            before = len(database)
            changed = execute(_MERGE_MEASUREMENTS).rowcount
            added = len(database) - before
            execute(_MERGE_TUNED)
            execute("INSERT OR IGNORE INTO main.description SELECT * FROM other.description")
    return Merged(added, changed - added, total - changed)


def check_there(path: str | os.PathLike[str]) -> None:
    """CostError where there is no file to merge."""
    if not Path(path).is_file():
        raise CostError(f"{path} cannot be merged (no such file): give the path of a kernel database")


def _copy_database(source: Path, copy: Path) -> None:
    """A copy of a database that may be in use."""
    path = str(source.resolve())
    shared = os.path.exists(f"{path}-wal") or os.access(os.path.dirname(path), os.W_OK)
    try:
        with closing(sqlite3.connect(reading_name(path, shared), uri=True)) as theirs:
            with closing(sqlite3.connect(copy)) as ours:
                theirs.backup(ours)
    except sqlite3.Error as error:
        raise CostError(f"{source} cannot be merged ({error}): give the path of a kernel database") from error
