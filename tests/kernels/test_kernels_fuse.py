"""Our fusion makes the kernels that TVM's FuseOps and FuseTIR make."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tvm
from kernel_checks import TARGET, graph, run
from tvm import relax, tirx

from rlflow_tvm.dataflow import Dataflow
from rlflow_tvm.kernels.fuse import FusedCall, Fuser, kernel_key
from rlflow_tvm.kernels.legalize import Legalizer
from rlflow_tvm.kernels.partition import BROADCAST, ELEMENTWISE, INJECTIVE, OPAQUE, OUT_FUSIBLE, partition

op = relax.op


def chain(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.nn.relu(op.add(op.matmul(x, w), b))


def diamond(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    product = op.add(op.matmul(x, w), b)
    return op.multiply(product, op.sigmoid(product))


def residual(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    first = op.nn.relu(op.add(op.matmul(x, w), b))
    return op.add(op.add(op.matmul(first, w), b), op.nn.softmax(x))


def two_products_into_one_sum(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.tanh(op.add(op.matmul(x, w), op.add(op.matmul(op.exp(x), w), b)))


def moved_and_joined(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    turned = op.permute_dims(op.exp(x))
    return op.add(op.concat([op.permute_dims(turned), op.exp(w)], axis=0), b)


def reduced(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    centred = op.subtract(x, op.mean(x, axis=[-1], keepdims=True))
    return op.add(op.sum(op.multiply(centred, centred), axis=[-1], keepdims=True), b)


def read_twice(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    product = op.matmul(x, w)
    return op.add(op.nn.softmax(product), op.exp(op.add(product, b)))


@pytest.mark.parametrize(
    "build", [chain, diamond, residual, two_products_into_one_sum, moved_and_joined, reduced, read_twice]
)
def test_kernels_equal_those_of_tvm(build) -> None:
    mod = graph(build, [(12, 12), (12, 12), (12,)])
    legal, prim_funcs = Legalizer(TARGET)(Dataflow.from_module(mod))
    ours = Counter(step.key for step in Fuser()(legal, prim_funcs) if isinstance(step, FusedCall))

    calls = [node.value for node in legal.nodes if isinstance(node.value, relax.Call)]
    callees = {c.args[0]: prim_funcs[c.args[0].name_hint] for c in calls if isinstance(c.args[0], tvm.ir.GlobalVar)}
    module = tvm.IRModule({tvm.ir.GlobalVar("main"): legal.function, **callees})
    fused = relax.transform.FuseTIR()(relax.transform.FuseOps()(module))
    theirs: Counter[str] = Counter()
    for binding in fused["main"].body.blocks[0].bindings:
        if isinstance(binding.value, relax.Call) and isinstance(binding.value.args[0], tvm.ir.GlobalVar):
            func = fused[binding.value.args[0]]
            assert isinstance(func, tirx.PrimFunc)
            theirs[kernel_key(func)] += 1
    assert ours == theirs


def test_no_group_holds_two_products() -> None:
    groups = partition([OUT_FUSIBLE, OUT_FUSIBLE, ELEMENTWISE], [[2], [2], []], {2})
    assert groups in ([[0], [1, 2]], [[1], [0, 2]])


def test_nothing_stretched_is_fused_into_a_product() -> None:
    kinds, uses = [OUT_FUSIBLE, ELEMENTWISE, ELEMENTWISE, ELEMENTWISE], [[1], [2], [3], []]
    assert partition(kinds, uses, {3}) == [[0, 1, 2, 3]]
    assert partition(kinds, uses, {3}, stretched={1}) == [[0, 1], [2, 3]]
    assert partition([BROADCAST, *kinds[1:]], uses, {3}, stretched={1}) == [[0, 1, 2, 3]]


def test_what_is_read_twice_again_and_again_is_no_single_expression() -> None:
    """The values of 24 steps, each of which reads the one before twice: as one expression 2^24 operators."""

    def steps(x: relax.Expr) -> relax.Expr:
        y = x
        for _ in range(24):
            y = op.add(op.multiply(y, y), x)
        return y

    count = 48
    uses = [[i + 1] * (2 if i % 2 else 1) for i in range(count - 1)]
    groups = partition([ELEMENTWISE] * count, [*uses, []], {count - 1})
    assert 2 < len(groups) < 8
    assert sorted(i for group in groups for i in group) == list(range(count))
    x = np.linspace(-1, 0.2, 40, dtype="float32")
    expected = x.astype("float64")
    for _ in range(24):
        expected = expected * expected + x
    np.testing.assert_allclose(run(graph(steps, [(40,)]), [x]).values[0], expected, rtol=1e-3, atol=1e-4)


def test_what_is_read_outside_stays_apart() -> None:
    assert partition([ELEMENTWISE, BROADCAST], [[1], []], {0, 1}) == [[0], [1]]


def test_opaque_operators_stay_apart() -> None:
    assert partition([INJECTIVE, OPAQUE, ELEMENTWISE], [[1], [2], []], {2}) == [[0], [1], [2]]
