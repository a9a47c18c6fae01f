"""What a graph compiles to: lowering to fused, unscheduled PrimFuncs, and the list of kernels among them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import tvm
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.dataflow import Dataflow, Node
from rlflow_tvm.ir import detach

from .choice import Chooser, heuristic_choice
from .cuda.layout import channels_last
from .fuse import FusedCall, Fuser
from .legalize import Legalizer, check_lowered
from .split import Split, WeightSplitter, make_function


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
class Launch:
    """One launch in a graph. `operands`: the number of the tensor behind each parameter, inputs first, then results."""

    func: tirx.PrimFunc
    key: str
    name: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Launches:
    """A graph's launches in order, and which of their tensors are not made by them, or outlive the run."""

    launches: tuple[Launch, ...]
    inputs: frozenset[int]
    weights: frozenset[int]
    outputs: frozenset[int]


@dataclass(frozen=True)
class Lowered:
    """A graph down to calls of fused, unscheduled PrimFuncs.

    `mod`: its `main` reads inputs, weights, and the `derived` values that `weight_only`'s `main` makes of weights.
    """

    mod: tvm.IRModule
    weight_only: tvm.IRModule | None
    derived: tuple[str, ...]
    weights: dict[str, tvm.runtime.Tensor]


class Lowering:
    """The way from a graph to its kernels for one target; remembers operators and groups: let one serve a search.

    `choose` decides where an operator has several implementations, once for each distinct call.
    """

    def __init__(self, target: Target, choose: Chooser = heuristic_choice) -> None:
        self.target = target
        self._legalize = Legalizer(target, choose)
        self._split = WeightSplitter()
        self._fuse = Fuser()

    def lower(self, mod: tvm.IRModule) -> Lowered:
        """Legalise, divide off the weight-only work, and fuse. KernelError for an operator without a kernel."""
        detached = detach(mod)
        split, prim_funcs = self._divide(detached.mod)
        weight_only = None if split.weight_only is None else self._module(split.weight_only, prim_funcs)
        return Lowered(self._module(split.main, prim_funcs), weight_only, split.derived, detached.weights)

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
        return _numbered(split.main, self._fuse(split.main, prim_funcs))

    def _divide(self, mod: tvm.IRModule | Dataflow) -> tuple[Split, dict[str, tirx.PrimFunc]]:
        """Of a module in the working form."""
        if self.target.kind.name == "cuda":
            mod = channels_last(mod.module if isinstance(mod, Dataflow) else mod)
        legal, prim_funcs = self._legalize(mod if isinstance(mod, Dataflow) else Dataflow.from_module(mod))
        return self._split(legal), prim_funcs

    def _module(self, main: Dataflow, prim_funcs: dict[str, tirx.PrimFunc]) -> tvm.IRModule:
        """The module of the launches of `main` (legalised)."""
        check_lowered(main)
        builder = relax.BlockBuilder()
        callees: dict[str, tvm.ir.GlobalVar] = {}
        nodes: list[Node] = []
        for step in self._fuse(main, prim_funcs):
            if not isinstance(step, FusedCall):
                nodes.append(step)
                continue
            if step.key not in callees:
                callees[step.key] = builder.add_func(step.func, step.name)
            original = step.output.value
            args = [callees[step.key], relax.Tuple(step.args), *original.args[2:]]
            value = relax.Call(original.op, args, original.attrs, original.ty_args)
            relax.expr._update_type(value, original.ty)
            nodes.append(Node.of(step.output.var, value))
        mod = builder.finalize()
        mod["main"] = make_function(Dataflow(main.params, main.inputs, nodes, main.output))
        return mod


def _numbered(main: Dataflow, steps: list[FusedCall | Node]) -> Launches:
    held: dict[relax.Expr, tuple[int, ...]] = {}
    numbers = count()

    def of(value: relax.Expr) -> tuple[int, ...]:
        """The tensors that a value consists of; what is none of `main`'s variables is a constant of its own."""
        known = held.get(value)
        if known is not None:
            return known
        if isinstance(value, relax.Tuple):
            return tuple(number for field in value.fields for number in of(field))
        if isinstance(value, relax.TupleGetItem):
            fields = of(value.tuple_value)
            flat = len(fields) == len(value.tuple_value.ty.fields)
            return (fields[value.index],) if flat else fields
        if isinstance(value, relax.Call):  # a view
            return of(value.args[0]) if value.args else ()
        held[value] = tuple(next(numbers) for _ in range(_tensors(value.ty)))
        return held[value]

    given, weights = (
        frozenset(n for p in params for n in of(p))
        for params in (main.params[: main.inputs], main.params[main.inputs :])
    )
    launches: list[Launch] = []
    constants: set[int] = set()
    for step in steps:
        if isinstance(step, FusedCall):
            operands: list[int] = []
            for arg in step.args:
                tensors = held.get(arg)
                if tensors is None:
                    tensors = of(arg)
                    constants.update(tensors)
                operands += tensors
            operands += of(step.output.var)
            launches.append(Launch(step.func, step.key, step.name, tuple(operands)))
        else:
            held[step.var] = of(step.value)
    return Launches(tuple(launches), given, weights | constants, frozenset(of(main.output)))


def _tensors(ty: relax.Type) -> int:
    """How many tensors a value of this type holds."""
    if isinstance(ty, relax.TupleType):
        return sum(map(_tensors, ty.fields))
    return int(isinstance(ty, relax.TensorType))


def extract_kernels(mod: tvm.IRModule, target: Target) -> list[Kernel]:
    """The kernels that `mod` (bound or working form) compiles to for `target`. For many graphs hold a `Lowering`."""
    return Lowering(target).kernels(mod)
