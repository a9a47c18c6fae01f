"""Group and instance normalisation against numpy, in double precision: over any axes, of numbers far from zero too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from cuda_checks import How, run_on_host, serialised, unscheduled
from kernel_checks import TARGET, check, graph, module_of, random_arrays, run
from tvm import relax

from rlflow_tvm.kernels import explain, pipeline

rx = relax.op


@dataclass(frozen=True)
class Norm:
    """Of tensors of `shape`; `groups`: of channels, None for an instance normalisation."""

    shape: tuple[int, ...]
    groups: int | None
    axes: tuple[int, ...] = (2, 3)
    channel_axis: int = 1
    epsilon: float = 1e-5
    rule: str = "reduction"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        channels = (self.shape[self.channel_axis],)
        return [self.shape, channels, channels]

    def call(self, data: relax.Expr, gamma: relax.Expr, beta: relax.Expr) -> relax.Call:
        if self.groups is None:
            return rx.nn.instance_norm(data, gamma, beta, self.channel_axis, list(self.axes), self.epsilon)
        return rx.nn.group_norm(data, gamma, beta, self.groups, self.channel_axis, list(self.axes), self.epsilon)

    def __call__(self, data: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
        rank = data.ndim
        channel, axes = self.channel_axis % rank, tuple(axis % rank for axis in self.axes)
        wide = data.astype("float64")
        if self.groups is not None:
            apart = (*data.shape[:channel], self.groups, -1, *data.shape[channel + 1 :])
            wide = wide.reshape(apart)
            axes = (*(axis + (axis > channel) for axis in axes), channel + 1)
        centred = wide - wide.mean(axes, keepdims=True)
        normal = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + self.epsilon)
        along = [-1 if i == channel else 1 for i in range(rank)]
        return normal.reshape(data.shape) * gamma.reshape(along) + beta.reshape(along)


CASES = {
    "image": Norm((2, 12, 9, 11), 4),
    "whole vectors": Norm((1, 64, 16, 16), 32),
    "one image, odd": Norm((1, 15, 7, 5), 3, epsilon=0.1),
    "row": Norm((3, 10, 37), 5, (2,)),
    "volume": Norm((2, 6, 3, 5, 7), 2, (2, 3, 4)),
    "one group": Norm((2, 6, 5, 9), 1),
    "one image, one group": Norm((1, 6, 5, 9), 1),
    "a group each": Norm((2, 6, 5, 9), 6),
    "vectors": Norm((4, 24), 3, ()),
    "one axis": Norm((2, 6, 5, 19), 3, (3,)),
    "over the batch": Norm((4, 6, 5, 7), 3, (0, 2, 3)),
    "channels last": Norm((2, 7, 5, 24), 3, (1, 2), 3),
    "from the end": Norm((2, 7, 5, 24), 3, (-3, -2), -1),
    "instances": Norm((2, 5, 9, 11), None),
    "one instance": Norm((1, 8, 16, 16), None, epsilon=1e-3),
    "statistics of a batch": Norm((3, 6, 5, 7), None, (0, 2, 3)),
    "row by channel": Norm((3, 5, 33), None, (2,)),
    "instances, channels last": Norm((2, 7, 5, 6), None, (1, 2), -1),
}


@pytest.mark.parametrize("case", CASES)
def test_norms(case: str) -> None:
    norm = CASES[case]
    assert check(norm.call, norm, norm.shapes, weights=2).rules == [norm.rule]


@pytest.mark.parametrize("groups", [None, 16])
def test_a_constant_image_gives_the_bias(groups: int | None) -> None:
    norm = Norm((1, 64, 56, 56), groups)
    arrays = [np.full(norm.shape, 5000.9, "float32"), *random_arrays(norm.shapes[1:])]
    (result,) = run(graph(norm.call, norm.shapes, 2), arrays, 2).values
    np.testing.assert_array_equal(result, np.broadcast_to(arrays[2][:, None, None], norm.shape))


@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("offset", [5000.0, -3e5])
def test_numbers_far_from_zero(groups: int | None, offset: float) -> None:
    norm = Norm((2, 12, 17, 19), groups)
    arrays = random_arrays(norm.shapes)
    arrays[0] += np.float32(offset)
    (result,) = run(graph(norm.call, norm.shapes, 2), arrays, 2).values
    np.testing.assert_allclose(result, norm(*arrays), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("case", ["image", "row", "instances"])
def test_other_types(case: str, dtype: str) -> None:
    """Halves are summed in float32: 300² is more than a half can hold."""
    norm = CASES[case]
    arrays = [array.astype(dtype) for array in random_arrays(norm.shapes)]
    arrays[0] *= 300
    params = [relax.Var(f"x{i}", relax.TensorType(array.shape, dtype)) for i, array in enumerate(arrays)]
    mod = module_of(norm.call, params)
    assert "fallback" not in [kernel.rule for kernel in explain(mod, TARGET)]
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    result = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    assert result.dtype == dtype
    np.testing.assert_allclose(result, norm(*arrays), rtol=0, atol=4 * 2.0**-10 if dtype == "float16" else 1e-12)


@pytest.mark.parametrize("case", ["image", "whole vectors", "instances"])
def test_what_follows_is_in_its_kernel(case: str) -> None:
    norm = CASES[case]
    arrays = random_arrays(norm.shapes)
    outcome = run(graph(lambda *x: rx.nn.silu(norm.call(*x)), norm.shapes, 2), arrays, 2)
    assert outcome.rules == ["reduction"]
    expected = norm(*arrays)
    np.testing.assert_allclose(outcome.values[0], expected / (1 + np.exp(-expected)), rtol=0, atol=1e-5)


def test_nothing_to_norm() -> None:
    norm = Norm((2, 4, 0, 3), 2)
    (result,) = run(graph(norm.call, norm.shapes, 2), random_arrays(norm.shapes), 2).values
    assert result.shape == norm.shape


@pytest.mark.parametrize("how", [unscheduled, serialised])
@pytest.mark.parametrize("case", ["image", "one image, odd", "channels last", "instances", "statistics of a batch"])
def test_on_a_gpu(case: str, how: How) -> None:
    norm = CASES[case]
    arrays = random_arrays(norm.shapes)
    (result,) = run_on_host(graph(norm.call, norm.shapes), arrays, how)
    np.testing.assert_allclose(result, norm(*arrays), rtol=0, atol=1e-5)
