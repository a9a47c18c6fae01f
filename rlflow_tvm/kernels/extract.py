"""What a graph compiles to: lowering to fused, unscheduled PrimFuncs, and the list of kernels among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.dataflow import Dataflow, Node
from rlflow_tvm.ir import detach
from rlflow_tvm.rows import RowLifter
from rlflow_tvm.transposed import TransposedConvolutions
from rlflow_tvm.volumes import VolumeLifter

from .check import check_lowered
from .choice import Chooser, heuristic_choice
from .cuda.layout import channels_last
from .fuse import FusedCall, Fuser
from .launches import Launch, Launches, number_launches
from .legalize import Legalizer
from .split import Split, WeightSplitter, make_function
from .target import as_target


@dataclass(frozen=True)
class Kernel:
    """One kernel of a graph.

    `func`: fused and not yet scheduled. `key`: its structural hash without names, in hexadecimal, equal in every
    process. `name`: the operators fused in it, for people. `count`: how often the graph launches it. `cold`: a
    digit for each parameter, how far from the processor it is then (`rlflow_tvm.cost.temperature`); "" where nothing is
    known.
    """

    func: tirx.PrimFunc
    key: str
    name: str
    count: int
    cold: str = ""


@dataclass(frozen=True)
class Lowered:
    """A graph down to calls of fused, unscheduled PrimFuncs.

    `mod`: its function `entry` reads inputs, weights, and the `derived` values that `weight_only`'s `main` makes of
    weights.
    """

    mod: tvm.IRModule
    weight_only: tvm.IRModule | None
    derived: tuple[str, ...]
    weights: dict[str, tvm.runtime.Tensor]
    entry: str = "main"

    @property
    def function(self) -> relax.Function:
        return self.mod[self.entry]


class KernelNames:
    """A name for each kernel of a module, none of them that of another function (`taken`)."""

    def __init__(self, taken: Iterable[str] = ("main",)) -> None:
        nothing = tirx.PrimFunc([], tirx.Evaluate(tirx.IntImm("int32", 0)))
        self._builder = relax.BlockBuilder(tvm.IRModule(dict.fromkeys(taken, nothing)))
        self._callees: dict[tuple, tvm.ir.GlobalVar] = {}

    def of(self, call: FusedCall) -> tvm.ir.GlobalVar:
        # functions of one key differ in their `unit_axes`, which callers see
        key = (call.key, *(len(param.ty.shape) for param in call.func.params if isinstance(param.ty, tirx.BufferType)))
        if key not in self._callees:
            self._callees[key] = self._builder.add_func(call.func, call.name)
        return self._callees[key]


class Lowering:
    """The way from a graph to its kernels for one target; remembers operators and groups: let one serve a search.

    `choose` decides where an operator has several implementations, once for each distinct call.
    """

    def __init__(self, target: Target, choose: Chooser = heuristic_choice) -> None:
        self.target = target
        self._rows, self._volumes = RowLifter(), VolumeLifter()
        self._plain = TransposedConvolutions()
        self._legalize = Legalizer(target, choose)
        self._split = WeightSplitter()
        # a GPU's product writes its results from the threads that sum them: too few for a larger output
        self._fuse = Fuser(stretching=target.kind.name != "cuda")

    def lower(self, mod: tvm.IRModule, entry: str = "main", names: KernelNames | None = None) -> Lowered:
        """Legalise, divide off the weight-only work, and fuse. KernelError for an operator without a kernel.

        Where the graph is one of several in a module, `entry` is what its `main` is called there; the `names` of its
        kernels are shared with the others.
        """
        detached = detach(mod)
        split, prim_funcs = self._divide(detached.mod)
        early = split.weight_only
        weight_only = None if early is None else self._module(early, prim_funcs, "main", KernelNames())
        lowered = self._module(split.main, prim_funcs, entry, KernelNames() if names is None else names)
        return Lowered(lowered, weight_only, split.derived, detached.weights, entry)

    def kernels(self, mod: tvm.IRModule | Dataflow) -> list[Kernel]:
        """The kernels of `mod`, equal ones merged, in the order of their first launch; without the weight-only work."""
        calls: dict[str, list[Launch]] = {}
        for launch in self.launches(mod).launches:
            calls.setdefault(launch.key, []).append(launch)
        return [Kernel(same[0].func, key, same[0].name, len(same)) for key, same in calls.items()]

    def launches(self, mod: tvm.IRModule | Dataflow) -> Launches:
        """The launches of `mod` and the tensors that they read and write; without the weight-only work."""
        split, prim_funcs = self._divide(mod if isinstance(mod, Dataflow) else detach(mod).mod)
        check_lowered(split.main)
        return number_launches(split.main, self._fuse(split.main, prim_funcs))

    def _divide(self, mod: tvm.IRModule | Dataflow) -> tuple[Split, dict[str, tirx.PrimFunc]]:
        """Of a module in the working form."""
        flow = mod if isinstance(mod, Dataflow) else Dataflow.from_module(mod)
        flow = self._plain(self._rows(self._volumes(flow)))
        if self.target.kind.name == "cuda":
            flow = Dataflow.from_module(channels_last(flow.module))
        legal, prim_funcs = self._legalize(flow)
        return self._split(legal), prim_funcs

    def _module(
        self, main: Dataflow, prim_funcs: dict[str, tirx.PrimFunc], entry: str, names: KernelNames
    ) -> tvm.IRModule:
        """The module of the launches of `main` (legalised)."""
        check_lowered(main)
        kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        nodes: list[Node] = []
        for step in self._fuse(main, prim_funcs):
            if not isinstance(step, FusedCall):
                nodes.append(step)
                continue
            callee = names.of(step)
            kernels[callee] = step.func
            original = step.output.value
            args = [callee, relax.Tuple(step.args), *original.args[2:]]
            value = relax.Call(original.op, args, original.attrs, original.ty_args)
            relax.expr._update_type(value, original.ty)
            nodes.append(Node.of(step.output.var, value))
        mod = tvm.IRModule(kernels)
        mod[entry] = make_function(Dataflow(main.params, main.inputs, nodes, main.output), entry)
        return mod


def extract_kernels(mod: tvm.IRModule, target: Target | str | dict) -> list[Kernel]:
    """The kernels that `mod` (bound or working form) compiles to for `target`. For many graphs hold a `Lowering`."""
    return Lowering(as_target(target)).kernels(mod)
