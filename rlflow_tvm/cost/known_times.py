"""What kernels take, as far as it is known: in this process's memory, or in the database.

A kernel's first time serves to look at many graphs. Whoever takes the cheapest of them has it measured again, and the
second time stands from then on (`Measurement.confirmed`): of many that were measured once, the cheapest is one of which
the clock was kind. A first time by which nobody can have chosen, as it is asked for with that question, stands at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

import tvm
from tvm import tirx

from rlflow_tvm.cost.calibration import Moment, Told, moment_of, unrest_of
from rlflow_tvm.cost.database import KernelDatabase
from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.errors import CostError


class TimedKernel(Protocol):
    """What a time is kept under: see `rlflow_tvm.kernels.Kernel`."""

    @property
    def key(self) -> str: ...
    @property
    def cold(self) -> str: ...


class MeasurableKernel(TimedKernel, Protocol):
    """What the timer needs of a kernel (`rlflow_tvm.kernels.Kernel` has it, and says what these are)."""

    @property
    def func(self) -> tirx.PrimFunc: ...
    @property
    def name(self) -> str: ...


K = TypeVar("K", bound=TimedKernel)


class KnownTimes:
    """Times of the kernels of one target, by name (`known_as`) and version of what they depend on beside the target."""

    def __init__(self, target_key: str, database: KernelDatabase | None) -> None:
        self.target_key, self.database = target_key, database
        self.revision = 0
        """How often what was known has given way to a better: a time to a confirmed one, a failure to seconds."""
        self._known: dict[tuple[str, str], Measurement] = {}
        self._held: dict[tuple[str, str], Measurement | None] = {}

    def find(self, kernel: TimedKernel, version: str) -> Measurement | None:
        """What is known of a kernel; from the database only once."""
        name = known_as(kernel)
        if (name, version) not in self._known and (stored := self.stored(name, version)) is not None:
            self._known[name, version] = stored
        return self._known.get((name, version))

    def __getitem__(self, of: tuple[TimedKernel, str]) -> Measurement:
        """As `find`, of a kernel that is known."""
        return self._known[known_as(of[0]), of[1]]

    def unknown(self, kernels: Iterable[K], version: str) -> dict[str, K]:
        """Those of which nothing is known, by name."""
        return {known_as(kernel): kernel for kernel in kernels if self.find(kernel, version) is None}

    def single(self, kernels: Iterable[K], version: str) -> dict[str, K]:
        """Those that were measured once, by name."""
        found = {known_as(kernel): (kernel, self.find(kernel, version)) for kernel in kernels}
        return {name: kernel for name, (kernel, known) in found.items() if known is not None and known.single}

    def refresh(self) -> None:
        """Take over what other processes have confirmed since, or could measure where it failed here."""
        if self.database is None or not self.database.changed():
            return
        for (name, version), known in list(self._known.items()):
            if known.confirmed:
                continue
            stored = self.stored(name, version)
            if stored is not None and (stored.ok, stored.confirmed) > (known.ok, known.confirmed):
                self._known[name, version] = stored
                self.revision += 1

    def learn(
        self, name: str, version: str, measurement: Measurement, *, keep: bool = True, stands: bool = False
    ) -> bool:
        """A measurement that was made now: the first, or the second, which stands from then on if it did not fail; the
        first, where the second was disturbed and that was not.

        `keep`: for other processes too; where one of them has stored a better one meanwhile, that one counts. `stands`:
        so does the first, if nothing disturbed it. Says whether it was the first.
        """
        before = self._known.get((name, version))
        if before is None:
            measurement = replace(measurement, confirmed=stands and measurement.ok and not measurement.disturbed)
            self._known[name, version] = self.store(name, version, measurement) if keep else measurement
        elif before.single and measurement.ok:
            better = before if measurement.disturbed and not before.disturbed else measurement
            self._known[name, version] = self.store(name, version, replace(better, confirmed=True))
            self.revision += 1
        return before is None

    def moment(self, version: str, told: Told) -> Moment | None:
        """As `calibration.moment_of`, by what is confirmed here.

        A rehearsal is the second measurement of all its kernels that were measured once: reckoned to what these took at
        first, they would take the same again, whatever they take.
        """
        return moment_of(self._confirmed(version, told), told)

    def unrest(self, version: str, told: Told) -> float:
        """As `calibration.unrest_of`, by what is confirmed here."""
        return unrest_of(self._confirmed(version, told), told)

    def _confirmed(self, version: str, told: Told) -> dict[str, Measurement]:
        before = {name: self._known.get((name, version)) for name in told.secs}
        return {name: each for name, each in before.items() if each is not None and each.confirmed}

    def stored(self, name: str, version: str) -> Measurement | None:
        """What the database holds."""
        return None if self.database is None else self.database.get(name, self.target_key, version)

    def hold(self, name: str, version: str) -> None:
        """See to it that the database holds what it held when this was first asked: what `cost forget` has dropped is
        put back, as others are reckoned to it. CostError where another is in its place."""
        stored = self.stored(name, version)
        before = self._held.setdefault((name, version), stored)
        if before is not None and stored is None:
            stored = self.store(name, version, before)
        if before is not None and stored is not None and stored.run_secs != before.run_secs:
            raise CostError(
                f"the {name} kernel of {self.target_key} was measured anew while this ran (`cost forget`): what is "
                "known here is reckoned to the former one; start it again"
            )

    def store(self, name: str, version: str, measurement: Measurement) -> Measurement:
        """Put it into the database, if there is one; what is held there then (see `KernelDatabase.put`)."""
        if self.database is None:
            return measurement
        self.database.put(name, self.target_key, version, measurement, tvm.__version__)
        return self.stored(name, version) or measurement


def known_as(kernel: TimedKernel) -> str:
    """What a measurement of `kernel` is kept under: its key and its operands' temperatures."""
    return f"{kernel.key}/{kernel.cold}" if kernel.cold else kernel.key
