"""From Relax operators to PrimFuncs, each distinct operator call legalised once and remembered.

`relax.transform.LegalizeOps` builds a PrimFunc afresh for every call (180 ms for BERT-Base). Here a call is legalised
in a module of its own, and the result kept as a template under (operator, attributes, argument types, small constants);
the next equal call only fills the template in. Reshapes whose shapes are static stay Relax calls: they cost nothing
at run time (the virtual machine makes a view), so they are no kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.errors import KernelError, RlflowError
from rlflow_tvm.ir import num_inputs

from .choice import Choice, Chooser, Implementation, LegalizeFunc, heuristic_choice
from .cuda import legalize as cuda
from .extrema import EXTREMA
from .llvm import implementations as llvm
from .split import all_bindings, substitute, variables_of

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
_TRANSPOSE = "relax.permute_dims"
_RUN_BY_THE_MACHINE = frozenset({"relax.reshape", "relax.shape_of", "relax.tensor_to_shape", "relax.null_value"})
_REMEMBERED_BINDINGS = 50_000
_SCHEDULED_ATTR = "tirx.is_scheduled"


@dataclass(frozen=True)
class _Template:
    """What one operator call becomes: bindings over `params` (the call's variables, in order), the last its value."""

    params: tuple[relax.Var, ...]
    bindings: tuple[relax.VarBinding, ...]


@dataclass(frozen=True)
class _Legal:
    """One binding legalised: the bindings in its place, the PrimFuncs they call, the variables it read."""

    bindings: tuple[relax.Binding, ...]
    prim_funcs: tuple[str, ...]
    reads: tuple[relax.Var, ...]


class Legalizer:
    """Legalises functions in working form; holds the memo, so that one object should serve many graphs."""

    def __init__(self, target: Target, choose: Chooser = heuristic_choice) -> None:
        self._target = target
        self._choose = choose
        self._legalize_table = LEGALIZE[target.kind.name]
        self._implementations = IMPLEMENTATIONS[target.kind.name]
        self._passes: dict[tuple[str, str] | None, tvm.transform.Pass] = {None: _legalize_pass(self._legalize_table)}
        self._templates: dict[Key, _Template] = {}
        self._global_vars: dict[str, tvm.ir.GlobalVar] = {}
        self._prim_funcs: dict[str, tirx.PrimFunc] = {}
        self._given: dict[tirx.PrimFunc, tvm.ir.GlobalVar] = {}
        self._bindings: dict[tuple[relax.Binding, bool | tirx.PrimFunc], _Legal] = {}

    def __call__(
        self, func: relax.Function, given: Mapping[str, tirx.PrimFunc] | None = None
    ) -> tuple[relax.Function, dict[str, tirx.PrimFunc]]:
        """`func` (one dataflow block) with its operators as `call_tir`, and the PrimFuncs that it calls, by name.

        `given`: the PrimFuncs that `func` calls already, by the names by which it does; they get names of their own.
        """
        if len(self._bindings) > _REMEMBERED_BINDINGS:
            self._bindings.clear()
        used: dict[str, None] = {}
        bindings: list[relax.Binding] = []
        constant = set(func.params[num_inputs(func) :])
        for binding in all_bindings(func):
            callee = _callee(binding.value, given or {})
            weight = self._has_implementations(binding.value) and binding.value.args[1] in constant
            key = (binding, weight if callee is None else callee)
            known = self._bindings.get(key)
            if known is None:
                legal = self._legalize(binding, weight) if callee is None else self._adopt(binding, callee)
                known = self._bindings[key] = legal
            bindings.extend(known.bindings)
            used.update(dict.fromkeys(known.prim_funcs))
            if all(var in constant for var in known.reads):
                constant.add(binding.var)
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], func.body.body)
        relax.expr._update_type(body, func.body.body.ty)
        legal_func = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        prim_funcs = {name: self._prim_funcs[name] for name in used}
        if any(isinstance(b.value, relax.Tuple) for b in bindings):
            # a decomposed batch norm leaves (a, b, c)[0]: resolve it, fusion stops at tuples
            callees = {self._global_vars[name]: func for name, func in prim_funcs.items()}
            mod = tvm.IRModule({tvm.ir.GlobalVar("main"): legal_func, **callees})
            legal_func = relax.transform.CanonicalizeBindings()(mod)["main"]
        return legal_func, prim_funcs

    def _adopt(self, binding: relax.Binding, prim_func: tirx.PrimFunc) -> _Legal:
        """A call of a PrimFunc of the module's own, under a name that no other has."""
        call = binding.value
        if prim_func not in self._given:
            annotated = prim_func
            if prim_func.attrs is None or _SCHEDULED_ATTR not in prim_func.attrs:  # nothing fuses with a scheduled one
                alone = tvm.IRModule({call.args[0]: prim_func})
                annotated = relax.transform.AnnotateTIROpPattern()(alone)[call.args[0].name_hint]
            self._given[prim_func] = self._add(call.args[0], annotated)
        global_var = self._given[prim_func]
        renamed = relax.Call(call.op, [global_var, *call.args[1:]], call.attrs, call.ty_args)
        return _Legal((_bind(binding.var, renamed, call.ty),), (global_var.name_hint,), tuple(variables_of(call)))

    def _legalize(self, binding: relax.Binding, weight: bool) -> _Legal:
        call = binding.value
        variables = variables_of(call)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or call.op == _CALL_TIR:
            return _Legal((binding,), (), tuple(variables))
        if is_free_reshape(call):
            view = relax.op.reshape(call.args[0], binding.var.ty.shape)
            return _Legal((_bind(binding.var, view, binding.var.ty),), (), tuple(variables))
        variables = []
        arguments = [_argument_key(arg, variables) for arg in call.args]
        key = (call.op.name, weight, _attrs_key(call.attrs), *arguments)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._make_template(call, variables, weight)
        return self._fill_in(template, variables, binding.var)

    def _make_template(self, call: relax.Call, variables: list[relax.Var], weight: bool) -> _Template:
        params = [relax.Var(f"x{i}", var.ty) for i, var in enumerate(variables)]
        inputs = iter(params)
        alone = relax.Call(call.op, [_rename(arg, inputs) for arg in call.args], call.attrs, call.ty_args)
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                output = builder.emit_output(alone)
            builder.emit_func_output(output)
        module = builder.finalize()
        try:
            if not _is_training(call):
                module = relax.transform.DecomposeOpsForInference()(module)
            with self._target:
                module = self._pass_for(alone, weight)(module)
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
        return _Template(tuple(main.params), tuple(bindings))

    def _has_implementations(self, value: relax.Expr) -> bool:
        return (
            isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name in self._implementations
        )

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
        hint, count = origin.name_hint, 0
        name = hint
        while name in self._prim_funcs:
            if tvm_ffi.structural_equal(self._prim_funcs[name], prim_func):
                return self._global_vars[name]
            count += 1
            name = f"{hint}{count}"
        self._prim_funcs[name] = prim_func
        global_var = self._global_vars[name] = tvm.ir.GlobalVar(name)
        relax.expr._update_type(global_var, origin.ty)
        return global_var

    def _fill_in(self, template: _Template, variables: list[relax.Var], output: relax.Var) -> _Legal:
        values: dict[relax.Var, relax.Expr] = dict(zip(template.params, variables, strict=True))
        bindings: list[relax.Binding] = []
        used: list[str] = []
        for i, binding in enumerate(template.bindings):
            last = i == len(template.bindings) - 1
            value = binding.value
            if isinstance(value, relax.Call) and value.op == _CALL_TIR:
                used.append(value.args[0].name_hint)
            new = substitute(value, values)
            var = output if last else _inner_var(output, binding.var)
            values[binding.var] = var
            bindings.append(_bind(var, new, binding.var.ty))
        return _Legal(tuple(bindings), tuple(used), tuple(variables))


def _legalize_pass(customize: dict[str, LegalizeFunc]) -> tvm.transform.Pass:
    return tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps({**EXTREMA, **customize}),
            relax.transform.AnnotateTIROpPattern(),
        ]
    )


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


def _callee(value: relax.Expr, given: Mapping[str, tirx.PrimFunc]) -> tirx.PrimFunc | None:
    """The PrimFunc of the module's own that `value` calls, None where it calls none."""
    if not isinstance(value, relax.Call) or value.op != _CALL_TIR:
        return None
    return given.get(value.args[0].name_hint)


def _is_training(call: relax.Call) -> bool:
    """Whether it is a batch norm over the statistics of its batch, which the form for inference does not compute."""
    return call.op.name == "relax.nn.batch_norm" and bool(call.attrs.training)


def is_free_reshape(call: relax.Call) -> bool:
    """Whether the call only views its argument in another static shape (no data is moved)."""
    name = call.op.name
    if name not in _RESHAPES and name != _TRANSPOSE:
        return False
    source, target = _static_shape(call.args[0].ty), _static_shape(call.ty)
    if source is None or target is None:
        return False
    if name != _TRANSPOSE:
        return True
    axes = call.attrs.axes
    order = range(len(source))[::-1] if axes is None else [int(a) % len(source) for a in axes]
    moved = [axis for axis in order if source[axis] != 1]
    return moved == sorted(moved)


def _static_shape(ty: relax.Type) -> tuple[int, ...] | None:
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    extents = list(ty.shape)
    if not all(isinstance(e, tirx.IntImm) for e in extents):
        return None
    return tuple(int(e) for e in extents)


def _attrs_key(attrs: tvm.ir.Attrs | None) -> int:
    return 0 if attrs is None else tvm_ffi.structural_hash(attrs)


def _type_key(ty: relax.Type) -> Key | str:
    if isinstance(ty, relax.TensorType):
        shape = _static_shape(ty)
        if shape is not None:
            return (str(ty.dtype), *shape)
    return str(ty)


def _argument_key(arg: relax.Expr, variables: list[relax.Var]) -> Key | str:
    """The argument's part of a call's key; its variables are appended to `variables`, in order."""
    if isinstance(arg, relax.Var):
        variables.append(arg)
        return _type_key(arg.ty)
    if isinstance(arg, relax.Tuple):
        return ("tuple", *(_argument_key(field, variables) for field in arg.fields))
    if isinstance(arg, tvm.ir.GenericConst):
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


def _inner_var(output: relax.Var, var: relax.Var) -> relax.Var:
    return relax.DataflowVar(f"{output.name}_{var.name}", var.ty)


def _bind(var: relax.Var, value: relax.Expr, ty: relax.Type) -> relax.VarBinding:
    if isinstance(value, relax.Call):  # tuples and their members know their type
        relax.expr._update_type(value, ty)
    return relax.VarBinding(var, value)


def check_lowered(func: relax.Function) -> None:
    """KernelError if an operator is left that the virtual machine cannot run (its legalisation gave it back)."""
    left = set()
    for binding in all_bindings(func):
        value = binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            raise KernelError(
                f"main calls the function {value.op.name_hint}: inline it with relax.transform.InlinePrivateFunctions"
            )
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            name = value.op.name
            known = name in _RUN_BY_THE_MACHINE or name.startswith("relax.call_")
            if not known and value.op.get_attr("FCallPacked") is None:
                left.add(name)
    if left:
        raise KernelError(
            f"no kernel is known for {', '.join(sorted(left))} with these attributes: "
            "rewrite or decompose the operator before building"
        )
