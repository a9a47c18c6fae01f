"""Values to run kernels and models on, where only their time matters."""

from __future__ import annotations

from functools import cache

import numpy as np

_NOISE = 1 << 20


def plain_array(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Floats are normal with deviation `scale`, the same at each call; integers and booleans zero: a gather stays
    inside its table."""
    numpy_dtype = np.dtype(_registered(dtype))
    if not dtype.startswith(("float", "bfloat")):
        return np.zeros(shape, numpy_dtype)
    return np.resize(_noise() * np.float32(scale), shape).astype(numpy_dtype, copy=False)


@cache
def _noise() -> np.ndarray:
    # Hundreds of megabytes of fresh random numbers take seconds: a block of them, repeated, does as well.
    return np.random.default_rng(0).standard_normal(_NOISE).astype("float32")


def _registered(dtype: str) -> str:
    if dtype.startswith(("bfloat", "float8")):
        import ml_dtypes  # noqa: F401  registers these names with numpy; comes with onnx
    return dtype
