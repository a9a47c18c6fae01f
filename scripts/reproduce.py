"""All tables and figures of the papers: runs what they are made of, and writes docs/results.md.

    python scripts/reproduce.py --quick
    python scripts/reproduce.py
    python scripts/reproduce.py --list
    python scripts/reproduce.py --quick --only rlflow-table1 xrlflow-cost

--quick takes small models and few steps, some 25 to 30 minutes on two cores: it shows that everything works, and is no
result; its page is runs/quick/results.md. Without it the papers' models are run with five seeds, some 40 hours on two
cores. Steps run one after the other, so that none disturbs another's times; whatever else the machine does meanwhile
does disturb them. Kernel times are kept where they always are ($RLFLOW_TVM_HOME).

What steps leave stays in --out, and a step that was done by the same command is not run again: after an interruption
the same command goes on. A step that fails is told of, and the others are run but for those that need it; the exit code
is then 1. --only names tables: just their steps are run. The page always has every table that there is something to
make of; a single one is made by `scripts/paper.py`. Needs the extras [agents,onnxruntime,plots,zoo].
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paper import TABLES
from papers import results
from papers.page import Page
from papers.steps import FULL, QUICK, Budget, Source, Step, sources_of, steps_of, wanted_steps

from rlflow_tvm.cli import write_json
from rlflow_tvm.errors import UsageError


def record_path(out: Path, name: str) -> Path:
    """Where it is kept that a step was run, and how."""
    return out / "steps" / f"{name}.json"


def record_of(out: Path, name: str) -> dict[str, Any] | None:
    """How a step was run, None where it was not."""
    path = record_path(out, name)
    return json.loads(path.read_text()) if path.exists() else None


def is_done(out: Path, name: str, step: Step) -> bool:
    """Whether the step was run, by this command and after those that it needs: what it leaves is made of theirs."""
    record = record_of(out, name)
    if record is None or record["code"] != 0 or record["words"] != list(step.words):
        return False
    needed = [made["began"] for need in step.needs if (made := record_of(out, need)) is not None]
    return all(began <= record["began"] for began in needed)


def ran(words: Sequence[str]) -> int:
    """The exit code of a script with its arguments; it is ended with this process."""
    process = subprocess.Popen([sys.executable, str(results.ROOT / words[0]), *words[1:]])
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def run_steps(names: Sequence[str], steps: dict[str, Step], out: Path) -> list[str]:
    """Run those of the steps that are not done yet; those that failed, or were not run as one that they need failed:
    what that has left is not whole, and a step made of it would count as done."""
    failed: list[str] = []
    left: list[str] = []
    for name in names:
        if not is_done(out, name, steps[name]) or not set(left).isdisjoint(steps[name].needs):
            left.append(name)
    for name in names:
        if name not in left:
            print(f"{name}: done before", flush=True)
    for number, name in enumerate(left, 1):
        broken = [need for need in steps[name].needs if need in failed]
        if broken:
            failed.append(name)
            print(f"\n{name} is not run: it needs {', '.join(broken)}", flush=True)
            continue
        minutes = sum(steps[each].minutes for each in left[number - 1 :])
        print(
            f"\n{time.strftime('%H:%M:%S')} step {number} of {len(left)}: {name}, about {steps[name].minutes:.0f} "
            f"minutes; {minutes:.0f} for all that are left\n$ {results.shown(steps[name].words)}",
            flush=True,
        )
        began, clock, told = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic(), results.machine()
        code = ran(steps[name].words)
        record = {
            "step": name, "words": list(steps[name].words), "code": code, "began": began,
            "secs": time.monotonic() - clock, **told,
        }  # fmt: skip
        write_json(record_path(out, name), record)
        if code:
            failed.append(name)
            print(f"{name} failed (exit code {code}); those that do not need it go on", flush=True)
    return failed


def section_of(name: str, source: Source, out: Path, figures: Path) -> results.Section:
    """A table and its figure, made of what there is; or why it cannot be made."""
    table = TABLES[name]
    records = [record for step in source.steps if (record := record_of(out, step)) is not None]
    page: Page | None = None
    missing, figure = f"its steps ({', '.join(source.steps)}) were not run", None
    if records:
        try:
            page = table.make(source.paths)
        except UsageError as error:
            missing = str(error)
    words = ["scripts/paper.py", name, *map(str, source.paths)]
    if page is not None and page.draw is not None:
        figures.mkdir(parents=True, exist_ok=True)
        drawn = figures / f"{name}.png"
        try:
            page.draw(drawn)
        except UsageError as error:  # as where the extra [plots] is not installed
            print(f"{table.title}: without its figure: {error}", flush=True)
        else:
            figure = f"{figures.name}/{drawn.name}"
            words += ["--plot", str(drawn)]
    commands = [results.shown(each["words"]) for each in records]
    return results.Section(table.title, page, missing, figure, records, [*commands, results.shown(words)])


def list_tables(sources: dict[str, Source], steps: dict[str, Step]) -> None:
    """What there is, and what it takes."""
    for name in sources:
        needed = wanted_steps([name], sources, steps)
        minutes = sum(steps[step].minutes for step in needed)
        print(f"{name:16} {TABLES[name].title}: {', '.join(needed)} ({minutes:.0f} minutes)")
    print(f"all: {sum(step.minutes for step in steps.values()):.0f} minutes on two cores")


def write_page(budget: Budget, sources: dict[str, Source], out: Path, page: Path) -> bool:
    """The page of all tables; whether each could be made of whose steps something is there."""
    sections = [section_of(name, source, out, page.with_suffix("")) for name, source in sources.items()]
    names = list(dict.fromkeys(step for source in sources.values() for step in source.steps))
    records = [record for name in names if (record := record_of(out, name)) is not None]
    quick = budget is QUICK
    told = f"Budget: {budget.told}."
    remark = "Made by `reproduce.py --quick`, to see that every script works: **no result**." if quick else told
    page.parent.mkdir(parents=True, exist_ok=True)
    results.write(page, records, sections, remark, f"**Quick, no result** ({budget.told})." if quick else "")
    broken = [section for section in sections if section.page is None and section.records]
    for section in broken:
        print(f"{section.title}: not made: {section.missing}", flush=True)
    print(f"{page}: {sum(section.page is not None for section in sections)} of {len(sections)} tables", flush=True)
    return not broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few steps")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), metavar="NAME", help="run only what these need")
    parser.add_argument("--list", action="store_true", help="the tables, their steps and their minutes; run nothing")
    parser.add_argument("--out", type=Path, help="folder of what steps leave (runs/quick or runs/papers)")
    parser.add_argument("--page", type=Path, help="the page to write (docs/results.md, with --quick OUT/results.md)")
    options = parser.parse_args()
    budget = QUICK if options.quick else FULL
    out = options.out or Path("runs") / ("quick" if options.quick else "papers")
    steps, sources = steps_of(budget, out), sources_of(budget, out)
    if options.list:
        list_tables(sources, steps)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (out / "steps").mkdir(parents=True, exist_ok=True)
    failed = run_steps(wanted_steps(options.only or list(sources), sources, steps), steps, out)
    page = options.page or (out if options.quick else Path("docs")) / "results.md"
    whole = write_page(budget, sources, out, page)
    if failed:
        print(f"failed, or not run as what they need failed: {', '.join(failed)}", flush=True)
    return 1 if failed or not whole else 0


if __name__ == "__main__":
    sys.exit(main())
