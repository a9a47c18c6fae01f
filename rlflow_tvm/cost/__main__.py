"""`python -m rlflow_tvm.cost`: look at kernel databases, merge and export them."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rlflow_tvm import cli
from rlflow_tvm.cost.database import KernelDatabase, default_path
from rlflow_tvm.cost.measurement import DISTURBED
from rlflow_tvm.cost.merge import merge
from rlflow_tvm.errors import CostError, UsageError

DatabaseOption = Annotated[
    Path | None, typer.Option("--database", help="A kernel database; by default the one that searches use.")
]
_COLUMNS = ("kernel", "target", "version", "run_secs", "error_kind", "repeats", "spread", "slowdown", "measured_at")


def _existing(path: Path | None) -> Path:
    path = default_path() if path is None else path
    if not path.is_file():
        raise CostError(f"{path}: no such kernel database: run a search first, or name one with --database")
    return path


@cli.reports_errors
def stats(
    database: DatabaseOption = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """What a database holds, by target and version of the kernels; checks its integrity."""
    cli.check_writable(json)
    path = _existing(database)
    with KernelDatabase(path) as opened:
        opened.check()
        holdings = opened.holdings(DISTURBED)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, integrity ok")
    for held in holdings:
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(held.last_at))
        print(
            f"{held.target}\n  version {held.version}: {held.measured} measured ({held.failed} failed, "
            f"{held.disturbed} on a disturbed machine), {held.tuned} tuned, last {last}"
        )
    cli.write_json(json, {"database": str(path), "holdings": [held.__dict__ for held in holdings]})


@cli.reports_errors
def merge_into(
    others: Annotated[list[Path], typer.Argument(help="Kernel databases, of this machine or others.")],
    database: DatabaseOption = None,
) -> None:
    """Take what OTHERS hold into a database: seconds rather than errors, later ones rather than earlier."""
    path = default_path() if database is None else database
    for other in others:
        if path.exists() and other.exists() and other.samefile(path):
            raise UsageError(f"{other}: is the database that is merged into")
    with KernelDatabase(path) as opened:
        for other in others:
            merged = merge(opened, other)
            print(f"{other}: {merged.added} added, {merged.replaced} replaced, {merged.kept} passed over")


@cli.reports_errors
def export(
    out: Annotated[Path | None, typer.Argument(help="A CSV file; standard output if not given.")] = None,
    database: DatabaseOption = None,
) -> None:
    """Write every measurement as a line of CSV."""
    cli.check_writable(out)
    with KernelDatabase(_existing(database)) as opened:
        rows = opened.rows(_COLUMNS)
    if out is None:
        csv.writer(sys.stdout).writerows([_COLUMNS, *rows])
        return
    with cli.written_whole(out) as temporary, temporary.open("w", newline="") as stream:
        csv.writer(stream).writerows([_COLUMNS, *rows])
    print(f"{len(rows)} measurements written to {out}")


if __name__ == "__main__":
    cli.run_group(__doc__ or "", {"stats": stats, "merge": merge_into, "export": export})
