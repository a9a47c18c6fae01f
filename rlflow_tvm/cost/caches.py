"""The caches as a kernel finds them inside a model: its operands were last touched many kernels ago."""

from __future__ import annotations

import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, te

_NAME = "rlflow_tvm.evict"
_BYTES = 64 << 20
"""More than the private caches of a core hold, and what a model touches between two launches of one kernel.

Flushing the operands (`cache_flush_cpu_non_first_arg`) would drop them from the last-level cache too. Where that
holds the model, as it does on servers, BERT-Base then came out twice as slow as it is.
"""


def evict_before_runs(target: tvm.target.Target) -> str:
    """Register, under the name returned, a function that fills the caches of all of TVM's threads with other data.

    It runs on TVM's thread pool, so each core evicts its own caches, and the pool is as awake as inside a model.
    On a GPU nothing is evicted, and "" is the name of no function: its caches hold what the last kernels wrote.
    """
    if target.kind.name != "llvm":
        return ""
    count = _BYTES // 4
    x = te.placeholder((count,), "float32", name="x")
    y = te.compute((count,), lambda i: x[i] + tvm.tirx.const(1, "float32"), name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, y]))
    block = schedule.get_sblock("y")
    outer, inner = schedule.split(schedule.get_loops(block)[0], factors=[None, 16])
    schedule.parallel(outer)
    schedule.vectorize(inner)
    touch = tvm.compile(schedule.mod, target=target).jit()["main"]
    buffers = [tvm.runtime.tensor(np.zeros(count, "float32")) for _ in range(2)]

    def evict(*_operands: object) -> None:
        touch(*buffers)

    tvm_ffi.register_global_func(_NAME, evict, override=True)
    return _NAME
