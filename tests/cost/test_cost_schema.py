"""Databases of earlier schemas, and what is kept of a kernel for each target."""

from __future__ import annotations

import sqlite3

import pytest

from rlflow_tvm.cost import KernelDatabase, Measurement
from rlflow_tvm.cost.database import TunedRow

GOOD = Measurement(run_secs=2.5e-4, repeats=7, spread=0.02)

# as the schemas 3 and 4 had it
KERNEL_TABLE = "CREATE TABLE kernel (kernel TEXT PRIMARY KEY, name TEXT NOT NULL, features TEXT NOT NULL) WITHOUT ROWID"


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_earlier_schema_is_brought_to_the_present_one(tmp_path, version):
    path = tmp_path / "k.sqlite"
    with KernelDatabase(path) as database:
        database.put("k", "t", "1", GOOD)
    with sqlite3.connect(path) as raw:  # as that version left it
        raw.execute("DROP TABLE description")
        if version < 4:
            raw.execute("ALTER TABLE measurement DROP COLUMN confirmed")
        if version > 2:
            raw.execute(KERNEL_TABLE)
        if version < 3:
            raw.execute("ALTER TABLE measurement DROP COLUMN slowdown")
        if version < 2:
            raw.execute("DROP TABLE tuned_schedule")
        raw.execute(f"PRAGMA user_version = {version}")
    raw.close()
    row = TunedRow("[]", 1e-3, 2e-3, 16)
    with KernelDatabase(path) as database:
        assert database.get("k", "t", "1") == GOOD
        assert database.get_tuned("k", "t", "1") is None
        database.put_tuned("k", "t", "1", row)
    with KernelDatabase(path) as database:
        assert database.get_tuned("k", "t", "1") == row
        assert database.get_tuned("k", "t", "2") is None


def test_a_description_of_no_target_is_that_of_the_target_measured_last(tmp_path):
    """So it was in schema 4: a kernel's description took the place of the one for another target."""
    path = tmp_path / "k.sqlite"
    with KernelDatabase(path) as database:
        for key, target, version in (
            ("a/01", "two cores", "1"), ("a/01", "a GPU's", "1"), ("a/11", "two cores", "1"), ("a", "two cores", "1.g"),
            ("b", "a GPU's", "1"), ("ab", "a GPU's", "1"),
        ):  # fmt: skip
            database.put(key, target, version, GOOD)
    with sqlite3.connect(path) as raw:
        raw.execute("DROP TABLE description")
        raw.execute(KERNEL_TABLE)
        raw.executemany("INSERT INTO kernel VALUES (?, 'add', ?)", [("a", '{"flops": 3.0}'), ("b", '{"flops": 4.0}')])
        raw.execute("UPDATE measurement SET measured_at = 2 WHERE kernel = 'a/11'")
        raw.execute("UPDATE measurement SET measured_at = 1 WHERE kernel <> 'a/11'")
        raw.execute("PRAGMA user_version = 4")
    raw.close()
    with KernelDatabase(path) as database:
        of_a = {"flops": 3.0}
        assert database.samples("two cores", "1") == [("a", of_a, "01", 2.5e-4), ("a", of_a, "11", 2.5e-4)]
        assert database.samples("two cores", "1.g") == [("a", of_a, "", 2.5e-4)]
        assert database.samples("a GPU's", "1") == [("b", {"flops": 4.0}, "", 2.5e-4)]


def test_a_kernel_is_described_for_each_target_and_version(tmp_path):
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        for number, (target, version) in enumerate([("t", "1"), ("another", "1"), ("t", "2")]):
            database.put("a/01", target, version, GOOD)
            database.describe("a", target, version, "add", {"schedule:tasks": float(number)})
        for number, (target, version) in enumerate([("t", "1"), ("another", "1"), ("t", "2")]):
            assert database.samples(target, version) == [("a", {"schedule:tasks": float(number)}, "01", 2.5e-4)]
