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
    """Decisions in a file, a line each, of one search; a line that was cut short is not read."""

    path: Path | None
    settings: dict[str, Any]
    _known: dict[str, list[Found]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        entries = [entry for line in lines if (entry := _read(line)) is not None]
        if entries and entries[0] != {"settings": self.settings}:
            theirs = entries[0].get("settings", {})
            other = ", ".join(f"{name} {theirs.get(name)}" for name, ours in self.settings.items()
                              if theirs.get(name) != ours)  # fmt: skip
            raise RewriteError(f"{self.path}: is of another search ({other}); remove it, or name another --out")
        for entry in entries[1:]:
            self._known[entry["group"]] = [
                Found(RewriteRule.from_json(found["rule"]), Proof(**found["proof"])) for found in entry["found"]
            ]
        if not entries:
            self._write({"settings": self.settings})

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
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def _read(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
