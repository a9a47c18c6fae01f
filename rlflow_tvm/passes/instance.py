"""Instances of rules: shapes and attributes that make a left side a concrete function, for proofs and tests to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from rlflow_tvm.passes.ops import CLASSES, OPERATORS
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.term import Apply, Item, Number, Scalar, Term, Var


@dataclass(frozen=True)
class Instance:
    """Shapes and attribute values that make a rule's left side a concrete graph.

    `shapes` gives every tensor variable its shape, `attributes` every attribute variable its value (a `**rest`
    variable a dictionary, a class member `f` an operator name with its attributes); `weights` are the variables that
    are weights rather than inputs; `indices` are those that hold positions, from the first number that is given up to
    below the second. `parameters` are what attribute expressions read besides.
    """

    shapes: Mapping[str, tuple[int, ...]]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    indices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)


def instance_function(rule: RewriteRule, instance: Instance, dtype: str = "float32") -> relax.Function:
    """The left side of `rule` over the instance's shapes, in the working form.

    Parameters are the tensor variables, inputs before weights; the result is the tuple of the left terms.
    """
    names = [n for n in instance.shapes if n not in instance.weights] + list(instance.weights)
    env: dict[str, Any] = {**instance.parameters, **instance.attributes}
    types = {name: "int64" if name in instance.indices else dtype for name in names}
    params = [relax.Var(name, relax.TensorType(instance.shapes[name], types[name])) for name in names]
    env.update({param.name: param for param in params})
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            results = [_emit(builder, term, env, dtype) for term in rule.equation.left]
            result = results[0] if len(results) == 1 else relax.Tuple(results)
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    func = builder.get()["main"]
    return func.with_attr("num_input", len(names) - len(instance.weights))


def _emit(builder: relax.BlockBuilder, term: Term, env: Mapping[str, Any], dtype: str) -> relax.Expr:
    if isinstance(term, Var):
        return env[term.name]
    if isinstance(term, Number):
        return relax.const(term.value, dtype)
    if isinstance(term, Scalar):
        return relax.const(float(term.attribute.value(env)), dtype)
    if isinstance(term, Item):
        return builder.emit(relax.TupleGetItem(_emit(builder, term.term, env, dtype), term.index))
    assert isinstance(term, Apply)
    args = [_emit(builder, arg, env, dtype) for arg in term.args]
    if term.member is not None:
        name, attributes = env[term.member]
        assert name in CLASSES[term.head], f"{name} is not of class {term.head}"
        return builder.emit(OPERATORS[name].make(args, attributes))
    attributes = dict(env[term.rest]) if term.rest else {}
    attributes.update({name: value.value(env) for name, value in term.attributes})
    return builder.emit(OPERATORS[term.head].make(args, attributes))
