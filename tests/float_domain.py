"""The operators' meanings in double precision, to hold them against what runs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from scipy.special import erf

from rlflow_tvm.passes.proof.domains import Shape, Tensor

_FUNCTIONS = {"erf": erf, "sqrt": np.sqrt, "power": np.power}


class Floats:
    """Double precision, with the functions themselves."""

    name = "floats"

    def draw(self, shape: Shape, rng: np.random.Generator) -> Tensor:
        return (rng.uniform(0.25, 2.0, shape) * rng.choice([-1.0, 1.0], shape),)

    def constant(self, value: Fraction, like: Tensor) -> Tensor:
        return (np.array(float(value)),)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(a[0] + b[0]),)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(a[0] * b[0]),)

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(a[0] / b[0]),)

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return (np.asarray(x[0].sum(axes)),)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(np.maximum(a[0], b[0])),)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(np.minimum(a[0], b[0])),)

    def exp(self, x: Tensor) -> Tensor:
        return (np.asarray(np.exp(x[0])),)

    def function(self, name: str, *xs: Tensor) -> Tensor:
        return (np.asarray(_FUNCTIONS[name](*(x[0] for x in xs))),)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x
