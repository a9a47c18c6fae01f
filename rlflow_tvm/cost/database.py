"""The kernel database: what was measured, kept for the next run.

SQLite in WAL mode: several processes read and write at once, and a row that `put` has returned from survives
`kill -9` of any of them (write-ahead log; synchronous=NORMAL, so only a power cut can take the last rows back).
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlflow_tvm.cost.measurement import DISTURBED, Measurement
from rlflow_tvm.cost.schema import (
    LAUNCH_KEY,
    MIGRATIONS,
    ONCE_VERSION,
    REFERENCE_KEY,
    SCHEMA_VERSION,
    STRUCTURE,
    TAKE_PLACE,
)
from rlflow_tvm.errors import CostError, UsageError
from rlflow_tvm.home import home_folder

_BUSY_SECS = 60.0
_RETRY_SECS = 0.02
_SAMPLES = f"""
FROM measurement AS m JOIN description AS d
ON d.kernel = {STRUCTURE.format("m")} AND d.target = m.target AND d.version = m.version
WHERE m.target = ? AND m.version = ? AND m.run_secs IS NOT NULL AND coalesce(m.slowdown, 1) <= {DISTURBED}
"""


@dataclass(frozen=True)
class TunedRow:
    """What tuning a kernel came to.

    `trace`: the best schedule's instructions as JSON, None where none could be run. `run_secs`: the kernel's seconds
    with it, `rule_secs`: with the schedule rules' own, measured in turns. `trials`: schedules tried.
    """

    trace: str | None
    run_secs: float | None
    rule_secs: float | None
    trials: int


@dataclass(frozen=True)
class Holding:
    """What a database holds for one target under one pipeline version. Times in seconds since 1970.

    `confirmed`: of those measured, the ones measured twice (see `Measurement`).
    """

    target: str
    version: str
    measured: int
    confirmed: int
    failed: int
    disturbed: int
    tuned: int
    first_at: float
    last_at: float


def default_path() -> Path:
    """`$RLFLOW_TVM_HOME/kernels.sqlite`, by default `~/.cache/rlflow_tvm/kernels.sqlite`; CostError where nobody knows
    the home."""
    try:
        return home_folder() / "kernels.sqlite"
    except UsageError as error:
        raise CostError(str(error)) from error


def reading_name(path: str, shared: bool) -> str:
    """The URI under which SQLite only reads the file at `path`, an absolute one. `shared`: others may write to it
    meanwhile; to see to that SQLite makes a log beside a file that has none, which it cannot where nothing is written.
    """
    return f"{Path(path).as_uri()}?mode=ro{'' if shared else '&immutable=1'}"


class KernelDatabase:
    """Measurements and tuned schedules by (kernel key, target key, pipeline version) in the file `path`.

    ":memory:" lives in memory only. A file of an earlier schema version is brought to the present one. One that cannot
    be written, as its disk is read-only, is read; what would write to it is a CostError.

    Folders on the way are made. CostError, naming file and remedy, when the file is no database, is damaged, has
    another schema version or cannot be made; a file is never deleted or overwritten.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path) if str(path) == ":memory:" else os.path.realpath(path)  # wherever this process goes
        logged = os.path.exists(f"{self.path}-wal")  # or SQLite makes a log, where it can
        writable = os.access(self.path, os.W_OK) and (logged or os.access(os.path.dirname(self.path), os.W_OK))
        self.reads_only = os.path.isfile(self.path) and not writable
        """Whether it cannot be written, as its disk is read-only."""
        if self.path != ":memory:" and not self.reads_only:
            try:
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._unusable(error) from error
        with self._guarded():
            name = self.path
            if self.reads_only:
                name = reading_name(self.path, logged)
            # isolation_level=None: each statement is its own transaction, so a returned put is a committed one.
            self._connection = sqlite3.connect(name, timeout=_BUSY_SECS, isolation_level=None, uri=self.reads_only)
        self._seen = 0
        try:
            with self._guarded():
                self._open()
        except BaseException:
            self._connection.close()
            raise

    def get(self, key: str, target_key: str, version: str) -> Measurement | None:
        """The measurement stored under these three, or None."""
        with self._guarded():
            row = self._connection.execute(
                "SELECT run_secs, error, error_kind, repeats, spread, slowdown, confirmed FROM measurement"
                " WHERE kernel = ? AND target = ? AND version = ?",
                (key, target_key, version),
            ).fetchone()
        if row is None:
            return None
        secs, error, kind, repeats, spread, slowdown, confirmed = row
        return Measurement(secs, error, kind, repeats, spread, slowdown, bool(confirmed))

    def put(self, key: str, target_key: str, version: str, measurement: Measurement, tvm_version: str = "") -> None:
        """Store `measurement`, replacing an older one; it is on file when this returns.

        But what is confirmed stays, as it stands for good, and seconds do not give way to an error: another process may
        have stored them meanwhile.
        """
        with self._guarded():
            self._connection.execute(
                f"INSERT INTO measurement VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) {TAKE_PLACE}"
                " WHERE NOT measurement.confirmed AND (measurement.error IS NOT NULL OR excluded.error IS NULL)",
                (
                    key,
                    target_key,
                    version,
                    measurement.run_secs,
                    measurement.error,
                    measurement.error_kind,
                    measurement.repeats,
                    measurement.spread,
                    time.time(),
                    tvm_version,
                    measurement.slowdown,
                    measurement.confirmed,
                ),
            )

    def describe(self, key: str, target_key: str, version: str, name: str, features: Mapping[str, float]) -> None:
        """Store what is known of a kernel beside its times: `key` is its structural hash."""
        with self._guarded():
            text = json.dumps(dict(features), allow_nan=False)
            row = (key, target_key, version, name, text)
            self._connection.execute("INSERT OR REPLACE INTO description VALUES (?, ?, ?, ?, ?)", row)

    def described(self, target_key: str, version: str) -> set[str]:
        """The structural hashes of the kernels that `describe` was told of, for this target and version."""
        with self._guarded():
            rows = self._connection.execute(
                "SELECT kernel FROM description WHERE target = ? AND version = ?", (target_key, version)
            ).fetchall()
        return {key for (key,) in rows}

    def samples(self, target_key: str, version: str) -> list[tuple[str, dict[str, float], str, float]]:
        """Every successful, undisturbed measurement of a kernel with features: (key, features, temperatures, seconds),
        by key."""
        with self._guarded():
            rows = self._connection.execute(
                "SELECT d.kernel, d.features, substr(m.kernel, instr(m.kernel || '/', '/') + 1), m.run_secs"
                f"{_SAMPLES} ORDER BY m.kernel",
                (target_key, version),
            ).fetchall()
        return [(key, json.loads(features), cold, secs) for key, features, cold, secs in rows]

    def sample_count(self, target_key: str, version: str) -> int:
        """How many `samples` gives."""
        with self._guarded():
            return self._connection.execute(f"SELECT count(*) {_SAMPLES}", (target_key, version)).fetchone()[0]

    def changed(self) -> bool:
        """Whether somebody else has written since this was last asked."""
        with self._guarded():
            before, (self._seen,) = self._seen, self._connection.execute("PRAGMA data_version").fetchone()
        return before != self._seen

    def rows(self, columns: Sequence[str]) -> list[tuple]:
        """These columns of every measurement (see `schema`), in the order of the key."""
        with self._guarded():
            return self._connection.execute(
                f"SELECT {', '.join(columns)} FROM measurement ORDER BY kernel, target, version"
            ).fetchall()

    def holdings(self) -> list[Holding]:
        """What is held, by target and version."""
        with self._guarded():
            rows = self._connection.execute(
                "SELECT target, version, sum(1 - tuned), sum(confirmed), sum(failed), sum(disturbed), sum(tuned),"
                " min(at), max(at) FROM"
                " (SELECT target, version, confirmed, error IS NOT NULL AS failed,"
                " coalesce(slowdown, 1) > ? AS disturbed, 0 AS tuned, measured_at AS at FROM measurement"
                " UNION ALL SELECT target, version, 0, 0, 0, 1, tuned_at FROM tuned_schedule)"
                " GROUP BY target, version ORDER BY max(at)",
                (DISTURBED,),
            ).fetchall()
        return [Holding(*row) for row in rows]

    def forget_disturbed(self) -> int:
        """Drop the measurements that were made while something else slowed the machine down; how many.

        Where that is the reference kernel's, all times of its target that are reckoned to it go with it.
        """
        with self._guarded():
            return self._connection.execute(
                "DELETE FROM measurement WHERE slowdown > ?1 OR (run_secs IS NOT NULL AND kernel <> ?2 AND target IN"
                " (SELECT target FROM measurement WHERE kernel = ?3 AND version = ?4 AND slowdown > ?1))",
                (DISTURBED, LAUNCH_KEY, REFERENCE_KEY, ONCE_VERSION),
            ).rowcount

    def forget_errors(self) -> int:
        """Drop the kernels that failed, so that they are tried again; how many."""
        with self._guarded():
            return self._connection.execute("DELETE FROM measurement WHERE error IS NOT NULL").rowcount

    def check(self) -> None:
        """CostError where the file is damaged (SQLite's own integrity check)."""
        with self._guarded():
            found = self._connection.execute("PRAGMA integrity_check").fetchall()
        if found != [("ok",)]:
            raise self._unusable(sqlite3.DatabaseError(f"its integrity check says: {found[0][0]}"))

    def get_tuned(self, key: str, target_key: str, version: str) -> TunedRow | None:
        """What tuning came to for the kernel under these three, or None where it was not tuned."""
        with self._guarded():
            row = self._connection.execute(
                "SELECT trace, run_secs, rule_secs, trials FROM tuned_schedule"
                " WHERE kernel = ? AND target = ? AND version = ?",
                (key, target_key, version),
            ).fetchone()
        return None if row is None else TunedRow(*row)

    def put_tuned(self, key: str, target_key: str, version: str, row: TunedRow) -> None:
        """Store what tuning came to, replacing an earlier one; it is on file when this returns."""
        with self._guarded():
            self._connection.execute(
                "INSERT OR REPLACE INTO tuned_schedule VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (key, target_key, version, row.trace, row.run_secs, row.rule_secs, row.trials, time.time()),
            )

    @contextmanager
    def transaction(self, attached: Path) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Statements that take effect together or not at all, with another file as the database `other`."""
        with self._guarded():
            execute = self._connection.execute
            execute("ATTACH ? AS other", (str(attached),))
            try:
                execute("BEGIN IMMEDIATE")
                try:
                    yield execute
                    execute("COMMIT")
                except BaseException:
                    if self._connection.in_transaction:  # a full disk has ended it
                        execute("ROLLBACK")
                    raise
            finally:
                execute("DETACH other")

    def __len__(self) -> int:
        with self._guarded():
            return self._connection.execute("SELECT count(*) FROM measurement").fetchone()[0]

    def close(self) -> None:
        """Close the file; further use is a CostError."""
        self._connection.close()

    def __enter__(self) -> KernelDatabase:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self) -> None:
        execute = self._connection.execute
        self._check_ours()
        if self.reads_only:
            return
        if self.path != ":memory:":
            self._enter_wal()
            execute("PRAGMA synchronous = NORMAL")
        if self._schema_version() in MIGRATIONS:
            # Two processes may come here at once: the second waits for the lock and then finds it done.
            execute("BEGIN IMMEDIATE")
            before = self._schema_version()
            if before in MIGRATIONS:
                for statement in MIGRATIONS[before]:
                    execute(statement)
                execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            execute("COMMIT")

    def _check_ours(self) -> None:
        """CostError, before anything is written, for a file of another program or of a version that is not known."""
        # in one statement: between two another process may make the tables
        version, tables, ours = self._connection.execute(
            "SELECT user_version, (SELECT count(*) FROM sqlite_master),"
            " (SELECT count(*) FROM sqlite_master WHERE name = 'measurement') FROM pragma_user_version"
        ).fetchone()
        if not ours if version else tables:
            raise CostError(
                f"kernel database {self.path} is another program's (of schema version {version}, with other tables): "
                "give another path, or set RLFLOW_TVM_HOME to another folder"
            )
        if version not in (SCHEMA_VERSION, *MIGRATIONS):
            raise CostError(
                f"kernel database {self.path} has schema version {version}, this program reads {SCHEMA_VERSION}: "
                "move the file away (it is measured again) or set RLFLOW_TVM_HOME to another folder"
            )
        if version != SCHEMA_VERSION and self.reads_only:
            raise CostError(
                f"kernel database {self.path} has schema version {version}, and cannot be brought to {SCHEMA_VERSION} "
                "as it is read-only: copy it to where it can be written, and name that file"
            )

    def _enter_wal(self) -> None:
        """Switch the file to write-ahead logging, which asks for it alone and, unlike all else, does not wait."""
        deadline = time.monotonic() + _BUSY_SECS
        while True:
            try:
                if self._connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECS)

    def _schema_version(self) -> int:
        return self._connection.execute("PRAGMA user_version").fetchone()[0]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> CostError:
        if self.reads_only and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:
            return CostError(
                f"kernel database {self.path} can only be read: make the file and its folder writable, or set "
                "RLFLOW_TVM_HOME to a folder that is"
            )
        return CostError(
            f"kernel database {self.path} cannot be used ({error}): move the file away (it is measured again), "
            "free or unlock its disk, or set RLFLOW_TVM_HOME to another folder"
        )
