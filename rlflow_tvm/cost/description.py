"""What the learned cost model is told of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tvm import tirx
from tvm.target import Target

from rlflow_tvm.cost.database import KernelDatabase
from rlflow_tvm.cost.features import kernel_features
from rlflow_tvm.cost.schedule_features import schedule_features
from rlflow_tvm.errors import KernelError, RlflowError
from rlflow_tvm.kernels import schedule_kernel
from rlflow_tvm.kernels.unit_axes import without_unit_axes


class DescribedKernel(Protocol):
    """What a description needs of a kernel (`rlflow_tvm.kernels.Kernel` has it)."""

    @property
    def func(self) -> tirx.PrimFunc: ...
    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...


class Descriptions:
    """Gives each kernel its features, and remembers them; those of its schedule too, with `scheduled`.

    `scheduled` is for kernels that the pipeline's own rules schedule: what a schedule of somebody's own does is for a
    worker to find out, which may die of it.
    """

    def __init__(self, target: Target, scheduled: bool) -> None:
        self._target = target
        self._scheduled = scheduled
        self._found: dict[str, Mapping[str, float]] = {}
        self._stored: set[str] | None = None  # None: not asked yet

    def of(self, kernel: DescribedKernel) -> Mapping[str, float]:
        """The features of `kernel`; KernelError where it cannot be scheduled."""
        if kernel.key not in self._found:
            features = kernel_features(without_unit_axes(kernel.func))
            if self._scheduled:
                features |= schedule_features(self._schedule(kernel.func), self._target)
            self._found[kernel.key] = features
        return self._found[kernel.key]

    def store(
        self, kernels: Sequence[DescribedKernel], database: KernelDatabase, target_key: str, version: str
    ) -> None:
        """See to it that `database`, always the same one, has those of `kernels`, where it can be written."""
        if database.reads_only:
            return
        if self._stored is None:
            self._stored = database.described(target_key, version)
        for kernel in kernels:
            if kernel.key not in self._stored:
                database.describe(kernel.key, target_key, version, kernel.name, self.of(kernel))
                self._stored.add(kernel.key)

    def _schedule(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        try:
            return schedule_kernel(func, self._target)
        except RlflowError:
            raise
        except Exception as error:
            # The boundary to TVM's schedules: they raise whatever fits them, and measuring will record what.
            raise KernelError(f"a kernel cannot be scheduled ({error}): report its operator") from error
