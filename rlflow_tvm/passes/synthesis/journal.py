"""The decisions of a search for rules on file, so that one that was stopped goes on where it was."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.synthesis.decide import Found
from rlflow_tvm.passes.verify import Proof


@dataclass
class Journal:
    """Decisions in a file, a line each, of one search, whose settings come first; a line that was cut short is not
    read."""

    path: Path | None
    settings: dict[str, Any]
    _known: dict[str, list[Found]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        try:
            text = self.path.read_text(errors="replace") if self.path.exists() else ""
        except OSError as error:
            raise RewriteError(
                f"{self.path}: cannot be read ({error.strerror}); remove it, or name another --out"
            ) from None
        told = False
        for entry in filter(None, map(_read, text.splitlines())):
            if isinstance(theirs := entry.get("settings"), dict):
                self._check(theirs)
                told = True
            elif told and (decision := _decision(entry)) is not None:  # before them: of nobody knows which search
                self._known[decision[0]] = decision[1]
        if text and not text.endswith("\n"):  # cut short, and what is written next is a line of its own
            self._append("\n")
        if not told:
            self._write({"settings": self.settings})

    def _check(self, theirs: dict[str, Any]) -> None:
        if theirs == self.settings:
            return
        other = ", ".join(f"{name} {theirs.get(name)}" for name, ours in self.settings.items()
                          if theirs.get(name) != ours)  # fmt: skip
        raise RewriteError(f"{self.path}: is of another search ({other}); remove it, or name another --out")

    def has(self, key: str) -> bool:
        """Whether a decision on the group is known."""
        return key in self._known

    def get(self, key: str) -> list[Found]:
        """The rules that were found in the group; none if it holds none that can be proved."""
        return self._known[key]

    def put(self, key: str, found: list[Found]) -> None:
        """Write a decision down, unless it stands there."""
        if key not in self._known:
            self._known[key] = found
            self._write({"group": key, "found": [one.to_json() for one in found]})

    def _write(self, entry: dict[str, Any]) -> None:
        self._append(json.dumps(entry) + "\n")

    def _append(self, text: str) -> None:
        if self.path is not None:
            try:
                with self.path.open("a") as file:
                    file.write(text)
            except OSError as error:
                raise RewriteError(
                    f"{self.path}: cannot be written ({error.strerror}); free or unlock its disk"
                ) from None


def _read(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _decision(entry: dict[str, Any]) -> tuple[str, list[Found]] | None:
    """The group and what was found in it; None for what is no such entry."""
    try:
        found = [Found(RewriteRule.from_json(one["rule"]), Proof.from_json(one["proof"])) for one in entry["found"]]
    except (AttributeError, KeyError, RewriteError, TypeError):
        return None
    return (entry["group"], found) if isinstance(entry.get("group"), str) else None
