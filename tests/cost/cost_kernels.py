"""Small kernels to measure, and schedule functions that the worker imports by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.script import tirx as T

SCHEDULE = "cost_kernels:unscheduled"


@dataclass(frozen=True)
class FakeKernel:
    """What the timer needs of a kernel."""

    func: tirx.PrimFunc
    key: str
    cold: str = ""
    name: str = "fake"


def unscheduled(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """Leave `func` as it is."""
    del target
    return func


def refuse(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """A schedule that cannot."""
    raise ValueError(f"no schedule for {len(func.params)} parameters on {target.kind.name}")


def add(*shape: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Elementwise a + b."""
    a = te.placeholder(shape, dtype, name="a")
    b = te.placeholder(shape, dtype, name="b")
    return te.create_prim_func([a, b, te.compute(shape, lambda *i: a(*i) + b(*i), name="c")])


def matmul(n: int, k: int, m: int) -> tirx.PrimFunc:
    """(n, k) @ (k, m)."""
    a = te.placeholder((n, k), name="a")
    b = te.placeholder((k, m), name="b")
    j = te.reduce_axis((0, k), name="j")
    return te.create_prim_func([a, b, te.compute((n, m), lambda x, y: te.sum(a[x, j] * b[j, y], axis=j), name="c")])


def quotient(divide, *shape: int, dtype: str = "int64") -> tirx.PrimFunc:
    """divide(a, b), integers, of a matrix and what is of `shape`: one element or a row."""
    a = te.placeholder((3, 4), "int64", name="a")
    b = te.placeholder(shape, dtype, name="b")
    row = te.compute(shape, lambda j: b[j].astype("int64"), name="row")
    made = te.compute((3, 4), lambda i, j: divide(a[i, j], row[j] if shape[0] > 1 else row[0]), name="c")
    return te.create_prim_func([a, b, made])


def gather(rows: int, width: int, picks: int) -> tirx.PrimFunc:
    """table[index]."""
    table = te.placeholder((rows, width), name="table")
    index = te.placeholder((picks,), "int64", name="index")
    return te.create_prim_func([table, index, te.compute((picks, width), lambda i, j: table[index[i], j], name="out")])


@T.prim_func(s_tir=True)
def endless(a: T.Buffer((1,), "float32")):
    """2^62 dependent steps."""
    T.func_attr({"tirx.noalias": True})
    for i in range(T.int64(4611686018427387904)):
        with T.sblock("step"):
            vi = T.axis.opaque(T.int64(4611686018427387904), i)
            T.reads(a[0])
            T.writes(a[0])
            a[0] = T.sin(a[0]) + T.Cast("float32", vi)


def far_read() -> tirx.PrimFunc:
    """Reads far beyond its input."""
    a = te.placeholder((4,), "float32", name="a")
    far = tirx.const(1 << 44, "int64")
    return te.create_prim_func([a, te.compute((4,), lambda i: a[far + i], name="b")])


def show_environment(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """Tells, as an error, what the worker's environment is."""
    import os
    import sys

    del func, target
    threads = " ".join(f"{name}={os.environ[name]}" for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"))
    raise ValueError(f"{threads} torch={sys.modules['torch']}")


def kill(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """The worker is killed from outside while it works."""
    import os
    import signal

    del target
    os.kill(os.getpid(), signal.SIGKILL)
    return func


def hang_once(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """Takes too long, but only the first time (the file named by COST_TEST_MARK tells)."""
    import os
    import time
    from pathlib import Path

    del target
    mark = Path(os.environ["COST_TEST_MARK"])
    if not mark.exists():
        mark.touch()
        time.sleep(60)
    return func


USED: list[str] = []


def abort_later(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """A worker that has scheduled another kernel before dies."""
    import os

    del target
    if USED:
        os.abort()
    USED.append("once")
    return func


def two_layers(weight: float = 1.0, width: int = 16) -> tvm.IRModule:
    """relu(relu(x @ w) @ w): one kernel, launched twice; the weight is a constant."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, width), "float32"))
    w = relax.const(np.full((width, width), weight, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, w))))
            out = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.matmul(y, w))))
        builder.emit_func_output(out)
    return builder.get()
