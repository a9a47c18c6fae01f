"""Weights for small models."""

from __future__ import annotations

import numpy as np

NORM = ["gamma", "beta", "mean", "var"]
"""The parameters of a batch normalisation, as `norm_weights` names them."""


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm_weights(channels: int) -> dict[str, np.ndarray]:
    """Of a batch normalisation, float32."""
    rng = np.random.default_rng(1)
    draw = {"gamma": (0.5, 1.5), "beta": (-1, 1), "mean": (-1, 1), "var": (0.5, 2)}
    return {k: rng.uniform(*bounds, channels).astype(np.float32) for k, bounds in draw.items()}
