"""FLOPs, bytes and peak memory against closed forms."""

from __future__ import annotations

import pytest
import tvm
from cost_kernels import add, gather, matmul
from tvm import relax

from rlflow_tvm.cost import Temperatures, kernel_bytes, kernel_flops
from rlflow_tvm.errors import CostError
from rlflow_tvm.kernels import Lowering

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


SIZE = 64 * 64 * F32
SMALL = 64 * F32


def peak(body, *shapes: tuple[int, ...], weights: int = 0) -> int:
    """Of main(inputs..., weights...) of float32 tensors; the last `weights` shapes are weights'."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", params, attrs={"num_input": len(shapes) - weights}):
        with builder.dataflow():
            out = builder.emit_output(body(builder.emit, *params))
        builder.emit_func_output(out)
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    return Temperatures(target).peak_bytes(Lowering(target).launches(builder.get()))


def squared(emit, x, times: int):
    """A chain of products: no kernel holds two of them."""
    for _ in range(times):
        x = emit(relax.op.matmul(x, x))
    return x


def test_peak_of_one_kernel():
    assert peak(lambda e, x: relax.op.matmul(x, x), (64, 64)) == 2 * SIZE  # input and output


def test_peak_of_a_chain():
    # Two intermediates take turns: a result never lies where its own launch reads.
    assert peak(lambda e, x: squared(e, x, 2), (64, 64)) == 3 * SIZE
    assert peak(lambda e, x: squared(e, x, 3), (64, 64)) == 4 * SIZE
    assert peak(lambda e, x: squared(e, x, 9), (64, 64)) == 4 * SIZE


def test_peak_of_a_residual():
    def body(emit, x):
        skip = squared(emit, x, 1)
        return relax.op.matmul(squared(emit, skip, 3), skip)

    assert peak(body, (64, 64)) == 5 * SIZE  # input, output, what is skipped, and two that take turns


def test_what_is_fused_takes_no_memory():
    def body(emit, x):
        return emit(relax.op.exp(emit(relax.op.tanh(emit(relax.op.matmul(x, x))))))

    assert peak(body, (64, 64)) == 2 * SIZE


def test_peak_of_a_view_is_nothing():
    def body(emit, x):
        view = emit(relax.op.reshape(emit(relax.op.reshape(squared(emit, x, 1), (32, 128))), (64, 64)))
        return relax.op.matmul(view, view)

    assert peak(body, (64, 64)) == 3 * SIZE


def test_small_and_large_share_storage_up_to_sixteen_times():
    """Rows' sums take 64 times less: they get storage of their own."""

    def body(emit, x):
        sums = emit(relax.op.sum(squared(emit, x, 2), axis=[1], keepdims=True))
        return relax.op.matmul(relax.op.permute_dims(sums), x)

    # two squares (the second reads the first), and the sums, transposed within the last kernel or before it
    assert 3 * SIZE + 2 * SMALL <= peak(body, (64, 64)) <= 3 * SIZE + 3 * SMALL


def test_peak_with_two_outputs():
    def body(emit, x):
        return relax.Tuple([emit(relax.op.matmul(x, x)), emit(relax.op.exp(x))])

    assert peak(body, (64, 64)) == 3 * SIZE


def test_weights_and_what_is_made_of_them_are_free():
    def body(emit, x, w):
        return relax.op.matmul(x, emit(relax.op.matmul(w, w)))

    assert peak(body, (64, 64), (64, 64), weights=1) == 2 * SIZE
    assert peak(body, (64, 64), (64, 64)) == 4 * SIZE
