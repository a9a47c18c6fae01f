"""The kernel database: round trips, several processes, kill -9, damage."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlflow_tvm.cost import KernelDatabase, Measurement, default_path
from rlflow_tvm.cost.schema import SCHEMA_VERSION
from rlflow_tvm.errors import CostError

GOOD = Measurement(run_secs=2.5e-4, repeats=7, spread=0.02)
BAD = Measurement(error="the worker died of SIGSEGV", error_kind="crash")
OTHER = Measurement(run_secs=3.0e-4, repeats=5, spread=0.01)
SURE = Measurement(run_secs=2.0e-4, repeats=7, spread=0.02, confirmed=True)

# Writes rows tag-0, tag-1, ... and acknowledges each on stdout once `put` has returned. Without the
# packages' __init__, which would import TVM.
WRITER = """
import sys, types
for name, folder in (("rlflow_tvm", ""), ("rlflow_tvm.cost", "/cost")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + folder]
from rlflow_tvm.cost.database import KernelDatabase
from rlflow_tvm.cost.measurement import Measurement
database = KernelDatabase(sys.argv[2])
for i in range(int(sys.argv[4])):
    database.put(f"{sys.argv[3]}-{i}", "target", "1", Measurement(run_secs=1.0 + i))
    print(i, flush=True)
"""


def write(path: Path, tag: str, rows: int, log: Path | None = None) -> subprocess.Popen[str]:
    """A process that writes `rows` rows, and what was acknowledged to its standard output, or to `log`."""
    import rlflow_tvm

    root = Path(rlflow_tvm.__file__).parent
    arguments = [sys.executable, "-c", WRITER, str(root), str(path), tag, str(rows)]
    environment = {**os.environ, "PYTHONPATH": str(root.parent)}
    if log is None:
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
    with log.open("w") as stream:
        return subprocess.Popen(arguments, stdout=stream, text=True, env=environment)


@pytest.mark.parametrize("where", ["file", ":memory:"])
def test_round_trip(where, tmp_path):
    path = tmp_path / "new" / "folder" / "k.sqlite" if where == "file" else where
    with KernelDatabase(path) as database:
        assert database.get("k", "t", "1") is None
        database.put("k", "t", "1", BAD)
        assert database.get("k", "t", "1") == BAD
        database.put("k", "t", "1", GOOD, "0.27")
        assert database.get("k", "t", "1") == GOOD
        assert len(database) == 1
        assert database.get("k", "t", "2") is None
        assert database.get("k", "other", "1") is None
    with pytest.raises(CostError):
        database.get("k", "t", "1")
    if where == "file":
        with KernelDatabase(path) as again:
            assert again.get("k", "t", "1") == GOOD


@pytest.mark.parametrize(
    ("held", "put", "stays"),
    [(GOOD, BAD, True), (GOOD, SURE, False), (GOOD, OTHER, False), (SURE, OTHER, True), (SURE, BAD, True)],
    ids=["seconds, error", "seconds, confirmed", "seconds, later ones", "confirmed, seconds", "confirmed, error"],
)
def test_the_better_row_stays(held, put, stays):
    """Two processes that do not wait for each other may measure one kernel."""
    with KernelDatabase(":memory:") as database:
        database.put("k", "t", "1", held)
        database.put("k", "t", "1", put)
        assert database.get("k", "t", "1") == (held if stays else put)


def test_stored_beside_the_value(tmp_path):
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        database.put("k", "t", "1", GOOD, "0.27.0")
    row = sqlite3.connect(tmp_path / "k.sqlite").execute("SELECT measured_at, tvm_version FROM measurement").fetchone()
    assert row[0] > 1.7e9
    assert row[1] == "0.27.0"


def test_what_others_write_is_a_change(tmp_path):
    with KernelDatabase(tmp_path / "k.sqlite") as ours, KernelDatabase(tmp_path / "k.sqlite") as theirs:
        ours.changed()
        assert not ours.changed()
        ours.put("k", "t", "1", GOOD)
        assert not ours.changed()
        theirs.put("k", "t", "1", GOOD)
        assert ours.changed()
        assert not ours.changed()


def test_default_path(monkeypatch, tmp_path):
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(tmp_path))
    assert default_path() == tmp_path / "kernels.sqlite"
    monkeypatch.delenv("RLFLOW_TVM_HOME")
    assert default_path().parts[-3:] == (".cache", "rlflow_tvm", "kernels.sqlite")
    monkeypatch.setenv("RLFLOW_TVM_HOME", "~/prices")
    assert default_path() == Path.home() / "prices" / "kernels.sqlite"


@pytest.mark.parametrize("home", [None, "~/prices"])
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, home):
    def homeless(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.delenv("RLFLOW_TVM_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("RLFLOW_TVM_HOME", home)
    with pytest.raises(CostError, match=r"no home folder .*set RLFLOW_TVM_HOME"):
        default_path()


def test_other_schema_version(tmp_path):
    path = tmp_path / "k.sqlite"
    KernelDatabase(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(CostError, match=r"k\.sqlite has schema version 99.*move the file away"):
        KernelDatabase(path)
    assert path.exists()


def test_somebody_elses_database(tmp_path):
    path = tmp_path / "k.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE theirs (x)")
    raw.close()
    with pytest.raises(CostError, match="schema version 0"):
        KernelDatabase(path)


@pytest.mark.parametrize("version", [0, 2, SCHEMA_VERSION])
def test_somebody_elses_database_is_left_as_it_was(tmp_path, version):
    """Their version is a number as ours is."""
    path = tmp_path / "k.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE theirs (x)")
        raw.execute(f"PRAGMA user_version = {version}")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(CostError, match=rf"k\.sqlite is another program's .*schema version {version}.*another path"):
        KernelDatabase(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_database_of_a_later_version_is_left_as_it_was(tmp_path):
    path = tmp_path / "k.sqlite"
    KernelDatabase(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
        raw.execute("PRAGMA journal_mode = DELETE")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(CostError, match="has schema version 99"):
        KernelDatabase(path)
    assert path.read_bytes() == before


def test_no_database_at_all(tmp_path):
    path = tmp_path / "k.sqlite"
    path.write_bytes(b"this is a text file, and long enough to be looked at " * 40)
    with pytest.raises(CostError, match=r"k\.sqlite cannot be used .*not a database.*move the file away"):
        KernelDatabase(path)
    assert path.read_bytes().startswith(b"this is")


def test_damaged_pages(tmp_path):
    path = tmp_path / "k.sqlite"
    with KernelDatabase(path) as database:
        for i in range(2000):
            database.put(f"k{i}", "t", "1", GOOD)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 8192))
    with KernelDatabase(path) as database, pytest.raises(CostError, match="cannot be used"):
        database.get("k1000", "t", "1")
    assert path.stat().st_size == size


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CostError, match="cannot be used"):
        KernelDatabase(tmp_path / "file" / "k.sqlite")


@pytest.fixture
def lock_up(monkeypatch):
    """Makes paths read-only, for a user whom permissions do not bind too."""

    def lock_up(*paths):
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, how: Path(path) not in paths and access(path, how))

    return lock_up


@pytest.mark.parametrize("folder_too", [False, True], ids=["file", "folder"])
def test_what_cannot_be_written_is_read(tmp_path, lock_up, folder_too):
    path = tmp_path / "k.sqlite"
    with KernelDatabase(path) as database:
        database.put("k", "t", "1", GOOD)
    before = path.read_bytes()
    lock_up(path, *([tmp_path] if folder_too else []))
    with KernelDatabase(path) as database:
        database.check()
        assert database.get("k", "t", "1") == GOOD
        assert [held.measured for held in database.holdings()] == [1]
        assert list(tmp_path.iterdir()) == [path]
        with pytest.raises(CostError, match=r"k\.sqlite can only be read: make .* writable") as raised:
            database.put("k", "t", "1", OTHER)
        assert "move" not in str(raised.value)
    assert path.read_bytes() == before


def test_what_others_are_writing_is_read(tmp_path, lock_up):
    path = tmp_path / "k.sqlite"
    with KernelDatabase(path) as writer:
        writer.put("k", "t", "1", GOOD)  # into its log
        lock_up(path, tmp_path)
        with KernelDatabase(path) as reader:
            assert reader.get("k", "t", "1") == GOOD
            writer.put("k", "t", "1", OTHER)
            assert reader.changed()
            assert reader.get("k", "t", "1") == OTHER


def test_an_earlier_schema_that_cannot_be_written(tmp_path, lock_up):
    path = tmp_path / "k.sqlite"
    KernelDatabase(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 3")
    raw.close()
    lock_up(path, tmp_path)
    with pytest.raises(CostError, match=r"k\.sqlite has schema version 3.*read-only: copy it"):
        KernelDatabase(path)


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    """Locks lie beside the file, and what is learned from it."""
    monkeypatch.chdir(tmp_path)
    with KernelDatabase("k.sqlite") as database:
        monkeypatch.chdir("/")
        assert database.path == str(tmp_path / "k.sqlite")


def test_two_writers_and_a_reader(tmp_path):
    path = tmp_path / "k.sqlite"
    writers = [write(path, tag, 200) for tag in "ab"]  # both find no file, and race to make the table
    with KernelDatabase(path) as reader:
        seen = 0
        while any(writer.poll() is None for writer in writers):
            rows = len(reader)
            assert rows >= seen
            seen = rows
            time.sleep(0.01)
        for writer in writers:
            writer.communicate()
            assert writer.returncode == 0
        assert len(reader) == 400
        assert reader.get("b-199", "target", "1") == Measurement(run_secs=200.0)


def test_a_file_that_is_locked_when_it_is_opened(tmp_path):
    path = tmp_path / "k.sqlite"
    raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    raw.execute("BEGIN EXCLUSIVE")  # as another process does that makes the tables
    unlock = threading.Timer(0.3, lambda: raw.execute("COMMIT"))
    unlock.start()
    with KernelDatabase(path) as database:
        database.put("k", "t", "1", GOOD)
        assert len(database) == 1
    unlock.join()
    raw.close()


def test_kill_9(tmp_path):
    path = tmp_path / "k.sqlite"
    with KernelDatabase(path) as reader:
        for attempt in range(5):
            writer = write(path, f"w{attempt}", 1_000_000)
            acknowledged = -1
            for line in writer.stdout:
                acknowledged = int(line)
                if acknowledged == 20 + 37 * attempt:
                    os.kill(writer.pid, signal.SIGKILL)
                    break
            rest, _ = writer.communicate()
            complete = [line for line in rest.split("\n")[:-1] if line]
            acknowledged = int(complete[-1]) if complete else acknowledged
            assert writer.returncode == -signal.SIGKILL
            for i in range(acknowledged + 1):
                assert reader.get(f"w{attempt}-{i}", "target", "1") == Measurement(run_secs=1.0 + i)
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()


def test_eight_writers_of_which_one_is_killed_again_and_again(tmp_path):
    """No row is lost that was acknowledged. RLFLOW_TVM_STRESS_SECS=60 does it for a minute."""
    path = tmp_path / "k.sqlite"
    turns = int(os.environ.get("RLFLOW_TVM_STRESS_SECS", "4"))
    started: list[tuple[subprocess.Popen[str], Path]] = []

    def start() -> subprocess.Popen[str]:
        log = tmp_path / f"log{len(started)}"
        started.append((write(path, f"w{len(started)}", 1_000_000, log), log))
        return started[-1][0]

    running = [start() for _ in range(8)]
    with KernelDatabase(path) as reader:
        for turn in range(turns):
            time.sleep(1.0)
            assert all(writer.poll() is None for writer in running)
            os.kill(running[turn % 8].pid, signal.SIGKILL)
            running[turn % 8] = start()
        for writer in running:
            os.kill(writer.pid, signal.SIGKILL)
        total = 0
        for i, (writer, log) in enumerate(started):
            writer.wait()
            acknowledged = [int(line) for line in log.read_text().split("\n")[:-1]]
            assert acknowledged == list(range(len(acknowledged)))
            for row in acknowledged:
                assert reader.get(f"w{i}-{row}", "target", "1") == Measurement(run_secs=1.0 + row)
            total += len(acknowledged)
        reader.check()
        assert total <= len(reader) <= total + len(started)  # a row that was written, but not yet acknowledged
        print(f"{turns} writers killed, {total} rows acknowledged, none lost")
