"""What launching a kernel costs, whatever it computes: in the Relax VM, and on a GPU where launches wait in a queue."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax, s_tir, te

from rlflow_tvm.cost.place import Place
from rlflow_tvm.kernels.pipeline import CUDA_GRAPH

_SHORT = 16
_LONG = 272
_CALLS = 10
_REPEATS = 15


def launch_timer(target: tvm.target.Target, place: Place) -> Callable[[], list[float]]:
    """Builds what gives, when called, seconds of one launch, one sample per repetition.

    Chains of `_SHORT` and `_LONG` kernels of 16 additions each run in the VM in turn; the difference of their times
    over that of their lengths is a launch with the allocation of its output, free of the VM's fixed cost. On a GPU the
    chains are replayed as CUDA graphs, as the package's pipeline has it.
    """
    device = place.device
    chains = {length: relax.VirtualMachine(place.load(_chain(length, target)), device) for length in (_SHORT, _LONG)}
    start = tvm.runtime.tensor(np.zeros(16, "float32"), device)

    def sample() -> float:
        secs = {
            length: vm.time_evaluator("main", device, number=_CALLS, repeat=1)(start).mean
            for length, vm in chains.items()
        }
        return (secs[_LONG] - secs[_SHORT]) / (_LONG - _SHORT)

    return lambda: [sample() for _ in range(_REPEATS)]


def idle_secs(target: tvm.target.Target, place: Place, number: int) -> float:
    """Seconds of each of `number` launches of one kernel, one behind the other, that has next to nothing to do."""
    x = te.placeholder((16,), "float32", name="x")
    module = tvm.IRModule({"main": te.create_prim_func([x, _increment(x)]).with_attr("global_symbol", "main")})
    with target:
        module = s_tir.transform.DefaultGPUSchedule()(module)
    built = place.load(tvm.compile(module, target=target))
    operands = [tvm.runtime.tensor(np.zeros(16, "float32"), place.device) for _ in range(2)]
    return float(
        np.median(built.time_evaluator("main", place.device, number=number, repeat=_REPEATS)(*operands).results)
    )


def _chain(length: int, target: tvm.target.Target) -> tvm.runtime.Executable:
    builder = relax.BlockBuilder()
    value = relax.Var("x", relax.TensorType((16,), "float32"))
    params = [value]
    with builder.function("main", params):
        with builder.dataflow():
            for _ in range(length):
                value = builder.emit_te(_increment, value, primfunc_name_hint="increment")
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    mod = builder.get()
    if target.kind.name != "llvm":
        with target:
            mod = s_tir.transform.DefaultGPUSchedule()(mod)
    with tvm.transform.PassContext(config={CUDA_GRAPH: target.kind.name == "cuda"}):
        return tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("default_build"))


def _increment(x: te.Tensor) -> te.Tensor:
    return te.compute(x.shape, lambda i: x[i] + tvm.tirx.const(1, "float32"), name="increment")
