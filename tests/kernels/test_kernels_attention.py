"""Attention against numpy in double precision: masks, biases, shared heads, types; and which rules take its parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from cuda_checks import How, run_on_host, serialised, unscheduled
from kernel_checks import TARGET, check, graph, module_of, random_arrays
from tvm import relax

from rlflow_tvm.errors import KernelError
from rlflow_tvm.kernels import explain, pipeline

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """`queries`, `keys`, `values`: shapes, (batch, sequence, heads, features). `bias`: its shape, or None."""

    queries: Shape
    keys: Shape
    values: Shape
    bias: Shape | None = None
    scale: float | None = None
    mask: str | None = None

    @property
    def shapes(self) -> list[Shape]:
        return [self.queries, self.keys, self.values, *([] if self.bias is None else [self.bias])]

    def call(self, *operands: relax.Expr) -> relax.Call:
        return relax.op.nn.attention(*operands, scale=self.scale, causal_mask=self.mask)

    def __call__(self, *operands: np.ndarray) -> np.ndarray:
        query, key, value = (each.astype("float64").transpose(0, 2, 1, 3) for each in operands[:3])
        key, value = (np.repeat(each, query.shape[1] // each.shape[1], 1) for each in (key, value))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = query @ key.swapaxes(2, 3) * scale + sum(each.astype("float64") for each in operands[3:])
        if self.mask is not None:
            rows, columns = scores.shape[2:]
            behind = abs(rows - columns) if self.mask == "BottomRight" else 0
            scores = np.where(np.tri(rows, columns, behind, bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3)


def _same(shape: Shape) -> tuple[Shape, Shape, Shape]:
    return shape, shape, shape


CASES = {
    "itself": Attention(*_same((2, 19, 3, 16))),
    "odd": Attention(*_same((1, 37, 5, 13))),
    "one head": Attention(*_same((1, 64, 1, 32))),
    "one query": Attention((1, 1, 4, 16), (1, 33, 4, 16), (1, 33, 4, 16)),
    "across": Attention((2, 7, 4, 24), (2, 31, 4, 24), (2, 31, 4, 10)),
    "scaled": Attention(*_same((1, 21, 2, 16)), scale=0.7),
    "bias": Attention(*_same((2, 17, 3, 16)), bias=(2, 3, 17, 17)),
    "bias of keys": Attention((2, 9, 3, 16), (2, 20, 3, 16), (2, 20, 3, 8), bias=(2, 1, 1, 20), scale=0.2),
    "causal": Attention(*_same((1, 40, 4, 16)), mask="TopLeft"),
    "causal, more keys": Attention((1, 6, 2, 8), (1, 21, 2, 8), (1, 21, 2, 8), mask="TopLeft"),
    "causal, more queries": Attention((1, 21, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), mask="TopLeft"),
    "causal from the end": Attention((1, 6, 2, 8), (1, 21, 2, 8), (1, 21, 2, 8), mask="BottomRight"),
    "causal from the end, more queries": Attention((1, 9, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8), mask="BottomRight"),
    "causal with a bias": Attention(*_same((1, 15, 3, 16)), bias=(1, 3, 15, 15), scale=0.1, mask="BottomRight"),
    "heads shared": Attention((2, 11, 6, 16), (2, 13, 2, 16), (2, 13, 2, 8)),
    "one head for all": Attention((1, 11, 4, 16), (1, 11, 1, 16), (1, 11, 1, 16), mask="TopLeft"),
}


@pytest.mark.parametrize("case", CASES)
def test_attention(case: str) -> None:
    attention = CASES[case]
    rules = check(attention.call, attention, attention.shapes).rules
    assert rules.count("matmul") == 2
    assert rules.count("reduction") == 1
    assert set(rules) <= {"matmul", "reduction", "elementwise"}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2.0**-9), ("float64", 1e-12)])
@pytest.mark.parametrize("case", ["odd", "bias", "causal", "heads shared"])
def test_other_types(case: str, dtype: str, tolerance: float) -> None:
    """Halves are summed in float32: these scores are more than a half can hold, before they are scaled."""
    attention = CASES[case]
    arrays = [array.astype(dtype) for array in random_arrays(attention.shapes)]
    arrays[0], arrays[1] = arrays[0] * 20, arrays[1] + 400
    params = [relax.Var(f"x{i}", relax.TensorType(array.shape, dtype)) for i, array in enumerate(arrays)]
    mod = module_of(attention.call, params)
    assert "fallback" not in [kernel.rule for kernel in explain(mod, TARGET)]
    machine = relax.VirtualMachine(tvm.compile(mod, TARGET, relax_pipeline=pipeline(TARGET)), tvm.cpu())
    result = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    assert result.dtype == dtype
    np.testing.assert_allclose(result, attention(*arrays), rtol=0, atol=4 * tolerance)


def test_keys_hidden_by_the_bias() -> None:
    attention = Attention(*_same((1, 9, 2, 8)), bias=(1, 1, 1, 9), mask="TopLeft")
    hidden = np.array([0, -np.inf, 0, 0, -np.inf, 0, -np.inf, -np.inf, 0], "float32")

    def call(query: relax.Expr, key: relax.Expr, value: relax.Expr) -> relax.Call:
        return attention.call(query, key, value, relax.const(hidden.reshape(1, 1, 1, 9)))

    check(call, lambda *x: attention(*x, hidden), attention.shapes[:3])


def test_a_window_is_refused() -> None:
    shapes = [(1, 9, 2, 8)] * 3
    mod = graph(lambda *x: relax.op.nn.attention(*x, causal_mask="TopLeft", window_size=4), shapes)
    with pytest.raises(KernelError, match=r"relax\.nn\.attention.*sliding-window"):
        explain(mod, TARGET)


@pytest.mark.parametrize("how", [unscheduled, serialised])
@pytest.mark.parametrize("case", ["across", "causal with a bias", "heads shared"])
def test_on_a_gpu(case: str, how: How) -> None:
    attention = CASES[case]
    arrays = random_arrays(attention.shapes)
    (result,) = run_on_host(graph(attention.call, attention.shapes), arrays, how)
    np.testing.assert_allclose(result, attention(*arrays), rtol=0, atol=1e-5)
