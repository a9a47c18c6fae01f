"""The fenced blocks of a document, and a folder in which they are run as a reader would run them.

A ```console block holds commands, each behind `$ `, with what they print on standard output below. A ```python block
is run in the one interpreter of the document, and a ```text block behind it is what it prints: there `...` before a
space or the end of a line is a number. A comment before a block says more: `file: NAME` (it is saved, not run),
`installs: NAME` (it downloads).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"

_FENCE = re.compile(r"^```(\w*)$")
_COMMENT = re.compile(r"^<!-- (.*) -->$")
_NUMBER = r"\d+(?:\.\d+)?"

_INTERPRETER = """
import contextlib, io, json, sys
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    name, source = json.loads(line)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec"), namespace)
    print(json.dumps(printed.getvalue()), flush=True)
"""
"""Reads (name, source) from each line, and answers what the block printed; an error ends it, with its traceback."""

_TVM_ALONE = """
import runpy, sys
known = {*sys.stdlib_module_names, "__main__", "tvm", "tvm_ffi", "numpy", "ml_dtypes", "typing_extensions"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in known and not name.startswith("_sysconfigdata_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as in an environment into which pip has put apache-tvm and numpy, and nothing else."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the comment before it, and the line of the document it begins at."""

    language: str
    text: str
    comment: str
    line: int

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command of a console block, with what is said to be printed by it."""
        found: list[tuple[str, str]] = []
        for line in self.text.splitlines(keepends=True):
            if line.startswith("$ "):
                found.append((line[2:].rstrip("\n"), ""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + line)
        return found


def blocks(document: str) -> Iterator[Block]:
    """The fenced blocks of a document's text, in order."""
    lines = iter(enumerate(document.splitlines(), start=1))
    before = ""
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            before = line
            continue
        text = []
        for _, inner in lines:
            if inner == "```":
                break
            text.append(f"{inner}\n")
        else:
            raise ValueError(f"the block in line {number} is not closed")
        comment = _COMMENT.match(before)
        yield Block(fence[1], "".join(text), "" if comment is None else comment[1], number)
        before = ""


def differences(stated: str, printed: str) -> str:
    """How what a document states differs from what was printed; empty where it does not."""
    expected = _NUMBER.join(map(re.escape, re.split(r"\.\.\.(?=\s)", stated)))
    return "" if re.fullmatch(expected, printed) else f"the document states:\n{stated}printed was:\n{printed}"


class Reader:
    """Follows a document in `folder`: saves its files, types its commands, runs its Python.

    `fresh/bin/python` is an imitation there until the document's own commands make that environment. A context
    manager; AssertionError where something fails or prints what is not stated.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.blocks = list(blocks((DOCS / name).read_text()))
        self._interpreter: subprocess.Popen[str] | None = None
        python = shlex.quote(sys.executable)
        for command in ("python", "python3.11"):
            _script(folder / "bin" / command, f'exec {python} "$@"')
        (folder / "tvm_alone.py").write_text(_TVM_ALONE)
        _script(folder / "fresh" / "bin" / "python", f'exec {python} -I {folder / "tvm_alone.py"} "$@"')

    def follow(self) -> int:
        """Do all that does not need a package index, in order; says how many blocks that were."""
        done = 0
        for number, block in enumerate(self.blocks):
            if block.comment.startswith("installs: "):
                continue
            done += 1
            if block.comment.startswith("file: "):
                (self.folder / block.comment.removeprefix("file: ")).write_text(block.text)
            elif block.language == "console":
                self.type(block)
            elif block.language == "python":
                following = self.blocks[number + 1] if number + 1 < len(self.blocks) else None
                stated = following if following is not None and following.language == "text" else None
                printed = self._run(block)
                if stated is None:
                    assert not printed, f"{self.name}, line {block.line}: prints what is not stated:\n{printed}"
                else:
                    self._check(stated, stated.text, printed)
            else:
                assert block.language == "text", f"{self.name}, line {block.line}: a block of no kind that is run"
        return done

    def type(self, block: Block, timeout: float = 600.0) -> None:
        """Type the commands of a console block."""
        for command, stated in block.commands:
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=self.folder,
                env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "120"},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            assert done.returncode == 0, f"{self.name}, line {block.line}: {command}\n{done.stdout}{done.stderr}"
            self._check(block, stated, done.stdout)

    def _check(self, block: Block, stated: str, printed: str) -> None:
        differ = differences(stated, printed)
        assert not differ, f"{self.name}, line {block.line}: {differ}"

    def _run(self, block: Block) -> str:
        if self._interpreter is None:
            self._interpreter = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", _INTERPRETER],
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        stdin, stdout = self._interpreter.stdin, self._interpreter.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([f"{self.name}, block in line {block.line}", block.text]) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, f"{self.name}, line {block.line}: fails, see standard error"
        return str(json.loads(answer))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._interpreter is not None:
            self._interpreter.communicate()


def _script(path: Path, command: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
