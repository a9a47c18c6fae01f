"""Work that needs the weights only, taken out of `main`, so that it is done once, when the model is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from rlflow_tvm.ir import num_inputs

_SHAPE_OF = tvm.ir.Op.get("relax.shape_of")
_REMEMBERED = 50_000


@dataclass(frozen=True)
class Split:
    """A function in working form, divided.

    `main`: `main(inputs..., weights..., derived...)`, the weights those that it reads itself.
    `weight_only`: `main(weights...) -> (derived...)`, or None where nothing depends on weights alone.
    `derived`: the names of main's trailing parameters, in the order of the tuple that `weight_only` returns.
    """

    main: relax.Function
    weight_only: relax.Function | None
    derived: tuple[str, ...]


class WeightSplitter:
    """Divides functions; remembers what it renamed: equal bindings stay the same objects from graph to graph."""

    def __init__(self) -> None:
        self._params: dict[relax.Var, relax.Var] = {}
        self._replaced: dict[tuple, relax.Binding] = {}
        self._variables: dict[relax.Binding, tuple[relax.Var, ...]] = {}

    def __call__(self, func: relax.Function) -> Split:
        """Divide `func` (parameters as in the working form, one dataflow block), dropping what is not used.

        After legalisation, so that what legalising makes of weights alone (their packing) is divided off too.
        """
        if len(self._variables) > _REMEMBERED:
            self._params.clear()
            self._replaced.clear()
            self._variables.clear()
        weights = list(func.params[num_inputs(func) :])
        early: dict[relax.Var, relax.Binding] = {}
        constant = set(weights)
        runtime: list[relax.Binding] = []
        shapes: dict[relax.Var, relax.Expr] = {}
        for original in all_bindings(func):
            binding = self._replace(original, shapes)
            if _is_shape_of(binding.value):
                shapes[binding.var] = binding.value.args[0].ty.shape
            elif all(var in constant for var in self._reads(binding)):
                constant.add(binding.var)
                early[binding.var] = binding
            else:
                runtime.append(binding)
        return self._assemble(func, weights, early, runtime)

    def _assemble(
        self,
        func: relax.Function,
        weights: list[relax.Var],
        early: dict[relax.Var, relax.Binding],
        runtime: list[relax.Binding],
    ) -> Split:
        output = func.body.body
        read: dict[relax.Var, None] = dict.fromkeys(variables_of(output))
        live: list[relax.Binding] = []
        for binding in reversed(runtime):
            if binding.var in read:
                live.append(binding)
                read.update(dict.fromkeys(self._reads(binding)))
        copied: list[relax.Binding] = []
        # a tuple or shape cannot be bound as a constant: main makes its own, from members that can
        for var in reversed(early):
            if var in read and not isinstance(var.ty, relax.TensorType):
                copied.append(early[var])
                read.update(dict.fromkeys(self._reads(early[var])))
        needed = [var for var in early if var in read and isinstance(var.ty, relax.TensorType)]
        params = {var: self._params.setdefault(var, relax.Var(var.name, var.ty)) for var in needed}
        bindings = [self._replace(binding, params) for binding in (*reversed(copied), *reversed(live))]
        inputs = list(func.params[: num_inputs(func)])
        direct = [weight for weight in weights if weight in read]
        main = make_function([*inputs, *direct, *params.values()], bindings, substitute(output, params), len(inputs))
        if not needed:
            return Split(main, None, ())
        weight_only = make_function(weights, list(early.values()), relax.Tuple(needed), 0)
        return Split(main, weight_only, tuple(params[var].name for var in needed))

    def _reads(self, binding: relax.Binding) -> tuple[relax.Var, ...]:
        known = self._variables.get(binding)
        if known is None:
            known = self._variables[binding] = tuple(variables_of(binding.value))
        return known

    def _replace(self, binding: relax.Binding, values: dict[relax.Var, relax.Expr]) -> relax.Binding:
        if not values:
            return binding
        hit = tuple(var for var in self._reads(binding) if var in values)
        if not hit:
            return binding
        key = (binding, hit, tuple(values[var] for var in hit))
        if key not in self._replaced:
            value = substitute(binding.value, values)
            if isinstance(value, relax.Call):  # tuples and their members know their type
                relax.expr._update_type(value, binding.var.ty)
            self._replaced[key] = relax.VarBinding(binding.var, value)
        return self._replaced[key]


def make_function(
    params: list[relax.Var], bindings: list[relax.Binding], output: relax.Expr, num_input: int
) -> relax.Function:
    """A function of one dataflow block over existing bindings; the output is given a variable where it has none."""
    if not _is_var(output) or isinstance(output, relax.DataflowVar):
        result = relax.Var("output", output.ty)
        bindings = [*bindings, relax.VarBinding(result, output)]
        output = result
    body = relax.SeqExpr([relax.DataflowBlock(bindings)] if bindings else [], output)
    relax.expr._update_type(body, output.ty)
    attrs = tvm.ir.make_node("ir.DictAttrs", global_symbol="main", num_input=num_input)
    return relax.Function(params, body, output.ty, True, attrs)


def all_bindings(func: relax.Function) -> list[relax.Binding]:
    """The bindings of a function without control flow, in order."""
    return [binding for block in func.body.blocks for binding in block.bindings]


def variables_of(value: relax.Expr) -> list[relax.Var]:
    """The variables that a value in normal form reads (calls, tuples and projections of variables)."""
    if _is_var(value):
        return [value]
    if isinstance(value, relax.Call):
        return [var for arg in value.args for var in variables_of(arg)]
    if isinstance(value, relax.Tuple):
        return [var for field in value.fields for var in variables_of(field)]
    if isinstance(value, relax.TupleGetItem):
        return variables_of(value.tuple_value)
    return []


def substitute(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """`value` with its variables replaced (`value` is in normal form: calls, tuples and projections of variables)."""
    if _is_var(value):
        return values.get(value, value)
    if isinstance(value, relax.Call):
        args = [substitute(arg, values) for arg in value.args]
        return relax.Call(value.op, args, value.attrs, value.ty_args)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([substitute(field, values) for field in value.fields])
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(substitute(value.tuple_value, values), value.index)
    return value


def _is_var(value: object) -> bool:
    return isinstance(value, relax.Var) and not isinstance(value, tvm.ir.GlobalVar)


def _is_shape_of(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call) or value.op != _SHAPE_OF:
        return False
    ty = value.args[0].ty
    return isinstance(ty.shape, relax.ShapeExpr) and all(isinstance(e, tirx.IntImm) for e in ty.shape)
