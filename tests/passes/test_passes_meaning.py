"""The operators' meanings, against the kernels that TVM makes: on random shapes and attributes, compiled as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from float_domain import Floats
from small_models import TARGET
from tvm import relax

from rlflow_tvm.float_check import outputs
from rlflow_tvm.passes.instance import Instance, instance_function
from rlflow_tvm.passes.ops import OPERATORS
from rlflow_tvm.passes.proof.domains import Unfit
from rlflow_tvm.passes.proof.meaning import MEANINGS, meaning
from rlflow_tvm.passes.proof.sampling import FLOAT, Sample, Sampler, drawn_tensors
from rlflow_tvm.passes.rule import RewriteRule

CASES = 8
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    operator: str
    sample: Sample
    function: relax.Function
    arguments: list[np.ndarray]
    expected: list[np.ndarray]


def rule_of(name: str) -> RewriteRule:
    """A rule whose left side is the operator alone, with any attributes."""
    arity = OPERATORS[name].arity or 3
    variables = ["x", "y", "z"][:arity]
    rest = ", **k" if OPERATORS[name].attributes else ""
    term = f"{name}({', '.join(variables)}{rest})"
    return RewriteRule(name, "test", f"{term}[1] => x" if name == "split" else f"{term} => x")


def cases_of(name: str) -> list[Case]:
    rng = np.random.default_rng(0)
    found: list[Case] = []
    for sample in Sampler(rule_of(name)).samples(4000):
        wide = {"float64", "int32"} & {str(v) for v in sample.instance.attributes.get("k", {}).values()}
        if sample.dtype != FLOAT or wide:
            continue
        domain = Floats()
        tensors: dict[str, Any] = drawn_tensors(sample, domain, rng)
        if name in ("sqrt", "rsqrt", "power"):
            tensors = {n: (np.abs(x[0]),) for n, x in tensors.items()}
        result = meaning(name, domain, list(tensors.values()), sample.instance.attributes.get("k", {}))
        expected = [part[0] for part in ([result[1]] if name == "split" else [result])]
        function = instance_function(sample.rule, sample.instance)
        found.append(
            Case(
                name,
                sample,
                function,
                [x[0] if x[0].dtype == np.int64 else x[0].astype(FLOAT) for x in tensors.values()],
                expected,
            )
        )
        if len(found) == CASES:
            break
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[Case, list[np.ndarray]]]]:
    cases = [case for name in MEANINGS for case in cases_of(name)]
    found = outputs([case.function for case in cases], [case.arguments for case in cases], TARGET)
    by_name: dict[str, list[tuple[Case, list[np.ndarray]]]] = {}
    for case, result in zip(cases, found, strict=True):
        by_name.setdefault(case.operator, []).append((case, result))
    return by_name


def test_every_operator_has_a_meaning():
    assert set(MEANINGS) == set(OPERATORS)


@pytest.mark.parametrize("name", MEANINGS)
def test_a_meaning_is_what_tvm_computes(name, results):
    assert len(results[name]) == CASES
    for case, result in results[name]:
        assert [array.shape for array in result] == [array.shape for array in case.expected], case.sample
        for array, expected in zip(result, case.expected, strict=True):
            extent = max(float(np.abs(expected).max(initial=0.0)), 1e-3)
            assert np.abs(array - expected).max(initial=0.0) <= TOLERANCE * extent, case.sample


@pytest.mark.parametrize("count_include_pad", [False, True])
def test_a_window_that_ceil_mode_takes_beyond_the_padding_counts_none_from_there(count_include_pad):
    k = {"pool_size": [3, 3], "strides": [2, 2], "dilation": [1, 1], "padding": [1, 1, 1, 1], "ceil_mode": True}
    k |= {"count_include_pad": count_include_pad, "layout": "NCHW", "out_layout": "NCHW"}
    x = np.random.default_rng(0).standard_normal((1, 2, 14, 14)).astype(FLOAT)
    function = instance_function(rule_of("avg_pool2d"), Instance({"x": x.shape}, {"k": k}))
    ((found,),) = outputs([function], [[x]], TARGET)
    np.testing.assert_allclose(found, meaning("avg_pool2d", Floats(), [(x,)], k)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "attributes"),
    [
        ("broadcast_to", (1, 1), {"shape": [4096, 4096]}),
        ("pad", (2, 3), {"pad_width": [0, 100_000_000_000, 0, 0], "pad_value": 0.0, "pad_mode": "constant"}),
        ("adaptive_avg_pool2d", (1, 1, 2, 2), {"output_size": [4096, 4096], "layout": "NCHW", "out_layout": "NCHW"}),
        ("resize2d", (1, 1, 2, 2), {"size": [1_000_000_000, 1], "layout": "NCHW"}),
        ("max_pool2d", (1, 1, 2, 2), {"pool_size": [1, 1], "strides": [1, 1], "dilation": [1, 1], "ceil_mode": False,
                                      "padding": [1_000_000_000, 0, 0, 0], "layout": "NCHW", "out_layout": "NCHW"}),
    ],
)  # fmt: skip
def test_what_would_fill_the_memory_is_no_sample(name, shape, attributes):
    with pytest.raises(Unfit, match="are too many elements"):
        meaning(name, Floats(), [(np.ones(shape, FLOAT),)], attributes)


@pytest.mark.parametrize("name", MEANINGS)
def test_shapes_are_those_that_relax_infers(name, results):
    for case, _ in results[name]:
        ty = case.function.ret_ty
        fields = ty.fields if isinstance(ty, relax.TupleType) else [ty]
        assert [tuple(int(e) for e in field.shape.values) for field in fields] == [e.shape for e in case.expected]
