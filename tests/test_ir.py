"""What a module has to be to be rewritten, and what is said where it is not."""

from __future__ import annotations

import pytest
import tvm
from small_models import LANES, module
from tvm import relax
from tvm.relax import op as rx
from tvm.relax.global_info import VDevice

import rlflow_tvm
from rlflow_tvm.errors import UsageError
from rlflow_tvm.ir import detach
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.passes.family_pass import Family

EXTENT = tvm.tirx.Var("n", "int64")
DYNAMIC = {
    "symbolic extent": relax.TensorType((EXTENT, 4), "float32"),
    "expression": relax.TensorType((EXTENT * 2, 4), "float32"),
    "rank alone": relax.TensorType(None, "float32", ndim=2),
    "nothing": relax.TensorType(None, "float32"),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_shape_is_refused_in_one_line(name):
    x = relax.Var("x", DYNAMIC[name])
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(rx.permute_dims(builder.emit(rx.nn.relu(x))))
            output = builder.emit_output(rx.tanh(y))
        builder.emit_func_output(output)
    with pytest.raises(UsageError, match=r"x is of type .* only static shapes") as caught:
        GraphState.from_module(builder.get(), default_rules(LANES))
    assert "\n" not in str(caught.value)


def test_shape_that_depends_on_data_is_refused():
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.tanh(emit(rx.unique(emit(rx.nn.relu(x))))))
    with pytest.raises(UsageError, match="only static shapes can be rewritten"):
        GraphState.from_module(mod, default_rules(LANES))


def test_graph_that_returns_its_parameters_is_no_graph_to_rewrite():
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(x)
    assert not detach(builder.get()).weights
    with pytest.raises(UsageError, match="there is nothing to rewrite"):
        GraphState.from_module(builder.get(), default_rules(LANES))


def test_plain_bindings_are_taken():
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(rx.tanh(builder.emit(rx.nn.relu(x)))))
    assert len(GraphState.from_module(builder.get(), default_rules(LANES)).graph.nodes) == 2


def test_static_tuples_are_taken():
    def body(emit, x):
        halves = emit(rx.split(x, 2, 0))
        return emit(halves[0]), emit(halves[1])

    assert len(GraphState.from_module(module({"x": (4,)}, {}, body), default_rules(LANES)).graph.nodes) == 5


def test_module_without_main_is_refused():
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.nn.relu(x))
    with pytest.raises(UsageError, match="no function main"):
        detach(tvm.IRModule({"other": mod["main"].with_attr("global_symbol", "other")}))


def written_in_place(builder, x):
    return builder.emit(rx.call_inplace_packed("f", x, inplace_indices=0, ty_args=x.ty))


def made_within(builder, x):
    y = relax.Var("y", x.ty)
    body = relax.SeqExpr([], y)
    return builder.emit(relax.Call(builder.emit(relax.Function([y], body, x.ty)), [x]))


def asserted(builder, x):
    made = builder.emit(rx.call_pure_packed("f", x, ty_args=relax.AnyType()))
    return builder.match_cast(made, relax.TensorType((2, 3), "float32"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (written_in_place, r"is written in place \(relax\.call_inplace_packed\)"),
        (made_within, r"made within main: run relax\.transform\.LambdaLift"),
        (asserted, r"is asserted to be of type .* \(match_cast\)"),
    ],
)
def test_what_rewrites_know_nothing_of_is_refused(body, message):
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(rx.nn.relu(body(builder, x)))
        builder.emit_func_output(out)
    with pytest.raises(UsageError, match=message):
        GraphState.from_module(builder.get(), default_rules(LANES))


def test_an_element_type_is_no_weight():
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(rx.memory.view(x, (2, 3), "int32"))
        builder.emit_func_output(out)
    assert detach(builder.get()).weights == {}


def test_tensors_placed_on_devices_are_refused():
    device = VDevice("llvm")
    x = relax.Var("x", relax.TensorType((2, 3), "float32", device))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(rx.nn.relu(x))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [device])
    with pytest.raises(UsageError, match=r"virtual devices \(vdevice\).*give their types no device"):
        detach(mod)
    with pytest.raises(UsageError, match="virtual devices"):
        rlflow_tvm.compile(mod, "llvm")
    with pytest.raises(UsageError, match="virtual devices"):
        Family("transpose")(mod)
