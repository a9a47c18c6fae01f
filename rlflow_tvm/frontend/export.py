"""A Relax module as an ONNX model, for any other runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import tvm
from onnx import helper, numpy_helper
from tvm import relax

import rlflow_tvm
from rlflow_tvm import ir
from rlflow_tvm.dataflow import all_bindings
from rlflow_tvm.errors import FrontendError, RewriteError
from rlflow_tvm.frontend.clean import prune
from rlflow_tvm.frontend.export_blocked import export_unblocked
from rlflow_tvm.frontend.export_elementwise import ELEMENTWISE, Exporter
from rlflow_tvm.frontend.export_idioms import put_together
from rlflow_tvm.frontend.export_reduce import ACROSS
from rlflow_tvm.frontend.export_shape import SHAPES
from rlflow_tvm.frontend.export_windows import WINDOWS
from rlflow_tvm.frontend.fold import fold_constants
from rlflow_tvm.frontend.graph import Graph
from rlflow_tvm.frontend.inputs import numpy_dtype
from rlflow_tvm.frontend.load import one_line
from rlflow_tvm.frontend.names import names_of
from rlflow_tvm.frontend.writer import Writer

OPSET = 18
"""The least operator set in which all of it can be said: what most runtimes read."""
_NEWEST_OPSET = 23
_IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}

EXPORTERS: dict[str, Exporter] = {
    f"relax.{name}": export for name, export in {**ELEMENTWISE, **SHAPES, **ACROSS, **WINDOWS}.items()
}
"""Relax operator -> what writes it."""


def to_onnx(mod: tvm.IRModule, *, opset: int = OPSET) -> onnx.ModelProto:
    """Write `main` of a module as an ONNX model: what `from_onnx` gave, as it is or rewritten.

    Inputs and outputs have the names, in the order, that they had in the file that the module was imported from; in a
    module of another origin inputs are called as the parameters are, outputs `output`, or `output_0` and so on. Shapes
    are static, as rewrites made them: `from_onnx` lets no dynamic dimension through. Constants become initialisers, one
    for each however often it is read, and what is computed from them alone is computed now. Layouts that ONNX does not
    have are written as reshapes and transposes. The model has passed `onnx.checker` with its shape and type inference.

    An index that is out of bounds, which `take` wraps round or reads, is an error of the runtime in ONNX.

    Args:
        mod: with its weights as constants (`GraphState.bound()`), and no control flow.
        opset: version of the standard operator set, 18 to 23.

    Raises:
        FrontendError: an operator, or an attribute of one, that ONNX cannot say (the message names it), a dynamic
            shape, weights that are parameters.
        UsageError: the module has no function main.
    """
    if not OPSET <= opset <= _NEWEST_OPSET:
        raise FrontendError(f"opset {opset}: models are exported at opset {OPSET} to {_NEWEST_OPSET}")
    func = _main(mod)
    outputs = _flat_types(func.ret_ty)
    names = names_of(mod, [param.name for param in func.params], len(outputs))
    writer = Writer(opset, (*names.inputs, *names.outputs))
    values: dict[relax.Var, Any] = dict(zip(func.params, names.inputs, strict=True))
    for binding in all_bindings(func):
        values[binding.var] = _value(writer, binding, values)
    writer.at = "the result"
    results = _flat(_argument(writer, func.body.body, values))
    _name_results(writer, results, names.outputs, frozenset(names.inputs))
    model = helper.make_model(
        helper.make_graph(
            writer.nodes,
            "main",
            [_info(name, param.ty) for name, param in zip(names.inputs, func.params, strict=True)],
            [_info(name, ty) for name, ty in zip(names.outputs, outputs, strict=True)],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=_IR_VERSIONS[opset],
        producer_name="rlflow_tvm",
        producer_version=rlflow_tvm.__version__,
    )
    return _checked(Graph(model, writer.constants, "the exported model"))


def _main(mod: tvm.IRModule) -> relax.Function:
    func = ir.main_of(mod)
    weights = func.params[ir.num_inputs(func) :]
    if weights:
        raise FrontendError(
            f"parameter {weights[0].name} is a weight without a value: bind the weights to constants first "
            "(GraphState.bound(), or relax.transform.BindParams)"
        )
    if not isinstance(func.body, relax.SeqExpr):
        raise FrontendError("main is no sequence of bindings: run relax.transform.Normalize first")
    for var in (*func.params, *(binding.var for binding in all_bindings(func))):
        if not ir.is_static(var.ty):
            raise FrontendError(
                f"{var.name} is of type {var.ty}: only static shapes are exported, import the model with "
                "from_onnx(..., shapes={...}), or run relax.transform.BindSymbolicVars first"
            )
    return func


def _value(writer: Writer, binding: relax.Binding, values: Mapping[relax.Var, Any]) -> Any:
    """What a binding's variable stands for: a name, or a tuple of names."""
    call = binding.value if isinstance(binding, relax.VarBinding) else None
    writer.at = binding.var.name
    if not isinstance(call, relax.Call):
        return _argument(writer, call, values)
    if not isinstance(call.op, tvm.ir.Op):
        raise writer.refusal("it calls a function of the module: inline it first")
    operator = call.op.name.removeprefix("relax.")
    if call.op.name not in EXPORTERS:
        called = f" of {call.args[0].name_hint}" if isinstance(call.args[0], tvm.ir.GlobalVar) else ""
        raise writer.refusal(f"there is no exporter for {operator}{called}: write it with other operators")
    if any(map(tvm.ir.is_prim_expr, call.args)):
        try:
            call = relax.BlockBuilder().normalize(ir.of_tensors(call))
        except RewriteError as error:
            raise writer.refusal(str(error)) from error
    args = [_argument(writer, arg, values) for arg in call.args]
    writer.at = f"{binding.var.name}.{operator}"
    export = EXPORTERS[call.op.name]
    return export_unblocked(writer, call, operator, args, export) or export(writer, call, args)


def _argument(writer: Writer, expr: relax.Expr | None, values: Mapping[relax.Var, Any]) -> Any:
    if isinstance(expr, relax.Var):
        return values[expr]
    if isinstance(expr, tvm.ir.GenericConst):
        return writer.weight(expr)
    if isinstance(expr, relax.Tuple):
        return tuple(_argument(writer, field, values) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return _argument(writer, expr.tuple_value, values)[expr.index]
    if isinstance(expr, relax.ShapeExpr) or tvm.ir.is_prim_expr(expr):
        return expr  # read where it stands, by the operator that takes it
    raise writer.refusal(f"it holds {type(expr).__name__}: only calls of operators, tuples and constants are exported")


def _flat(value: Any) -> list[str]:
    return [name for field in value for name in _flat(field)] if isinstance(value, tuple) else [value]


def _flat_types(ty: relax.Type) -> list[relax.Type]:
    return [each for field in ty.fields for each in _flat_types(field)] if isinstance(ty, relax.TupleType) else [ty]


def _name_results(writer: Writer, results: Sequence[str], names: Sequence[str], inputs: frozenset[str]) -> None:
    """Give the results their names: a value that a node makes is called so; an input, a constant, and what another
    result is called by already are copied."""
    made = {output for node in writer.nodes for output in node.output}
    renamed, copied = dict[str, str](), set[str]()
    writer.at = "result"
    for result, name in zip(results, names, strict=True):
        if result in made and result not in renamed:
            renamed[result] = name
        elif renamed.get(result, result) != name and name not in copied:  # an output may be listed twice
            copied.add(name)
            if name in inputs:
                raise writer.refusal(f"{name} is an input and another output: rename one of them")
            writer.nodes.append(helper.make_node("Identity", [result], [name], name=writer.fresh(f"{name}.Identity")))
    for node in writer.nodes:
        for names_in in (node.input, node.output):
            for i, name in enumerate(names_in):
                if name in renamed:
                    names_in[i] = renamed[name]


def _info(name: str, ty: relax.TensorType) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(numpy_dtype(str(ty.dtype)))
    return helper.make_tensor_value_info(name, kind, [int(extent) for extent in ty.shape.values])


def _checked(graph: Graph) -> onnx.ModelProto:
    """The model with its constants, without the nodes that no output needs, or that read weights alone: those are
    evaluated; what Relax takes apart is put together. (Runtimes would evaluate that at each load; and ONNX Runtime 1.32
    takes the padding of a kernel for that of an image.)"""
    prune(graph)
    fold_constants(graph)
    put_together(graph)
    prune(graph)
    skeleton, _ = graph.skeleton()
    try:
        onnx.checker.check_model(skeleton, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise FrontendError(
            f"the module cannot be exported to ONNX: {one_line(error)}: cast what the operator named takes no operands "
            "of; where it does take them this is a bug, please report it"
        ) from error
    for name, array in graph.constants.items():
        graph.model.graph.initializer.append(numpy_helper.from_array(array, name))
    return graph.model
