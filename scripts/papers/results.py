"""The page of all tables that `scripts/reproduce.py` writes, and what a step leaves on its having been run."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from papers.page import Page
from rlflow_tvm.cost.machine import cpu_model
from rlflow_tvm.processors import usable_processors

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("apache-tvm", "onnx", "numpy", "torch", "dgl", "xgboost-cpu", "gymnasium", "onnxruntime"),
    *("transformers", "matplotlib"),
)
Record = Mapping[str, Any]


def machine() -> dict[str, str]:
    """What ran a step: processor and cores, versions, and the state of this repository."""
    threads = os.environ.get("TVM_NUM_THREADS")
    told = (
        f"{usable_processors()} cores" if threads is None else f"{usable_processors()} cores, TVM_NUM_THREADS={threads}"
    )
    return {"machine": f"{cpu_model()}, {told}, {platform.system()}", "versions": versions(), "commit": commit()}


def versions() -> str:
    """Of Python and of the packages that are there."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """Of this repository, and whether anything was changed since; "unknown" where it is none."""
    told = []
    for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        told.append(done.stdout.strip())
    return told[0] if not told[1] else f"{told[0]} and changes"


@dataclass(frozen=True)
class Section:
    """One table of the page: `page`, or why there is none; `records` of its steps, `commands` that made it."""

    title: str
    page: Page | None
    missing: str
    figure: str | None
    records: Sequence[Record]
    commands: Sequence[str]


def shown(words: Sequence[str]) -> str:
    """A command as a user types it."""
    return f"python {shlex.join(words)}"


def heading(records: Sequence[Record], sections: Sequence[Section], remark: str) -> list[str]:
    """What ran everything, and what is missing."""
    lines = ["# Tables and figures of the papers", "", *([remark, ""] if remark else [])]
    for name in ("machine", "versions", "commit"):
        told = list(dict.fromkeys(record[name] for record in records))
        if told:
            lines += [f"- {name}: {'; or '.join(told)}"]
    secs = sum(record["secs"] for record in records)
    lines += [f"- running time: {secs / 60:.0f} minutes, one step after the other", ""]
    missing = [f"- {each.title}: {each.missing}" for each in sections if each.page is None]
    return [*lines, *(["Not made:", "", *missing, ""] if missing else [])]


def section(each: Section, remark: str) -> list[str]:
    """One table, what it says of itself first."""
    assert each.page is not None
    lines = [f"## {each.title}", "", *([remark, ""] if remark else [])]
    failed = [record["step"] for record in each.records if record["code"]]
    if failed:
        lines += [f"**Incomplete**: {', '.join(failed)} failed.", ""]
    lines += [*each.page.lines, ""]
    if each.figure is not None:
        lines += [f"![{each.title}]({each.figure})", ""]
    dates = list(dict.fromkeys(record["began"][:10] for record in each.records))
    where = list(dict.fromkeys(record["machine"] for record in each.records))
    secs = sum(record["secs"] for record in each.records)
    lines += [f"{', '.join(dates)}; {'; or '.join(where)}; {secs:.0f} s:", "", "```", *each.commands, "```", ""]
    return lines


def write(path: Path, records: Sequence[Record], sections: Sequence[Section], remark: str, quick: str) -> None:
    """The page; `quick`: what each table says first."""
    lines = heading(records, sections, remark)
    for each in sections:
        if each.page is not None:
            lines += section(each, quick)
    path.write_text("\n".join(lines).rstrip() + "\n")
