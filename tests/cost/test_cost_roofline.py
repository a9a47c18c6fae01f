"""The machine's best rates."""

from __future__ import annotations

import pytest
from cost_kernels import FakeKernel, matmul

from rlflow_tvm.cost import Roofline, kernel_bytes, measure_roofline


def test_least_time_is_that_of_the_scarcer_resource():
    func = matmul(4, 8, 16)  # 2 * 4 * 8 * 16 operations
    kernel = FakeKernel(func, "k")
    assert Roofline(1.0, 1e12).least_secs(kernel) == pytest.approx(2 * 4 * 8 * 16)
    assert Roofline(1e12, 2.0).least_secs(kernel) == pytest.approx(kernel_bytes(func) / 2)


@pytest.mark.slow
def test_rates_are_those_of_a_computer(target):
    rates = measure_roofline(target)
    # one slow scalar core of 1 GHz at the low end, a large server at the high end
    assert 1e9 < rates.flops_per_sec < 1e14
    assert 1e8 < rates.bytes_per_sec < 1e13
