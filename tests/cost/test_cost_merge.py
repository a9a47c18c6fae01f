"""Merging databases, what they hold, and the command that shows it."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest
from test_cost_database import BAD, GOOD

from rlflow_tvm.cost import KernelDatabase, Measurement
from rlflow_tvm.cost.database import TunedRow
from rlflow_tvm.cost.merge import Merged, merge
from rlflow_tvm.cost.reference import rescaled
from rlflow_tvm.cost.schema import LAUNCH_KEY, ONCE_VERSION, REFERENCE_KEY
from rlflow_tvm.errors import CostError
from tests.command_process import run_command


def database(path: Path, rows: dict[str, Measurement], target: str = "t") -> Path:
    with KernelDatabase(path) as made:
        for key, measurement in rows.items():
            made.put(key, target, version_of(key), measurement)
    return path


def version_of(key: str) -> str:
    return ONCE_VERSION if key in (LAUNCH_KEY, REFERENCE_KEY) else "1"


def secs(run_secs: float, **fields: float) -> Measurement:
    return Measurement(run_secs=run_secs, repeats=5, spread=0.01, **fields)


def test_what_is_new_is_added_whatever_its_target(tmp_path):
    other = database(tmp_path / "other.sqlite", {"a": GOOD, "b": BAD}, target="a GPU's")
    with KernelDatabase(other) as theirs:
        theirs.put_tuned("a", "a GPU's", "1", TunedRow("[]", 1.0, 2.0, 16))
        theirs.describe("a", "a GPU's", "1", "conv2d", {"flops": 3.0})
    before = other.read_bytes()
    with KernelDatabase(database(tmp_path / "ours.sqlite", {"a": secs(7.0)})) as ours:
        ours.describe("a", "t", "1", "conv2d", {"flops": 4.0})
        assert merge(ours, other) == Merged(added=2, replaced=0, kept=0)
        assert ours.get("a", "t", "1") == secs(7.0)  # another target's numbers are not ours
        assert ours.get("a", "a GPU's", "1") == GOOD
        assert ours.get("b", "a GPU's", "1") == BAD
        assert ours.get("b", "t", "1") is None
        assert ours.get_tuned("a", "a GPU's", "1") == TunedRow("[]", 1.0, 2.0, 16)
        assert ours.samples("a GPU's", "1") == [("a", {"flops": 3.0}, "", GOOD.run_secs)]
        assert ours.samples("t", "1") == [("a", {"flops": 4.0}, "", 7.0)]
        assert merge(ours, other) == Merged(added=0, replaced=0, kept=2)
    assert other.read_bytes() == before


@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch, read_only):
    """SQLite would make a log there to read it."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    other = database(folder / "other.sqlite", {"a": GOOD})
    access, connect, opened = os.access, sqlite3.connect, []
    monkeypatch.setattr(os, "access", lambda path, how: not (read_only and Path(path) == folder) and access(path, how))

    def told(name, *arguments, **options):
        opened.append(name)
        return connect(name, *arguments, **options)

    monkeypatch.setattr(sqlite3, "connect", told)
    with KernelDatabase(tmp_path / "ours.sqlite") as ours:
        assert merge(ours, other) == Merged(added=1, replaced=0, kept=0)
    (name,) = (name for name in opened if str(name).startswith(other.as_uri()))
    assert ("immutable=1" in name) == read_only
    if read_only:
        assert list(folder.iterdir()) == [other]


def test_times_are_reckoned_to_our_reference(tmp_path):
    """Which stays, though theirs was measured later; what launching takes was never reckoned to it."""
    path = database(tmp_path / "ours.sqlite", {REFERENCE_KEY: secs(2.0), "old": secs(1.0)})
    theirs = {REFERENCE_KEY: secs(4.0), "a": secs(6.0), "b": BAD, "old": secs(8.0), LAUNCH_KEY: secs(1.0)}
    other = database(tmp_path / "other.sqlite", theirs)
    database(other, {"a": secs(6.0)}, target="another")
    with KernelDatabase(path) as ours:
        assert merge(ours, other) == Merged(added=4, replaced=1, kept=1)
        share = rescaled(2.0, 4.0)
        expected = [secs(2.0), secs(6.0 * share), BAD, secs(8.0 * share), secs(1.0)]
        assert [ours.get(key, "t", version_of(key)) for key in theirs] == expected
        assert ours.get("a", "another", "1") == secs(6.0)
    with KernelDatabase(tmp_path / "empty.sqlite") as empty:
        merge(empty, other)
        assert empty.get("a", "t", "1") == secs(6.0)


def test_seconds_before_errors_and_later_before_earlier(tmp_path):
    early = {"late": secs(1.0), "ours fails": BAD, "theirs fails": secs(2.0), "both fail": BAD}
    with KernelDatabase(database(tmp_path / "ours.sqlite", early)) as ours:
        late = {"late": secs(3.0), "ours fails": secs(4.0), "theirs fails": BAD, "both fail": BAD}
        assert merge(ours, database(tmp_path / "late.sqlite", late)) == Merged(added=0, replaced=3, kept=1)
        found = [ours.get(key, "t", "1") for key in early]
        assert found == [secs(3.0), secs(4.0), secs(2.0), BAD]
    with KernelDatabase(tmp_path / "late.sqlite") as later:
        assert merge(later, tmp_path / "ours.sqlite").replaced == 1  # only the seconds for "theirs fails"


def test_confirmed_before_single_and_seconds_before_both(tmp_path):
    early = {"a": secs(1.0, confirmed=True), "b": secs(2.0), "c": BAD, "d": secs(3.0, confirmed=True)}
    late = {"a": secs(4.0), "b": secs(5.0, confirmed=True), "c": secs(6.0), "d": secs(7.0, confirmed=True)}
    with KernelDatabase(database(tmp_path / "ours.sqlite", early)) as ours:
        assert merge(ours, database(tmp_path / "late.sqlite", late)) == Merged(added=0, replaced=3, kept=1)
        assert [ours.get(key, "t", "1") for key in early] == [early["a"], late["b"], late["c"], late["d"]]


def test_a_schedule_before_none_and_what_gained_more_before_what_gained_less(tmp_path):
    """Whichever was tuned later, or longer."""
    best, none = TunedRow("[2]", 1.0, 2.0, 64), TunedRow(None, None, None, 16)
    early = {"ours": best, "less": best, "theirs": none, "more": best, "fewer": best, "again": best}
    late = {
        "ours": none,
        "less": TunedRow("[3]", 1.99, 2.0, 128),
        "theirs": best,
        "more": TunedRow("[4]", 1.0, 2.5, 16),  # of rules' own kernel as it was timed then
        "fewer": TunedRow("[1]", 1.0, 2.0, 16),
        "again": TunedRow("[2]", 1.1, 2.0, 64),
    }
    for name, rows in (("ours", early), ("late", late)):
        with KernelDatabase(tmp_path / f"{name}.sqlite") as made:
            for key, row in rows.items():
                made.put_tuned(key, "t", "1", row)
    with KernelDatabase(tmp_path / "ours.sqlite") as ours:
        merge(ours, tmp_path / "late.sqlite")
        assert [ours.get_tuned(key, "t", "1") for key in early] == [best, best, best, late["more"], best, late["again"]]


def test_a_database_of_an_earlier_schema_is_merged_and_left_as_it_is(tmp_path):
    old = tmp_path / "old.sqlite"
    with sqlite3.connect(old) as raw:
        raw.execute(
            "CREATE TABLE measurement (kernel TEXT, target TEXT, version TEXT, run_secs REAL, error TEXT, error_kind"
            " TEXT, repeats INTEGER, spread REAL, measured_at REAL, tvm_version TEXT,"
            " PRIMARY KEY (kernel, target, version)) WITHOUT ROWID"
        )
        raw.execute("INSERT INTO measurement VALUES ('k', 't', '1', 0.5, NULL, NULL, 3, 0.1, 1e9, '0.27')")
        raw.execute("PRAGMA user_version = 1")
    raw.close()
    with KernelDatabase(tmp_path / "ours.sqlite") as ours:
        assert merge(ours, old).added == 1
        assert ours.get("k", "t", "1") == Measurement(run_secs=0.5, repeats=3, spread=0.1)
    with sqlite3.connect(old) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (1,)
    raw.close()


def test_what_cannot_be_merged_changes_nothing(tmp_path):
    path = database(tmp_path / "ours.sqlite", {"a": GOOD})
    text = tmp_path / "text.sqlite"
    text.write_text("no database " * 100)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as raw:
        raw.execute("CREATE TABLE theirs (x)")
    raw.close()
    newer = database(tmp_path / "newer.sqlite", {"b": GOOD})
    with sqlite3.connect(newer) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    damaged = database(tmp_path / "damaged.sqlite", {f"k{i}": GOOD for i in range(2000)})
    with damaged.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (damaged.stat().st_size - 8192))
    with KernelDatabase(path) as ours:
        for other in (text, foreign, newer, damaged, tmp_path / "missing.sqlite"):
            with pytest.raises(CostError, match=f"{other.name} cannot be merged .*give the path of a kernel database"):
                merge(ours, other)
        assert len(ours) == 1
    assert not (tmp_path / "missing.sqlite").exists()


def test_a_disturbed_measurement_does_not_take_the_place_of_another(tmp_path):
    other = database(tmp_path / "other.sqlite", {"a": secs(3.0, slowdown=1.9), "b": secs(4.0, slowdown=1.0)})
    ours = database(tmp_path / "ours.sqlite", {"a": secs(1.0, slowdown=1.0), "b": secs(5.0, slowdown=1.9)})
    with KernelDatabase(ours) as held:
        merge(held, other)
        assert held.get("a", "t", "1") == secs(1.0, slowdown=1.0)
        assert held.get("b", "t", "1") == secs(4.0, slowdown=1.0)


def test_a_merge_that_fails_half_way_leaves_nothing(tmp_path):
    other = database(tmp_path / "other.sqlite", {"a": GOOD, "b": GOOD})
    with KernelDatabase(tmp_path / "ours.sqlite") as ours:
        with sqlite3.connect(tmp_path / "ours.sqlite") as raw:  # a fault in our own file: the last statement fails
            raw.execute("DROP TABLE description")
        raw.close()
        with pytest.raises(CostError, match="no such table"):
            merge(ours, other)
        assert len(ours) == 0


def test_holdings(tmp_path):
    with KernelDatabase(tmp_path / "k.sqlite") as held:
        for key, measurement in {"a": secs(1.0, confirmed=True), "b": secs(1.0, slowdown=1.5), "c": BAD}.items():
            held.put(key, "t", "1", measurement)
        held.put("a", "t", "2", GOOD)
        held.put_tuned("a", "t", "1", TunedRow(None, None, None, 16))
        held.put_tuned("a", "t", "3", TunedRow("[]", 1.0, 2.0, 16))  # nothing was measured alone
        held.check()
        by_version = {h.version: (h.measured, h.confirmed, h.failed, h.disturbed, h.tuned) for h in held.holdings()}
    assert by_version == {"1": (3, 1, 1, 1, 1), "2": (1, 0, 0, 0, 0), "3": (0, 0, 0, 0, 1)}


def test_samples_are_the_successes_that_have_features(tmp_path):
    with KernelDatabase(tmp_path / "k.sqlite") as held:
        held.put("a/01", "t", "1", secs(1.0))
        held.put("a/11", "t", "1", secs(2.0))
        held.put("b/1", "t", "1", BAD)
        held.put("c", "t", "1", secs(3.0))
        held.put("d", "t", "1", secs(4.0))
        held.put("a/01", "other", "1", secs(9.0))
        held.put("e", "t", "1", secs(5.0, slowdown=1.5))
        for key in "abce":
            held.describe(key, "t", "1", "add", {"flops": 1.0})
        assert [(key, cold, run) for key, _, cold, run in held.samples("t", "1")] == [
            ("a", "01", 1.0), ("a", "11", 2.0), ("c", "", 3.0),
        ]  # fmt: skip
        assert held.sample_count("t", "1") == 3


def test_what_a_disturbed_machine_measured_can_be_forgotten(tmp_path):
    ours = database(tmp_path / "k.sqlite", {"a": secs(1.0, slowdown=1.01), "b": secs(1.0, slowdown=1.5), "c": BAD})
    assert command("forget", "--database", ours).stdout == "1 measurements dropped\n"
    with KernelDatabase(ours) as held:
        assert [key for (key,) in held.rows(["kernel"])] == ["a", "c"]
    assert command("forget", "--errors", "--database", ours).stdout == "1 measurements dropped\n"
    with KernelDatabase(ours) as held:
        assert [key for (key,) in held.rows(["kernel"])] == ["a"]


def test_what_is_reckoned_to_a_disturbed_reference_is_forgotten_with_it(tmp_path):
    slow, well = secs(1.0, slowdown=1.5), secs(1.0, slowdown=1.0)
    ours = database(tmp_path / "k.sqlite", {REFERENCE_KEY: slow, LAUNCH_KEY: well, "a": well, "failed": BAD})
    database(ours, {REFERENCE_KEY: well, LAUNCH_KEY: slow, "a": well}, target="another")
    with KernelDatabase(ours) as held:
        assert held.forget_disturbed() == 3
        left = [("a", "another"), ("failed", "t"), (LAUNCH_KEY, "t"), (REFERENCE_KEY, "another")]
        assert held.rows(["kernel", "target"]) == left


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_command("rlflow_tvm.cost", list(map(str, arguments)), os.environ, 120.0)


def test_the_command(tmp_path):
    ours = database(tmp_path / "ours.sqlite", {"a": GOOD, "b": BAD})
    other = database(tmp_path / "other.sqlite", {"c": GOOD})
    merged = command("merge", other, "--database", ours)
    assert (merged.returncode, merged.stdout) == (0, f"{other}: 1 added, 0 replaced, 0 passed over\n")
    shown = command("stats", "--database", ours, "--json", tmp_path / "stats.json")
    assert shown.returncode == 0
    assert "version 1: 3 measured (0 twice, 1 failed, 0 on a disturbed machine), 0 tuned" in shown.stdout
    assert json.loads((tmp_path / "stats.json").read_text())["holdings"][0]["measured"] == 3
    assert command("export", tmp_path / "k.csv", "--database", ours).returncode == 0
    with (tmp_path / "k.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["kernel"], row["run_secs"]) for row in rows] == [("a", "0.00025"), ("b", ""), ("c", "0.00025")]
    for wrong, code, words in (
        (("merge", ours, "--database", ours), 2, "is the database that is merged into"),
        (("merge", tmp_path / "no.sqlite", "--database", ours), 1, "no.sqlite cannot be merged (no such file)"),
        (("stats", "--database", tmp_path / "no.sqlite"), 1, "no.sqlite: no such kernel database"),
    ):
        failed = command(*wrong)
        assert (failed.returncode, failed.stderr.count("\n")) == (code, 1), failed.stderr
        assert words in failed.stderr
    new = tmp_path / "new" / "k.sqlite"
    assert command("merge", other, tmp_path / "no.sqlite", "--database", new).returncode == 1
    assert not new.parent.exists()
