"""Schedule rules on odd extents, sizes of 1, strided, dilated, cut and empty things, against numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_checks import check, graph, random_arrays, run
from numpy.lib.stride_tricks import sliding_window_view
from scipy.special import erf
from tvm import relax

op = relax.op
FEW = settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ODD = st.sampled_from([1, 2, 3, 5, 7, 13, 16, 17, 31, 33])
SMALL = st.sampled_from([1, 2, 3])


@FEW
@given(
    st.sampled_from([29, 32, 40, 64]), ODD, st.tuples(ODD, ODD), st.tuples(SMALL, SMALL),
    st.tuples(*[st.integers(0, 2)] * 4), st.sampled_from([1, 3]),
)  # fmt: skip
def test_long_convolutions(
    inputs: int, outputs: int, size: tuple[int, int], strides: tuple[int, int], padding: tuple[int, ...], window: int
) -> None:
    """Reductions on both sides of the limit from which on a tile is written channel by channel."""
    top, left, bottom, right = padding
    size = (max(size[0], window), max(size[1], window))

    def build(x: relax.Expr, b: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.add(op.nn.conv2d(x, w, strides=strides, padding=padding), b))

    def expected(x: np.ndarray, b: np.ndarray, w: np.ndarray) -> np.ndarray:
        padded = np.pad(x.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
        windows = sliding_window_view(padded, (window, window), axis=(2, 3))[:, :, :: strides[0], :: strides[1]]
        return np.maximum(np.einsum("nchwyx,ocyx->nohw", windows, w) + b, 0)

    shapes = [(1, inputs, *size), (1, outputs, 1, 1), (outputs, inputs, window, window)]
    outcome = check(build, expected, shapes, weights=1, tolerance=1e-5)
    assert len(outcome.rules) == 1


@FEW
@given(
    st.tuples(SMALL, ODD, ODD, ODD), st.tuples(SMALL, SMALL), st.tuples(SMALL, SMALL), st.tuples(SMALL, SMALL),
    st.booleans(),
)  # fmt: skip
def test_pools(
    shape: tuple[int, ...], window: tuple[int, int], strides: tuple[int, int], dilation: tuple[int, int], maximum: bool
) -> None:
    span = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    shape = (shape[0], shape[1], max(shape[2], span[0]), max(shape[3], span[1]))
    pool = op.nn.max_pool2d if maximum else op.nn.avg_pool2d

    def expected(x: np.ndarray) -> np.ndarray:
        windows = sliding_window_view(x, span, axis=(2, 3))[:, :, :: strides[0], :: strides[1]]
        windows = windows[..., :: dilation[0], :: dilation[1]]
        return windows.max((4, 5)) if maximum else windows.mean((4, 5))

    outcome = check(lambda x: pool(x, window, strides=strides, dilation=dilation), expected, [shape])
    assert len(outcome.rules) == 1


@FEW
@given(st.data(), st.lists(ODD, min_size=1, max_size=4).map(tuple))
def test_elementwise_of_every_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """A strided cut (backwards too) of a broadcast sum, transposed."""
    steps = [data.draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in shape]
    order = data.draw(st.permutations(range(len(shape))))
    begin = [0 if step > 0 else extent - 1 for step, extent in zip(steps, shape, strict=True)]
    end = [extent if step > 0 else -extent - 1 for step, extent in zip(steps, shape, strict=True)]
    row = (*[1] * (len(shape) - 1), shape[-1])

    def build(x: relax.Expr, y: relax.Expr) -> relax.Expr:
        cut = op.strided_slice(op.add(x, y), list(range(len(shape))), begin, end, steps)
        return op.permute_dims(cut, list(order))

    def expected(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.transpose((x + y)[tuple(slice(None, None, step) for step in steps)], order)

    check(build, expected, [shape, row])


@FEW
@given(st.tuples(ODD, ODD), st.tuples(*[st.integers(-3, 4)] * 4))
def test_padding_and_cutting(shape: tuple[int, int], sides: tuple[int, ...]) -> None:
    """Negative padding cuts, as ONNX means it: written as a cut and a pad, which are one kernel."""
    top, bottom, left, right = sides
    shape = (shape[0] + 6, shape[1] + 6)  # something is left
    cut = [(max(0, -top), shape[0] - max(0, -bottom)), (max(0, -left), shape[1] - max(0, -right))]
    grow = [max(0, side) for side in sides]

    def build(x: relax.Expr) -> relax.Expr:
        inside = op.strided_slice(op.exp(x), [0, 1], [c[0] for c in cut], [c[1] for c in cut])
        return op.nn.pad(inside, grow)

    def expected(x: np.ndarray) -> np.ndarray:
        inside = np.exp(x[cut[0][0] : cut[0][1], cut[1][0] : cut[1][1]])
        return np.pad(inside, ((grow[0], grow[1]), (grow[2], grow[3])))

    check(build, expected, [shape])


@FEW
@given(st.lists(ODD, min_size=1, max_size=3).map(tuple), st.data())
def test_fallback(shape: tuple[int, ...], data: st.DataObject) -> None:
    """A running sum is neither a map nor a reduction."""
    axis = data.draw(st.integers(0, len(shape) - 1))
    outcome = check(
        lambda x: op.cumsum(op.multiply(x, x), axis=axis), lambda x: np.cumsum(x * x, axis), [shape], tolerance=1e-5
    )
    # a sum of one element is written as a start and a loop of no turns
    assert ("fallback" if shape[axis] > 1 else "empty") in outcome.rules


def test_empty_arrays() -> None:
    """Nothing in, nothing out, or the sum of nothing."""
    cases = [
        (op.add, (0, 5), [(0, 5), (0, 5)]),
        (lambda x: op.sum(x, axis=1), (3,), [(3, 0)]),
        (lambda x: op.sum(x, axis=0), (3,), [(0, 3)]),
        (op.matmul, (3, 5), [(3, 0), (0, 5)]),
    ]
    for build, shape, shapes in cases:
        outcome = run(graph(build, shapes), random_arrays(shapes))
        np.testing.assert_array_equal(outcome.values[0], np.zeros(shape, "float32"))
        # a product of nothing becomes a constant
        assert set(outcome.rules) <= ({"elementwise"} if build is op.matmul else {"empty"})


def test_nothing_passes_through_several_operators() -> None:
    """What lies between them has no elements either."""
    x, y = (0, 5), (3, 5)
    cases = [
        (lambda x: op.exp(op.nn.relu(x)), [x], 0, x),
        (lambda x: op.nn.relu(op.reshape(x, (-1,))), [(2, 3, 0)], 0, (0,)),
        (op.nn.softmax, [x], 0, x),
        (lambda x: op.mean(op.nn.relu(x), axis=1), [x], 0, (0,)),
        (lambda x, g, b: op.nn.layer_norm(x, g, b, axes=-1), [x, (5,), (5,)], 0, x),
        (op.matmul, [x, (5, 9)], 1, (0, 9)),
        (op.nn.conv2d, [(0, 4, 5, 5), (8, 4, 1, 1)], 1, (0, 8, 5, 5)),
        (op.nn.conv2d, [(1, 4, 0, 5), (8, 4, 1, 1)], 1, (1, 8, 0, 5)),
        (lambda x, w: op.nn.conv2d(x, w, padding=1), [(0, 4, 5, 5), (8, 4, 3, 3)], 1, (0, 8, 5, 5)),
        (lambda x, w: op.nn.conv2d(x, w, padding=1), [(1, 4, 0, 5), (8, 4, 3, 3)], 1, (1, 8, 0, 5)),
    ]
    for build, shapes, weights, shape in cases:
        assert run(graph(build, shapes, weights), random_arrays(shapes), weights).values[0].shape == shape
    arrays = random_arrays([x, y])
    outcome = run(graph(lambda x, y: op.concat([op.exp(op.nn.relu(x)), y], 0), [x, y]), arrays)
    np.testing.assert_array_equal(outcome.values[0], arrays[1])


FUNCTIONS = {
    "silu": (lambda y: op.multiply(y, op.sigmoid(y)), lambda y: y / (1.0 + np.exp(-y))),
    "gelu": (op.nn.gelu, lambda y: y * 0.5 * (1.0 + erf(y / np.sqrt(2.0)))),
    "tanh": (op.tanh, np.tanh),
    "exp": (lambda y: op.exp(op.negative(op.abs(y))), lambda y: np.exp(-np.abs(y))),
}


@FEW
@given(
    st.sampled_from([3, 16, 29]), ODD, st.tuples(ODD, ODD), st.sampled_from([1, 3]), st.sampled_from(list(FUNCTIONS))
)
def test_convolutions_with_a_function_behind(
    inputs: int, outputs: int, size: tuple[int, int], window: int, function: str
) -> None:
    """Whole tiles and last ones hold the function's code twice, its variables with it."""
    relaxed, exact = FUNCTIONS[function]
    size = (max(size[0], window), max(size[1], window))

    def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        windows = sliding_window_view(x.astype("float64"), (window, window), axis=(2, 3))
        return exact(np.einsum("nchwyx,ocyx->nohw", windows, w))

    shapes = [(1, inputs, *size), (outputs, inputs, window, window)]
    check(lambda x, w: relaxed(op.nn.conv2d(x, w)), expected, shapes, weights=1, tolerance=2e-5)
