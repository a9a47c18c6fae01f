"""FLOPs, bytes and peak memory against closed forms."""

from __future__ import annotations

import pytest
import tvm
from cost_kernels import add, gather, matmul
from tvm import relax

from rlflow_tvm.cost import kernel_bytes, kernel_flops, peak_bytes
from rlflow_tvm.errors import CostError

F32 = 4


def test_flops():
    assert kernel_flops(matmul(3, 5, 7)) == 2 * 3 * 5 * 7
    assert kernel_flops(add(6, 7)) == 42
    assert kernel_flops(gather(3, 4, 5)) == 0


def test_bytes():
    assert kernel_bytes(matmul(3, 5, 7)) == F32 * (3 * 5 + 5 * 7 + 3 * 7)
    assert kernel_bytes(add(2, 3, dtype="float16")) == 3 * 6 * 2
    assert kernel_bytes(add(dtype="int64")) == 3 * 8
    assert kernel_bytes(add(5, dtype="bool")) == 3 * 5
    assert kernel_bytes(gather(3, 4, 5)) == F32 * 12 + 8 * 5 + F32 * 20


def test_bytes_of_unknown_shape():
    n = tvm.tirx.Var("n", "int64")
    a = tvm.te.placeholder((n,), name="a")
    func = tvm.te.create_prim_func([a, tvm.te.compute((n,), lambda i: a[i] + 1.0)])
    with pytest.raises(CostError, match="unknown extent"):
        kernel_bytes(func)


def graph(body, *shapes: tuple[int, ...], weights: int = 0) -> tvm.IRModule:
    """main(inputs..., weights...) of float32 tensors; the last `weights` shapes are weights'."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", params, attrs={"num_input": len(shapes) - weights}):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, *params))
        builder.emit_func_output(out)
    return builder.get()


N = 100 * F32


def test_peak_of_a_chain():
    # Input throughout, and at each step what is read and what is written.
    mod = graph(lambda e, x: e(relax.op.exp(e(relax.op.exp(e(relax.op.exp(x)))))), (100,))
    assert peak_bytes(mod) == 3 * N


def test_peak_of_one_step():
    assert peak_bytes(graph(lambda e, x: relax.op.exp(x), (100,))) == 2 * N


def test_peak_of_a_residual():
    def body(emit, x):
        skip = emit(relax.op.exp(x))
        return relax.op.add(emit(relax.op.tanh(emit(relax.op.tanh(skip)))), skip)

    assert peak_bytes(graph(body, (100,))) == 4 * N  # x, skip, and read and written of each step


def test_peak_counts_an_input_to_the_end():
    # x is not read after the first step, but the caller holds it; y is small then.
    mod = graph(lambda e, x: e(relax.op.exp(e(relax.op.sum(x, axis=[0])))), (100, 2))
    assert peak_bytes(mod) == 2 * N + 2 * 2 * F32


def test_peak_of_a_view_is_nothing():
    mod = graph(lambda e, x: relax.op.exp(e(relax.op.reshape(x, (10, 10)))), (100,))
    assert peak_bytes(mod) == 2 * N


def test_a_view_keeps_its_storage_alive():
    def body(emit, x):
        view = emit(relax.op.reshape(emit(relax.op.exp(x)), (10, 10)))
        return relax.op.add(emit(relax.op.tanh(emit(relax.op.tanh(view)))), view)

    assert peak_bytes(graph(body, (100,))) == 4 * N


def test_peak_of_tuples():
    def body(emit, x):
        parts = emit(relax.op.split(x, 2))
        left = emit(relax.op.exp(emit(relax.TupleGetItem(parts, 0))))
        right = emit(relax.op.exp(emit(relax.TupleGetItem(parts, 1))))
        return relax.op.concat([left, right])

    # Last step: x, both halves, result. At the second exp: x, right part, left and right: less.
    assert peak_bytes(graph(body, (100,))) == 3 * N


def test_peak_with_two_outputs():
    def body(emit, x):
        return relax.Tuple([emit(relax.op.exp(x)), emit(relax.op.tanh(x))])

    assert peak_bytes(graph(body, (100,))) == 3 * N


def test_weights_and_what_is_made_of_them_are_free():
    def body(emit, x, w):
        return relax.op.add(x, emit(relax.op.exp(emit(relax.op.tanh(w)))))

    assert peak_bytes(graph(body, (100,), (100,), weights=1)) == 2 * N
    assert peak_bytes(graph(body, (100,), (100,))) == 4 * N


def test_peak_of_unknown_shape():
    n = tvm.tirx.Var("n", "int64")
    with pytest.raises(CostError, match="static shapes"):
        peak_bytes(graph(lambda e, x: relax.op.exp(x), (n,)))
