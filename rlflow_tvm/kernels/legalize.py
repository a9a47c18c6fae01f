"""From Relax operators to PrimFuncs, each distinct operator call legalised once and remembered.

`relax.transform.LegalizeOps` builds a PrimFunc afresh for every call (180 ms for BERT-Base). Here a call is legalised
in a module of its own, and the result kept as a template under (operator, attributes, argument types, small constants);
the next equal call only fills the template in. Reshapes whose shapes are static stay Relax calls: they cost nothing
at run time (the virtual machine makes a view), so they are no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from rlflow_tvm.errors import KernelError
from rlflow_tvm.ir import num_inputs

from .cuda.legalize import CUDA_LEGALIZE
from .cuda.matmul_legalize import is_weight_product, legalize_weight_matmul
from .llvm.conv_legalize import CONV_LEGALIZE
from .llvm.matmul_legalize import is_packable, make_packed_matmul
from .split import all_bindings, substitute, variables_of
from .target import vector_lanes

Key = tuple
LegalizeFunc = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

LEGALIZE: dict[str, dict[str, LegalizeFunc]] = {"llvm": CONV_LEGALIZE, "cuda": CUDA_LEGALIZE}
"""Kind of target -> operators that are legalised in another way than TVM's."""

_RESHAPES = frozenset({"relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten"})
_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_MATMUL = tvm.ir.Op.get("relax.matmul")
_TRANSPOSE = "relax.permute_dims"
_RUN_BY_THE_MACHINE = frozenset({"relax.reshape", "relax.shape_of", "relax.tensor_to_shape", "relax.null_value"})
_REMEMBERED_BINDINGS = 50_000


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

    def __init__(self, target: Target) -> None:
        self._target = target
        table = LEGALIZE[target.kind.name]
        self._legalize_any = _legalize_pass(table)
        # products with a weight: its packing is weight-only work
        self._is_packable, legalize_packed = _weight_products(target)
        self._legalize_packed = _legalize_pass({**table, "relax.matmul": legalize_packed})
        self._templates: dict[Key, _Template] = {}
        self._global_vars: dict[str, tvm.ir.GlobalVar] = {}
        self._prim_funcs: dict[str, tirx.PrimFunc] = {}
        self._bindings: dict[tuple[relax.Binding, bool], _Legal] = {}

    def __call__(self, func: relax.Function) -> tuple[relax.Function, dict[str, tirx.PrimFunc]]:
        """`func` (one dataflow block) with its operators as `call_tir`, and the PrimFuncs that it calls, by name."""
        if len(self._bindings) > _REMEMBERED_BINDINGS:
            self._bindings.clear()
        used: dict[str, None] = {}
        bindings: list[relax.Binding] = []
        constant = set(func.params[num_inputs(func) :])
        for binding in all_bindings(func):
            call = binding.value
            packed = _is_matmul(call) and call.args[1] in constant
            packed = packed and ((binding, True) in self._bindings or self._is_packable(call))
            known = self._bindings.get((binding, packed))
            if known is None:
                known = self._bindings[binding, packed] = self._legalize(binding, packed)
            bindings.extend(known.bindings)
            used.update(dict.fromkeys(known.prim_funcs))
            if all(var in constant for var in known.reads):
                constant.add(binding.var)
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], func.body.body)
        relax.expr._update_type(body, func.body.body.ty)
        legal = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        prim_funcs = {name: self._prim_funcs[name] for name in used}
        if any(isinstance(b.value, relax.Tuple) for b in bindings):
            # a decomposed batch norm leaves (a, b, c)[0]: resolve it, fusion stops at tuples
            callees = {self._global_vars[name]: func for name, func in prim_funcs.items()}
            mod = tvm.IRModule({tvm.ir.GlobalVar("main"): legal, **callees})
            legal = relax.transform.CanonicalizeBindings()(mod)["main"]
        return legal, prim_funcs

    def _legalize(self, binding: relax.Binding, packed: bool) -> _Legal:
        call = binding.value
        variables = variables_of(call)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or call.op == _CALL_TIR:
            return _Legal((binding,), (), tuple(variables))
        if is_free_reshape(call):
            view = relax.op.reshape(call.args[0], binding.var.ty.shape)
            return _Legal((_bind(binding.var, view, binding.var.ty),), (), tuple(variables))
        variables = []
        arguments = [_argument_key(arg, variables) for arg in call.args]
        key = (call.op.name, packed, _attrs_key(call.attrs), *arguments)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._make_template(call, variables, packed)
        return self._fill_in(template, variables, binding.var)

    def _make_template(self, call: relax.Call, variables: list[relax.Var], packed: bool) -> _Template:
        params = [relax.Var(f"x{i}", var.ty) for i, var in enumerate(variables)]
        inputs = iter(params)
        alone = relax.Call(call.op, [_rename(arg, inputs) for arg in call.args], call.attrs, call.ty_args)
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                output = builder.emit_output(alone)
            builder.emit_func_output(output)
        module = builder.finalize()
        if not _is_training(call):
            module = relax.transform.DecomposeOpsForInference()(module)
        with self._target:
            module = (self._legalize_packed if packed else self._legalize_any)(module)
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


def _weight_products(target: Target) -> tuple[Callable[[relax.Call], bool], LegalizeFunc]:
    """Which products with a weight have their weight packed for `target`, and their legalisation."""
    if target.kind.name == "cuda":
        return is_weight_product, legalize_weight_matmul
    return is_packable, make_packed_matmul(vector_lanes(target))


def _legalize_pass(customize: dict[str, LegalizeFunc]) -> tvm.transform.Pass:
    return tvm.transform.Sequential(
        [
            relax.backend.DispatchSampling(),
            relax.backend.DispatchSortScan(),
            relax.transform.LegalizeOps(customize),
            relax.transform.AnnotateTIROpPattern(),
        ]
    )


def _is_training(call: relax.Call) -> bool:
    """Whether it is a batch norm over the statistics of its batch, which the form for inference does not compute."""
    return call.op.name == "relax.nn.batch_norm" and bool(call.attrs.training)


def _is_matmul(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and value.op == _MATMUL


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
