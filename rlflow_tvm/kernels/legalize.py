"""From Relax operators to PrimFuncs, each distinct operator call legalised once and remembered.

`relax.transform.LegalizeOps` builds a PrimFunc afresh for every call (180 ms for BERT-Base). Here a call is legalised
in a module of its own, and the result kept as a template under (operator, attributes, argument types, small constants);
the next equal call only fills the template in. Reshapes whose shapes are static stay Relax calls: they cost nothing
at run time (the virtual machine makes a view), so they are no kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.dataflow import Dataflow, Node, Template, bound, canonical
from rlflow_tvm.errors import KernelError, RlflowError
from rlflow_tvm.ir import CALL_IN_PLACE, known_shape

from .adopt import adopted
from .attention import ATTENTION
from .choice import Choice, Chooser, Implementation, LegalizeFunc, heuristic_choice
from .cuda import legalize as cuda
from .extrema import EXTREMA
from .half import is_half_sum, sum_in_float32
from .llvm import implementations as llvm
from .norms import NORMS
from .target import default_target

Key = tuple

LEGALIZE: dict[str, dict[str, LegalizeFunc]] = {"llvm": llvm.LEGALIZE, "cuda": cuda.LEGALIZE}
"""Kind of target -> operators that are legalised in another way than TVM's."""

IMPLEMENTATIONS: dict[str, dict[str, tuple[Implementation, ...]]] = {
    "llvm": llvm.IMPLEMENTATIONS,
    "cuda": cuda.IMPLEMENTATIONS,
}
"""Kind of target -> operators that are legalised in one of several ways."""

_RESHAPES = frozenset({"relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten"})
_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_RESHAPE = tvm.ir.Op.get("relax.reshape")
_TRANSPOSE = "relax.permute_dims"
_REMEMBERED_BINDINGS = 50_000


@dataclass(frozen=True)
class _Legal:
    """One node legalised: the nodes in its place, the PrimFuncs they call, whether one of them binds a tuple."""

    nodes: tuple[Node, ...]
    prim_funcs: tuple[str, ...]
    tuples: bool

    @staticmethod
    def of(nodes: Sequence[Node], prim_funcs: Sequence[str] = ()) -> _Legal:
        return _Legal(tuple(nodes), tuple(prim_funcs), any(isinstance(node.value, relax.Tuple) for node in nodes))


class Legalizer:
    """Legalises functions in working form; holds the memo, so that one object should serve many graphs."""

    def __init__(self, target: Target, choose: Chooser = heuristic_choice) -> None:
        self._target = target
        self._choose = choose
        self._legalize_table = LEGALIZE[target.kind.name]
        self._implementations = IMPLEMENTATIONS[target.kind.name]
        self._passes: dict[tuple[str, str] | None, tvm.transform.Pass] = {None: _legalize_pass(self._legalize_table)}
        # work on weights alone is done on the host: what a GPU's legalisation makes of a sort binds threads
        self._host = None if target.kind.name == "llvm" else default_target()
        self._host_pass = _legalize_pass(LEGALIZE["llvm"])
        self._templates: dict[Key, Template] = {}
        self._global_vars: dict[str, tvm.ir.GlobalVar] = {}
        self._prim_funcs: dict[str, tirx.PrimFunc] = {}
        self._alike: dict[tuple[str, int], list[str]] = {}  # of one hint and one hash
        self._counts: dict[str, int] = {}  # of each hint, of the last name made of it
        self._given: dict[tirx.PrimFunc, tvm.ir.GlobalVar] = {}
        self._second: dict[relax.Binding, relax.Expr] = {}
        self._legal: dict[tuple[relax.Binding, bool | tirx.PrimFunc, bool], _Legal] = {}

    def __call__(self, flow: Dataflow) -> tuple[Dataflow, dict[str, tirx.PrimFunc]]:
        """`flow` with its operators as `call_tir`, and the PrimFuncs that it calls, by name.

        The PrimFuncs that it calls already get names of their own.
        """
        if len(self._legal) > _REMEMBERED_BINDINGS:
            self._second.clear()
            self._legal.clear()
        given = {gv.name_hint: func for gv, func in flow.prim_funcs.items()}
        used: dict[str, None] = {}
        nodes: list[Node] = []
        tuples = False
        constant = set(flow.params[flow.inputs :])
        for node in flow.nodes:
            callee = _callee(node, given) if given else None
            weight = node.op in self._implementations and self._second_operand(node) in constant
            on_host = self._host is not None and constant.issuperset(node.inputs)
            key = (node.binding, weight if callee is None else callee, on_host)
            legal = self._legal.get(key)
            if legal is None:
                legal = self._legalize(node, weight, on_host) if callee is None else self._adopt(node, callee)
                self._legal[key] = legal
            nodes += legal.nodes
            for name in legal.prim_funcs:
                used[name] = None
            tuples = tuples or legal.tuples
            if constant.issuperset(node.inputs):
                constant.add(node.var)
        prim_funcs = {name: self._prim_funcs[name] for name in used}
        result = Dataflow(flow.params, flow.inputs, nodes, flow.output, flow.attrs)
        return self._without_tuples(result, prim_funcs) if tuples else result, prim_funcs

    def _second_operand(self, node: Node) -> relax.Expr:
        """Canonical where it is a variable."""
        if node.binding not in self._second:
            operand = node.value.args[1]
            self._second[node.binding] = canonical(operand) if isinstance(operand, relax.Var) else operand
        return self._second[node.binding]

    def _without_tuples(self, flow: Dataflow, prim_funcs: dict[str, tirx.PrimFunc]) -> Dataflow:
        """A decomposed batch norm leaves (a, b, c)[0]: resolve it, fusion stops at tuples."""
        callees = {self._global_vars[name]: func for name, func in prim_funcs.items()}
        body = relax.SeqExpr([relax.DataflowBlock([node.binding for node in flow.nodes])], flow.output)
        relax.expr._update_type(body, flow.output.ty)
        main = relax.Function(list(flow.params), body, flow.output.ty, True, flow.attrs)
        mod = tvm.IRModule({tvm.ir.GlobalVar("main"): main, **callees})
        return Dataflow.from_function(relax.transform.CanonicalizeBindings()(mod)["main"])

    def _adopt(self, node: Node, prim_func: tirx.PrimFunc) -> _Legal:
        """A call of a PrimFunc of the module's own, under a name that no other has."""
        call = node.value
        if prim_func not in self._given:
            self._given[prim_func] = self._add(call.args[0], adopted(prim_func))
        global_var = self._given[prim_func]
        renamed = relax.Call(call.op, [global_var, *call.args[1:]], call.attrs, call.ty_args)
        return _Legal.of([bound(node.var, renamed, call.ty)], [global_var.name_hint])

    def _legalize(self, node: Node, weight: bool, on_host: bool) -> _Legal:
        call = node.value
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or call.op == _CALL_TIR:
            return _Legal.of([node])
        if is_free_reshape(call):
            # `relax.op.reshape` takes an extent of nothing for that of the operand
            view = relax.Call(_RESHAPE, [call.args[0], node.var.ty.shape])
            return _Legal.of([bound(node.var, view, node.var.ty)])
        arguments = [_argument_key(arg) for arg in call.args]
        key = (node.op, weight, on_host, _attrs_key(call.attrs), *map(str, call.ty_args), *arguments)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._make_template(call, node.inputs, weight, on_host)
        nodes = template.in_place_of(node)
        return _Legal.of(nodes, [each.value.args[0].name_hint for each in nodes if each.op == _CALL_TIR.name])

    def _make_template(self, call: relax.Call, variables: Sequence[relax.Var], weight: bool, on_host: bool) -> Template:
        target = self._host if on_host and self._host is not None else self._target
        params = [relax.Var(f"x{i}", var.ty) for i, var in enumerate(variables)]
        inputs = iter(params)
        alone = relax.Call(call.op, [_rename(arg, inputs) for arg in call.args], call.attrs, call.ty_args)
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                if is_half_sum(call, target):
                    alone = sum_in_float32(builder, alone)
                    output = builder.emit_output(relax.op.astype(builder.emit(alone), str(call.ty.dtype)))
                else:
                    output = builder.emit_output(alone)
            builder.emit_func_output(output)
        module = builder.finalize()
        legalize = self._host_pass if on_host else self._pass_for(alone, weight)
        try:
            if not _is_training(call):
                module = relax.transform.DecomposeOpsForInference()(module)
            with target:
                module = legalize(module)
        except RlflowError:
            raise
        except Exception as error:
            # The boundary to TVM's legalisations: they raise whatever fits them.
            types = ", ".join(str(_type_key(var.ty)) for var in variables)
            raise KernelError(
                f"TVM makes no kernel of {call.op.name} with operands {types} ({_last_line(error)}): "
                "rewrite or decompose the operator before building"
            ) from error
        main = module["main"]
        names: dict[str, tvm.ir.GlobalVar] = {}
        for global_var, prim_func in module.functions_items():
            if isinstance(prim_func, tirx.PrimFunc):
                names[global_var.name_hint] = self._add(global_var, prim_func)
        bindings: list[relax.VarBinding] = []
        for binding in (b for block in main.body.blocks for b in block.bindings):
            value = binding.value
            if isinstance(value, relax.Call) and value.op == _CALL_TIR:
                callee = names[value.args[0].name_hint]
                value = relax.Call(value.op, [callee, *value.args[1:]], value.attrs, value.ty_args)
            bindings.append(relax.VarBinding(binding.var, value))
        made = bindings[-1].var
        if isinstance(call.ty, relax.TensorType) and made.ty.dtype != call.ty.dtype:  # TVM's mean of int32 gives int64
            bindings.append(relax.VarBinding(relax.DataflowVar("gv", call.ty), self._cast(made, call.ty, on_host)))
        return Template(tuple(main.params), tuple(bindings))

    def _cast(self, var: relax.Var, ty: relax.TensorType, on_host: bool) -> relax.Call:
        """The call of a kernel that gives `var` in the element type of `ty`."""
        call = relax.BlockBuilder().normalize(relax.op.astype(var, ty.dtype))
        (cast,) = self._make_template(call, [var], False, on_host).bindings
        return relax.Call(cast.value.op, [cast.value.args[0], relax.Tuple([var])], cast.value.attrs, [ty])

    def _pass_for(self, call: relax.Call, weight: bool) -> tvm.transform.Pass:
        """The legalisation with the implementation that is chosen for `call`."""
        options = tuple(
            option for option in self._implementations.get(call.op.name, ()) if option.takes(call, weight, self._target)
        )
        if not options:
            return self._passes[None]
        choice = Choice(call, weight, self._target, options)
        chosen = options[0].name if len(options) == 1 else self._choose(choice)
        key = (call.op.name, chosen)
        if key not in self._passes:
            (option,) = (option for option in options if option.name == chosen)
            self._passes[key] = _legalize_pass({**self._legalize_table, call.op.name: option.legalize(self._target)})
        return self._passes[key]

    def _add(self, origin: tvm.ir.GlobalVar, prim_func: tirx.PrimFunc) -> tvm.ir.GlobalVar:
        hint = origin.name_hint
        alike = self._alike.setdefault((hint, tvm_ffi.structural_hash(prim_func)), [])
        for name in alike:
            if tvm_ffi.structural_equal(self._prim_funcs[name], prim_func):
                return self._global_vars[name]
        count = self._counts.get(hint, 0)
        while (name := f"{hint}{count or ''}") in self._prim_funcs:  # a hint may end in a number itself
            count += 1
        self._counts[hint] = count
        alike.append(name)
        self._prim_funcs[name] = prim_func
        global_var = self._global_vars[name] = tvm.ir.GlobalVar(name)
        relax.expr._update_type(global_var, origin.ty)
        return global_var


def _legalize_pass(customize: dict[str, LegalizeFunc]) -> tvm.transform.Pass:
    return tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps({**ATTENTION, **EXTREMA, **NORMS, **customize}),
            relax.transform.AnnotateTIROpPattern(),
        ]
    )


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _callee(node: Node, given: Mapping[str, tirx.PrimFunc]) -> tirx.PrimFunc | None:
    """The PrimFunc of the module's own that `node` calls, None where it calls none."""
    return given.get(node.value.args[0].name_hint) if node.op in (_CALL_TIR.name, CALL_IN_PLACE) else None


def _is_training(call: relax.Call) -> bool:
    """Whether it is a batch norm over the statistics of its batch, which the form for inference does not compute."""
    return call.op.name == "relax.nn.batch_norm" and bool(call.attrs.training)


def is_free_reshape(call: relax.Call) -> bool:
    """Whether the call only views its argument in another static shape (no data is moved)."""
    name = call.op.name
    if name not in _RESHAPES and name != _TRANSPOSE:
        return False
    source, target = known_shape(call.args[0].ty), known_shape(call.ty)
    if source is None or target is None:
        return False
    if name != _TRANSPOSE:
        return True
    axes = call.attrs.axes
    order = range(len(source))[::-1] if axes is None else [int(a) % len(source) for a in axes]
    moved = [axis for axis in order if source[axis] != 1]
    return moved == sorted(moved)


def _attrs_key(attrs: tvm.ir.Attrs | None) -> int:
    return 0 if attrs is None else tvm_ffi.structural_hash(attrs)


def _type_key(ty: relax.Type) -> Key | str:
    if isinstance(ty, relax.TensorType):
        shape = known_shape(ty)
        if shape is not None:
            return (str(ty.dtype), *shape)
    return str(ty)


def _argument_key(arg: relax.Expr) -> Key | str:
    """The argument's part of a call's key."""
    if isinstance(arg, relax.Var):
        return _type_key(arg.ty)
    if isinstance(arg, relax.Tuple):
        return ("tuple", *(_argument_key(field) for field in arg.fields))
    if isinstance(arg, tvm.ir.GenericConst) and isinstance(arg.ty, relax.TensorType):  # not an element type
        # its value belongs to the key: legalisation writes constants of one element into the PrimFunc
        value = arg.value.numpy()
        return ("const", str(value.dtype), value.shape, value.tobytes())
    return (type(arg).__name__, tvm_ffi.structural_hash(arg, map_free_vars=True))


def _rename(arg: relax.Expr, inputs: Iterator[relax.Var]) -> relax.Expr:
    if isinstance(arg, relax.Var):
        return next(inputs)
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_rename(field, inputs) for field in arg.fields])
    return arg
