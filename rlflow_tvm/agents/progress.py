"""The log of a training: one JSON line an update, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

FILE_NAME = "progress.jsonl"


class ProgressLog:
    """Appends to `progress.jsonl` and to TensorBoard's event files; a context manager.

    Args:
        folder: an existing folder.
        kept_updates: lines of later updates are dropped: they came after the checkpoint that is resumed from and will
            be written again. A line cut in half by a kill is dropped with them.
        env_steps: where TensorBoard begins to overwrite.
    """

    def __init__(self, folder: Path, kept_updates: int, env_steps: int) -> None:
        self.path = folder / FILE_NAME
        if self.path.exists():
            kept = [line for line in read_progress(self.path) if line["update"] <= kept_updates]
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder), purge_step=env_steps + 1)

    def write(self, line: dict[str, Any]) -> None:
        """One update's numbers; on disk when this returns."""
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        for name, value in line.items():
            if value is not None:
                self._events.add_scalar(name, value, line["env_steps"])

    def __enter__(self) -> ProgressLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._events.close()


def read_progress(path: Path) -> list[dict[str, Any]]:
    """The lines of a `progress.jsonl`; a last line without its newline (a write that was killed) is left out."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]
