"""What measuring one kernel gives: seconds, or the reason why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ErrorKind = Literal["build", "crash", "timeout", "run"]
DISTURBED = 1.25
"""The slowdown of the machine from which a measurement is repeated, and marked if that does not help: up to here times
that are reckoned to the usual speed (`reference`) vary no more than on a quiet machine."""
ERROR_KINDS: tuple[str, ...] = get_args(ErrorKind)


@dataclass(frozen=True)
class Measurement:
    """Seconds of one run of a kernel (median, at the machine's usual speed: `reference`), or an error; exactly one of
    the two.

    `error_kind` tells the errors apart: "build" (could not be scheduled or compiled), "crash" (the worker process
    died of it), "timeout" (build and runs together took longer than the limit), "run" (raised while running).
    `repeats` is the number of timed runs, `spread` their interquartile range divided by the median. `slowdown`: how
    much longer than usual a reference kernel took beside them (beside a launch or the reference kernel itself: than at
    its best), or how much longer than they had a processor they took, if that is more; None where nothing is known, as
    on a GPU. `confirmed`: the seconds are those of a measurement that nobody chose by, mostly a second one (see
    `known_times`).
    ValueError when the fields contradict one another.
    """

    run_secs: float | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    repeats: int = 0
    spread: float | None = None
    slowdown: float | None = None
    confirmed: bool = False

    def __post_init__(self) -> None:
        if (self.run_secs is None) == (self.error is None):
            raise ValueError(f"a measurement is seconds or an error, got run_secs={self.run_secs} error={self.error!r}")
        if (self.error is None) != (self.error_kind is None):
            raise ValueError(f"error {self.error!r} and error_kind {self.error_kind!r} come together or not at all")
        if self.error_kind is not None and self.error_kind not in ERROR_KINDS:
            raise ValueError(f"error_kind {self.error_kind!r} is none of {', '.join(ERROR_KINDS)}")
        if self.run_secs is not None and not self.run_secs > 0:
            raise ValueError(f"run_secs must be above zero, got {self.run_secs}")

    @property
    def ok(self) -> bool:
        """Whether there are seconds."""
        return self.error is None

    @property
    def single(self) -> bool:
        """Whether there are seconds, but nobody has measured them again."""
        return self.ok and not self.confirmed

    @property
    def disturbed(self) -> bool:
        """Whether something else slowed the machine down meanwhile."""
        return self.slowdown is not None and self.slowdown > DISTURBED
