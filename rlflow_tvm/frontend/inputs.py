"""Random inputs that a model can make sense of: token ids within the vocabulary, masks of what stands first, normal
floats."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import tvm
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.errors import FrontendError

_PASSES_ON = frozenset(
    f"relax.{name}" for name in ("astype", "reshape", "expand_dims", "squeeze", "broadcast_to", "permute_dims")
)
_MASKED_BELOW = -0.7
_DIVISIONS = frozenset(f"relax.{name}" for name in ("divide", "floor_divide", "mod", "floor_mod"))


@dataclass(frozen=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: np.dtype
    bound: int | None = None
    """Integers are drawn from 0 to bound - 1."""
    divides: bool = False
    """Integers are no zeros: a process that divides one by zero is ended."""


def random_inputs(mod: tvm.IRModule, seed: int) -> dict[str, np.ndarray]:
    """One array for each input of a module (bound or detached) with static input shapes.

    Floats are standard normal; with "mask" in the input's name they are ones, and zeros where a normal number is below
    -0.7, but in the first place of the last axis: (mask - 1) * 1e9 says nothing of what it is added to anywhere else.
    Integers that index a table (`take`) are drawn below its extent, others of 8 bits, as
    images are, from all that there are; those that something is divided by are ones and twos; other integers and
    booleans are drawn from {0, 1}; with "mask" in the input's name they are ones, and zeros in the last quarter of the
    last axis: of ones alone nobody would see that a mask is lost.

    Raises:
        FrontendError: an input has a dynamic shape or a type that is neither number nor boolean.
    """
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, spec) for name, spec in _specs(mod).items()}


def _draw(rng: np.random.Generator, name: str, spec: _Spec) -> np.ndarray:
    if spec.dtype.kind == "f" or spec.dtype == ml_dtypes.bfloat16:
        drawn = rng.standard_normal(spec.shape)
        return np.asarray(_unmasked(drawn) if "mask" in name.lower() else drawn).astype(spec.dtype)
    if spec.dtype.kind not in "iub":
        raise FrontendError(f"input {name!r} has the type {spec.dtype}: only numbers and booleans can be drawn")
    if spec.divides and spec.dtype.kind in "iu":
        return np.asarray(rng.integers(1, max(2, min(3, spec.bound or 3)), spec.shape)).astype(spec.dtype)
    if spec.bound is None and "mask" in name.lower():
        if not spec.shape:
            return np.ones((), spec.dtype)
        last = spec.shape[-1]
        return np.broadcast_to(np.arange(last) < last - last // 4, spec.shape).astype(spec.dtype)
    if spec.bound is None and spec.dtype in (np.uint8, np.int8):
        return np.asarray(rng.integers(0, 256, spec.shape)).astype(np.uint8).view(spec.dtype)
    return np.asarray(rng.integers(0, spec.bound or 2, spec.shape)).astype(spec.dtype)


def _unmasked(drawn: np.ndarray | float) -> np.ndarray:
    """Ones for numbers above -0.7, and for the first of each row."""
    found = np.asarray(drawn) > _MASKED_BELOW
    if found.ndim:
        found[..., :1] = True
    return found.astype("float32")


def _specs(mod: tvm.IRModule) -> dict[str, _Spec]:
    func = mod["main"]
    inputs = func.params[: ir.num_inputs(func)]
    origin = {p: p.name for p in inputs}
    bounds: dict[str, int] = {}
    divisors: set[str] = set()
    for binding in ir.single_block(func):
        call = binding.value
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
            continue
        if call.op.name == "relax.take" and call.args[1] in origin:
            data = call.args[0].ty.shape.values
            axis = 0 if call.attrs.axis is None else int(call.attrs.axis)
            _tighten(bounds, origin[call.args[1]], int(data[axis]))
        elif call.op.name in _DIVISIONS and call.args[1] in origin:
            divisors.add(origin[call.args[1]])
        elif call.op.name in _PASSES_ON and call.args[0] in origin:
            origin[binding.var] = origin[call.args[0]]
    specs = {}
    for p in inputs:
        if not isinstance(p.ty.shape, relax.ShapeExpr) or not all(isinstance(d, tvm.tirx.IntImm) for d in p.ty.shape):
            raise FrontendError(f"input {p.name!r} has a dynamic shape: import the model with shapes={{...}}")
        shape, dtype = tuple(int(d) for d in p.ty.shape), numpy_dtype(str(p.ty.dtype))
        specs[p.name] = _Spec(shape, dtype, bounds.get(p.name), p.name in divisors)
    return specs


def _tighten(bounds: dict[str, int], name: str, bound: int) -> None:
    bounds[name] = min(bound, bounds.get(name, bound))


def numpy_dtype(name: str) -> np.dtype:
    """`np.dtype`, for bfloat16 too."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
