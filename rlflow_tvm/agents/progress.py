"""The log of a training: one JSON line an update, and the same numbers for TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rlflow_tvm.errors import AgentError
from rlflow_tvm.jsonl import append_line, keep_lines

FILE_NAME = "progress.jsonl"


class ProgressLog:
    """Appends to `progress.jsonl` and to TensorBoard's event files; a context manager.

    Args:
        folder: an existing folder.
        kept_updates: lines of later updates are dropped: they came after the checkpoint that is resumed from and will
            be written again. A line cut in half by a kill is dropped with them.
        env_steps: as the last of the kept lines tells them.
        by: what TensorBoard's curves run over, `env_steps` or, where these stand still in much of a training, `update`.
    """

    def __init__(self, folder: Path, kept_updates: int, env_steps: int, by: str = "env_steps") -> None:
        self.path, self._by = folder / FILE_NAME, by
        keep_lines(self.path, lambda line: bool(line.get("update", math.inf) <= kept_updates))
        with self._writing_events():
            kept = env_steps if by == "env_steps" else kept_updates
            self._events = SummaryWriter(str(folder), purge_step=kept + 1)  # later ones come again

    def write(self, line: dict[str, Any]) -> None:
        """One update's numbers; on disk when this returns."""
        append_line(self.path, line)
        with self._writing_events():
            for name, value in line.items():
                if value is not None:
                    self._events.add_scalar(name, value, line[self._by])

    @contextmanager
    def _writing_events(self) -> Iterator[None]:
        """AgentError where that cannot be: TensorBoard tells it at the next call, whichever that is."""
        try:
            yield
        except OSError as error:
            raise AgentError(
                f"{self.path.parent}: TensorBoard cannot write its events ({error.strerror}); free space, then resume"
            ) from error

    def __enter__(self) -> ProgressLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with nullcontext() if error is None else suppress(AgentError), self._writing_events():
            self._events.close()
