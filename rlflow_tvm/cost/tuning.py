"""Tuning on request: MetaSchedule looks for schedules of the heaviest kernels, the schedule rules' own being the bar.

Where one is found that measures faster, `TunedSchedules` uses it. What tuning came to is kept in the kernel database;
every schedule tried is kept in MetaSchedule's own beside it, so that asking for more trials goes on with those.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import logging
import os
import statistics
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import tvm
from tvm.s_tir import meta_schedule as ms

from rlflow_tvm.cost.database import KernelDatabase, TunedRow
from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.scratch import scratch_folder
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.cost.tuned import pays
from rlflow_tvm.cost.tuning_measure import Candidates
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import Kernel
from rlflow_tvm.kernels.tuned import apply_trace, tunable, workload
from rlflow_tvm.processors import usable_processors

log = logging.getLogger("rlflow_tvm")

LEAST_TRIALS = 16
"""For one kernel: below it MetaSchedule's search has hardly begun."""
_HEAVY_SHARE = 0.9  # of the time, which the kernels to be tuned take together
_POPULATION = (
    128  # schedules of which each step of the search takes the most promising; TVM's 512 take four times as long
)
_BATCH = 16  # candidates between two steps of the search
_TURNS = 3  # measurements of either schedule when the two are held against each other
_DIFFERENCE = 1e-4  # of an output's range, by which the two may differ
_LOGGER = "tvm.s_tir.meta_schedule"
_INTRINSICS = "tvm.s_tir.tensor_intrin"
_OF_PROCESSORS = ("x86", "arm_cpu", "riscv_cpu")

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Tuned:
    """A kernel and what tuning it came to (now or in an earlier run)."""

    kernel: Kernel
    row: TunedRow

    @property
    def used(self) -> bool:
        """Whether the tuned schedule takes the place of the schedule rules' own."""
        return pays(self.row)


def tune(
    kernels: Sequence[Kernel],
    timer: KernelTimer,
    trials: int,
    seed: int = 0,
    on_progress: Progress | None = None,
    on_tuned: Callable[[Tuned], None] | None = None,
) -> list[Tuned]:
    """Give the heaviest of `kernels` about `trials` trials together, and say what came of each, the heaviest first.

    Kernels that have had as many trials already are not tuned again. `on_progress(done, total, kernel)` counts trials,
    `on_tuned` is told of each kernel as soon as it is done with.
    CostError for a timer without a database, or where nothing can be measured at all.
    """
    database = timer.database
    if database is None:
        raise CostError("tuned schedules are kept in a kernel database: give the timer one")
    shares = _shares(kernels, timer, trials)
    done, total = 0, sum(shares.values())
    results = []
    # one schedule serves a kernel however warm its operands are; tried with those of its first launch
    first = {kernel.key: kernel for kernel in reversed(kernels) if kernel.key in shares}
    with ExitStack() as stack:
        folder: Path | None = None
        for kernel in reversed(first.values()):
            wanted = shares[kernel.key]
            row = database.get_tuned(kernel.key, timer.target_key, timer.version)
            if row is None or row.trials < wanted:

                def on_trial(count: int, before: int = done, name: str = kernel.name) -> None:
                    if on_progress is not None:
                        on_progress(before + count, total, name)

                # until the last: another process that begins between two kernels would stop this one
                folder = folder or stack.enter_context(_folder(database, timer))
                found = _tune(kernel, timer, folder, wanted, seed, on_trial)
                if found is not None:
                    row = _better(row, found)
                    database.put_tuned(kernel.key, timer.target_key, timer.version, row)
            done += wanted
            results.append(Tuned(kernel, row or TunedRow(None, None, None, wanted)))
            if on_tuned is not None:
                on_tuned(results[-1])
    return sorted(results, key=lambda tuned: -shares[tuned.kernel.key])


def _better(earlier: TunedRow | None, found: TunedRow) -> TunedRow:
    """What is to be kept: a schedule that gained more before stays, another machine's among them, or one whose records
    are gone; but not against a later measurement of the same."""
    if earlier is None or earlier.trace is None or found.trace == earlier.trace or _gain(found) > _gain(earlier):
        return found
    return replace(earlier, trials=found.trials)


def _gain(row: TunedRow) -> float:
    return row.rule_secs / row.run_secs if row.run_secs and row.rule_secs else 0.0


def _shares(kernels: Sequence[Kernel], timer: KernelTimer, trials: int) -> dict[str, int]:
    """Trials for each of the heaviest kernels, in proportion to the time that the graph spends in it."""
    secs: dict[str, float] = {}
    for kernel, measured in zip(kernels, timer.measure(kernels), strict=True):
        if measured.run_secs is not None and tunable(kernel.func):
            secs[kernel.key] = secs.get(kernel.key, 0.0) + kernel.count * measured.run_secs
    chosen: list[str] = []
    for key in sorted(secs, key=lambda key: (-secs[key], key)):
        heavy = sum(secs[k] for k in chosen) >= _HEAVY_SHARE * sum(secs.values())
        if chosen and (heavy or (len(chosen) + 1) * LEAST_TRIALS > trials):
            break
        chosen.append(key)
    together = sum(secs[key] for key in chosen)
    return {key: max(LEAST_TRIALS, round(trials * secs[key] / together)) for key in chosen}


def _tune(
    kernel: Kernel, timer: KernelTimer, folder: Path, trials: int, seed: int, on_trial: Callable[[int], None]
) -> TunedRow | None:
    """What tuning came to, `folder` being that of MetaSchedule's database; None as in `_settle`."""
    with _quiet():
        records = ms.database.JSONDatabase(work_dir=str(folder))
        module = workload(kernel.func, timer.target)
        tried = _tried(records, module)
        count = tried

        def note(_measurement: Measurement) -> None:
            nonlocal count
            count += 1
            on_trial(count)

        candidates = Candidates(timer, kernel.cold, note)
        with _intrinsics_of(timer.target):
            context = ms.TuneContext(
                mod=module,
                target=timer.target,
                space_generator="post-order-apply",
                search_strategy=ms.search_strategy.EvolutionarySearch(population_size=_POPULATION),
                task_name=kernel.key,
                # another start after each earlier run, or the same first candidates would be tried again
                rand_state=1 + (seed * 1_000_003 + tried) % (2**30),
                num_threads=usable_processors(),
                logger=logging.getLogger(_LOGGER),
            )
        if tried < trials:
            ms.tune.tune_tasks(
                tasks=[context],
                task_weights=[1.0],
                work_dir=str(folder),
                max_trials_global=trials - tried,
                num_trials_per_iter=_BATCH,
                builder=candidates.builder,
                runner=candidates.runner,
                database=records,
                cost_model=ms.cost_model.XGBModel(num_tuning_cores=usable_processors(), num_warmup_samples=_BATCH),
                measure_callbacks=[ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel()],
                task_scheduler="round-robin",
            )
        best = records.query_schedule(module, timer.target, kernel.key)
    return TunedRow(None, None, None, trials) if best is None else _settle(kernel, timer, best, trials)


@contextmanager
def _intrinsics_of(target: tvm.target.Target) -> Iterator[None]:
    """For a processor those of processors alone, in place of the module of all intrinsics, which `TuneContext` imports:
    parsing them takes a minute, nearly all of it those of GPUs and DSPs. Whoever imports that later gets all."""
    if target.kind.name != "llvm" or _INTRINSICS in sys.modules:
        yield
        return
    package = types.ModuleType(_INTRINSICS)
    package.__path__ = [str(Path(tvm.s_tir.__file__).with_name("tensor_intrin"))]
    sys.modules[_INTRINSICS] = package
    try:
        for name in _OF_PROCESSORS:
            importlib.import_module(f"{_INTRINSICS}.{name}")
        yield
    finally:
        del sys.modules[_INTRINSICS]


def _settle(kernel: Kernel, timer: KernelTimer, best: tvm.s_tir.Schedule, trials: int) -> TunedRow | None:
    """The best schedule against the schedule rules' own: equal results, and both measured in turns.

    The time under which it was found is the best of many, and so by its luck better than it is. None where one of the
    two, both of which ran before, fails now: that is no reason to give up an earlier schedule, or never to try again.
    """
    trace = best.trace.as_json()
    replayed = apply_trace(kernel.func, timer.target, trace)
    difference = timer.difference(kernel.func, replayed)
    if difference is not None and difference > _DIFFERENCE:
        return TunedRow(None, None, None, trials)
    own, tuned = [], []
    for _ in range(_TURNS if difference is not None else 0):
        own.append(timer.time(kernel.func, cold=kernel.cold))
        tuned.append(timer.time(replayed, cold=kernel.cold))
    run_secs, rule_secs = _median(tuned), _median(own)
    if run_secs is None or rule_secs is None:
        log.warning("%s: what was found for it cannot be held against its own schedule now: tune again", kernel.name)
        return None
    return TunedRow(json.dumps(trace, default=_plain), run_secs, rule_secs, trials)


def _plain(value: object) -> int | float:
    """A constant of TVM's as JSON has it."""
    if isinstance(value, tvm.tirx.IntImm):
        return int(value)
    if isinstance(value, tvm.tirx.FloatImm):
        return float(value)
    raise TypeError(f"{value!r} ({type(value).__name__}) in a schedule's trace")


def _median(measured: list[Measurement]) -> float | None:
    secs = [each.run_secs for each in measured if each.run_secs is not None]
    return statistics.median(secs) if secs else None


def _tried(records: ms.Database, module: tvm.IRModule) -> int:
    """Schedules of `module` that are on record, those that failed among them."""
    if not records.has_workload(module):
        return 0
    found = records.commit_workload(module)
    return sum(found.same_as(record.workload) for record in records.get_all_tuning_records())


@contextmanager
def _folder(database: KernelDatabase, timer: KernelTimer) -> Iterator[Path]:
    """The folder of MetaSchedule's database for this target and version; a passing one beside one that lives in memory.

    A line that a killed process left half-written is taken off first. CostError while another process has the folder.
    """
    if database.path == ":memory:":
        with scratch_folder() as name:
            yield Path(name)
        return
    about = f"{timer.target_key}\n{timer.version}"
    folder = Path(database.path).parent / "tuning" / hashlib.sha256(about.encode()).hexdigest()[:16]
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "about.txt").write_text(about + "\n")
            lock = stack.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.glob("database_*.json"):
                whole = path.read_bytes().rfind(b"\n") + 1
                if whole < path.stat().st_size:
                    os.truncate(path, whole)  # not written anew: nothing else of it can be lost
        except BlockingIOError as error:
            raise CostError(f"{folder}: another process is tuning with this database: wait for it to end") from error
        except OSError as error:
            raise CostError(f"{folder}: cannot be written ({error.strerror}): free or unlock its disk") from error
        yield folder


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep MetaSchedule's own reports, a page for each batch, off the screen."""
    logger = logging.getLogger(_LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
