"""What a graph compiles to: lowering to fused, unscheduled PrimFuncs, and the list of kernels among them."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.ir import detach

from .legalize import Legalizer, check_lowered
from .split import WeightSplitter

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_NAME_ATTRS = ("global_symbol",)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a graph.

    `func`: fused and not yet scheduled. `key`: its structural hash without names, in hexadecimal, equal in every
    process. `name`: the operators fused in it, for people. `count`: how often the graph launches it.
    """

    func: tirx.PrimFunc
    key: str
    name: str
    count: int


@dataclass(frozen=True)
class Lowered:
    """A graph down to calls of fused, unscheduled PrimFuncs.

    `mod`: its `main` reads the inputs, weights, and the `derived` values which `weight_only`'s `main` makes of `weights`.
    """

    mod: tvm.IRModule
    weight_only: tvm.IRModule | None
    derived: tuple[str, ...]
    weights: dict[str, tvm.runtime.Tensor]


class Lowering:
    """The way from a graph to its kernels for one target; remembers operators, so that one object should serve a search."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._legalize = Legalizer(target)
        self._split = WeightSplitter()
        self._fuse = tvm.transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])
        self._keys: dict[tirx.PrimFunc, str] = {}

    def lower(self, mod: tvm.IRModule, *, weight_work: bool = True) -> Lowered:
        """Legalise, divide off the weight-only work, and fuse. KernelError for an operator without a kernel.

        Without `weight_work` the weight-only part is not lowered (a search does not need it).
        """
        detached = detach(mod)
        legal, prim_funcs = self._legalize(detached.mod["main"])
        split = self._split(legal)
        weight_only = None
        if weight_work and split.weight_only is not None:
            weight_only = self._fused(split.weight_only, prim_funcs)
        return Lowered(self._fused(split.main, prim_funcs), weight_only, split.derived, detached.weights)

    def kernels(self, mod: tvm.IRModule) -> list[Kernel]:
        """The kernels of `mod`, equal ones merged, in the order of their first launch; weight-only work is not among them."""
        lowered = self.lower(mod, weight_work=False).mod
        prim_funcs: dict[str, tirx.PrimFunc] = {}
        counts: dict[str, int] = {}
        names: dict[str, str] = {}
        for binding in lowered["main"].body.blocks[0].bindings:
            value = binding.value
            if not isinstance(value, relax.Call) or value.op != _CALL_TIR:
                continue
            func = lowered[value.args[0]]
            key = self._key(func)
            prim_funcs.setdefault(key, func)
            names.setdefault(key, value.args[0].name_hint)
            counts[key] = counts.get(key, 0) + 1
        return [Kernel(func, key, names[key], counts[key]) for key, func in prim_funcs.items()]

    def _fused(self, main: relax.Function, prim_funcs: dict[tvm.ir.GlobalVar, tirx.PrimFunc]) -> tvm.IRModule:
        mod = tvm.IRModule({tvm.ir.GlobalVar("main"): main, **prim_funcs})
        mod = relax.transform.DeadCodeElimination(["main"])(self._fuse(mod))
        check_lowered(mod)
        return mod

    def _key(self, func: tirx.PrimFunc) -> str:
        return kernel_key(func)


def kernel_key(func: tirx.PrimFunc) -> str:
    """The structural hash of `func` without its name attributes: 16 hexadecimal digits, the same in every process."""
    for attr in _NAME_ATTRS:
        if func.attrs is not None and attr in func.attrs:
            func = func.without_attr(attr)
    return f"{tvm_ffi.structural_hash(func) & 0xFFFFFFFFFFFFFFFF:016x}"


def extract_kernels(mod: tvm.IRModule, target: Target) -> list[Kernel]:
    """The kernels that `mod` (bound or working form) compiles to for `target`. For many graphs hold a `Lowering`."""
    return Lowering(target).kernels(mod)
