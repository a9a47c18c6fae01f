"""What a graph costs: the sum of its kernels' times and of what launching them takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import tvm
import tvm_ffi

from rlflow_tvm.cost.choices import MeasuredChoice
from rlflow_tvm.cost.database import KernelDatabase, default_path
from rlflow_tvm.cost.end_to_end import measure_module
from rlflow_tvm.cost.estimator import MEASURED, KernelEstimator, PredictionPolicy
from rlflow_tvm.cost.known_times import known_as
from rlflow_tvm.cost.learned import Prediction
from rlflow_tvm.cost.measurement import Measurement
from rlflow_tvm.cost.metrics import kernel_bytes, kernel_flops
from rlflow_tvm.cost.rehearsal import Rehearsal
from rlflow_tvm.cost.rpc import RpcDevices
from rlflow_tvm.cost.temperature import Temperatures
from rlflow_tvm.cost.timer import KernelTimer
from rlflow_tvm.cost.tuned import TunedSchedules
from rlflow_tvm.dataflow import Dataflow
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import BY_SHAPE, Choices, Kernel, Lowering, as_target


@dataclass(frozen=True)
class GraphCost:
    """The cost of one run of a graph, lower is better.

    `run_secs`: seconds, `launch_secs` included; infinite when a kernel could not be measured (`failed` names those).
    `launch_secs`: what launching takes beside the kernels' own times. `kernels`: number of launches.
    `flops`: floating-point operations. `bytes_moved`: the kernels' inputs and outputs, each element once.
    `peak_bytes`: of inputs, outputs and intermediates, by TVM's own memory plan; weights are not counted.
    `predicted`: launches of which the time was not measured; `deviation_secs`: by how much those may be wrong together
    (the sum of their standard deviations). `single`: launches whose time was measured once and is not confirmed (see
    `Measurement`). Work on weights alone is done once at compile time and is in none of these.
    """

    run_secs: float
    launch_secs: float
    kernels: int
    flops: int
    bytes_moved: int
    peak_bytes: int
    failed: tuple[str, ...] = ()
    predicted: int = 0
    deviation_secs: float = 0.0
    single: int = 0

    @property
    def confirmed(self) -> bool:
        """Whether no time in it is predicted, or of one measurement."""
        return not self.predicted and not self.single


class CostModel:
    """Costs of graphs for one target; for a search, which asks for many graphs that share most of their kernels.

    `cost` remembers graphs by structural hash and kernels by key; `database` keeps kernels for the next process. With
    a database, where an operator has several implementations the fastest is measured and taken (`choices`).
    `policy` says how far costs may rest on predictions; by default all is measured.
    Modules are best given in the working form (`rlflow_tvm.ir.detach`): hashing the bound form reads all weights.
    A context manager; `close` ends the measuring worker (the database stays open). Give `timer` to share one: it is
    then not closed here. With `remote` kernels are measured on those machines, which `target` describes. `target` is
    what `rlflow_tvm.kernels.as_target` takes; UsageError where it is not.
    """

    def __init__(
        self,
        target: tvm.target.Target | str | dict,
        database: KernelDatabase | None = None,
        *,
        timer: KernelTimer | None = None,
        policy: PredictionPolicy = MEASURED,
        remote: RpcDevices | None = None,
    ) -> None:
        self.timer = timer if timer is not None else KernelTimer(target, database, remote=remote)
        self.target = target = as_target(target)
        self._owns_timer = timer is None
        self.on_progress: Callable[[int, int], None] | None = None
        """Told (done, total) of a graph's kernels while they are built or measured."""
        self.asked = 0
        """Calls of `cost`."""
        self.misses = 0
        """Calls of `cost` with a graph not seen before."""
        self._measured_before, self._measuring_before = self.timer.measured, self.timer.measuring_secs
        self._estimator = KernelEstimator(self.timer, policy)
        known = self.timer.database is not None
        self.choices = Choices(MeasuredChoice(self.timer), TunedSchedules(self.timer)) if known else BY_SHAPE
        """Build what was priced here with `pipeline(target, choices)`; a tuned schedule only makes it faster."""
        self._lowering = Lowering(target, self.choices.implementation)
        self._temperatures = Temperatures(target)
        # each with what the timer had measured and confirmed by then
        self._graphs: dict[tuple[object, int | None], tuple[GraphCost, int, int]] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._anchors: dict[int | None, Callable[[], Rehearsal]] = {}  # by their reach

    @property
    def measured(self) -> int:
        """Kernels that had to be measured since this object was made."""
        return self.timer.measured - self._measured_before

    @property
    def measuring_secs(self) -> float:
        """Wall time that measuring kernels took since this object was made."""
        return self.timer.measuring_secs - self._measuring_before

    @property
    def revision(self) -> int:
        """Grows when other processes have confirmed times, or measured what failed here."""
        return self.timer.revision

    @property
    def predicted(self) -> int:
        """Predictions used in place of measurements since this object was made."""
        return self._estimator.predicted

    def cost(
        self,
        mod: tvm.IRModule | Dataflow,
        *,
        reach: int | None = None,
        confirmed: bool = False,
    ) -> GraphCost:
        """The cost of `mod`.

        `reach`: how far away weights are, by default as far as this graph itself pushes them. Graphs that are held
        against each other want one and the same, or a few bytes more or less may change the cost of every kernel.
        `confirmed`: no kernel's time is to be predicted, whatever the policy, or that of one measurement; a kernel that
        fails when it is measured again makes `run_secs` infinite, in the answer to such a question only. A graph that
        was chosen among many for its cost wants it: the cheapest of many is also the one of which the clock was kind.

        KernelError for an operator that cannot be lowered, CostError when nothing can be measured at all; a kernel
        that fails is no error but makes `run_secs` infinite.
        """
        self.asked += 1
        key = (mod.structure if isinstance(mod, Dataflow) else tvm_ffi.structural_hash(mod), reach)
        known = self._graphs.get(key)
        if known is None or self._is_stale(*known) or (confirmed and not known[0].confirmed):
            self.misses += known is None
            cost = self._cost(mod, reach, confirmed)
            known = self._graphs[key] = cost, self.timer.measured, self.timer.revision
        if confirmed and known[0].single:
            return replace(known[0], run_secs=math.inf, failed=(*known[0].failed, *self._unconfirmed(mod, reach)))
        return known[0]

    def _is_stale(self, cost: GraphCost, measured: int, revision: int) -> bool:
        """Whether what has been measured since may make it another."""
        again = cost.single or cost.failed
        return bool((cost.predicted and measured != self.timer.measured) or (again and revision != self.timer.revision))

    def kernels(self, mod: tvm.IRModule | Dataflow, reach: int | None = None) -> list[Kernel]:
        """The kernels that `cost` sums up."""
        return self._temperatures.kernels(self._lowering.launches(mod), reach)

    def reach(self, mod: tvm.IRModule | Dataflow) -> int:
        """How far away weights are when `mod` runs again and again (see `temperature`). Graphs that are priced with it
        are held against `mod`, which is their anchor (`KernelTimer.anchor`); of several the last that was asked for."""
        launches = self._lowering.launches(mod)
        reach = self._temperatures.reach(launches)
        self._anchors[reach] = lambda: self._temperatures.rehearsal(launches, reach)
        return reach

    def end_to_end(self, mod: tvm.IRModule) -> float:
        """Seconds of one run of `mod` (bound form) as a whole, built with what was chosen here; median of some rounds,
        in which no process with the same database measures.

        CostError where it cannot be linked or run, or where kernels are measured on other machines: a model as a whole
        runs here only.
        """
        if self.timer.remote is not None:
            raise CostError(
                f"models as a whole are not timed on RPC machines (key {self.timer.remote.key!r}), only kernels are: "
                "measure without --rpc, or price by kernels"
            )
        return measure_module(mod, self.target, choices=self.choices, turn=self.timer.in_turn()).run_secs

    def close(self) -> None:
        """End the measuring worker."""
        if self._owns_timer:
            self.timer.close()

    def __enter__(self) -> CostModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _cost(self, mod: tvm.IRModule | Dataflow, reach: int | None, confirmed: bool) -> GraphCost:
        graph = self._lowering.launches(mod)
        kernels = self._temperatures.kernels(graph, reach)
        launches = sum(kernel.count for kernel in kernels)
        # first: it raises where nothing can be built at all, before that is remembered for good of every kernel
        launch_secs = launches * self.timer.launch_secs() if launches else 0.0
        self.timer.anchor = self._anchors.get(reach)
        found = self._estimator.estimate(
            kernels,
            self.on_progress,
            graph=lambda: self._temperatures.rehearsal(graph, reach),
            confirmed=confirmed,
        )
        predictions = [(k.count, p) for k, p in zip(kernels, found, strict=True) if isinstance(p, Prediction)]
        failed = tuple(
            self._failure(k, m) for k, m in zip(kernels, found, strict=True) if isinstance(m, Measurement) and not m.ok
        )
        counts = [self._count(kernel) for kernel in kernels]
        return GraphCost(
            run_secs=math.inf if failed else launch_secs + _total(kernels, found),
            launch_secs=launch_secs,
            kernels=launches,
            flops=sum(k.count * flops for k, (flops, _) in zip(kernels, counts, strict=True)),
            bytes_moved=sum(k.count * moved for k, (_, moved) in zip(kernels, counts, strict=True)),
            peak_bytes=self._temperatures.peak_bytes(graph),
            failed=failed,
            predicted=sum(count for count, _ in predictions),
            deviation_secs=sum(count * p.run_secs * p.deviation for count, p in predictions),
            single=sum(k.count for k, m in zip(kernels, found, strict=True) if isinstance(m, Measurement) and m.single),
        )

    def _failure(self, kernel: Kernel, measurement: Measurement) -> str:
        text = f"{kernel.name} ({kernel.key}): {measurement.error_kind}: {measurement.error}"
        database = self.timer.database
        if database is None or database.get(known_as(kernel), self.timer.target_key, self.timer.graph_version) is None:
            return text
        return f"{text} [kept in {database.path}]"

    def _unconfirmed(self, mod: tvm.IRModule | Dataflow, reach: int | None) -> list[str]:
        """What to say of the kernels of `mod` that were measured once, and failed the second time."""
        times = [(kernel, self.timer.lookup(kernel, in_graph=True)) for kernel in self.kernels(mod, reach)]
        return [
            f"{kernel.name} ({kernel.key}): it failed when it was measured again"
            for kernel, known in times
            if known is not None and known.single
        ]

    def _count(self, kernel: Kernel) -> tuple[int, int]:
        if kernel.key not in self._counts:
            self._counts[kernel.key] = kernel_flops(kernel.func), kernel_bytes(kernel.func)
        return self._counts[kernel.key]


def graph_cost(
    mod: tvm.IRModule, target: tvm.target.Target | str | dict, timer: KernelTimer | None = None
) -> GraphCost:
    """The cost of `mod` (bound or working form) on `target`; without `timer` with the default database.

    For many graphs hold a `CostModel`. Errors as in `CostModel` and its `cost`, CostError for an unusable database.
    """
    if timer is not None:
        return CostModel(target, timer=timer).cost(mod)
    with KernelDatabase(default_path()) as database, CostModel(target, database) as model:
        return model.cost(mod)


def _total(kernels: list[Kernel], found: list[Measurement | Prediction]) -> float:
    return sum(k.count * m.run_secs for k, m in zip(kernels, found, strict=True) if m.run_secs is not None)
