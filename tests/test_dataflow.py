"""Variables stand for one object each, and nothing is kept for those that nobody holds."""

from __future__ import annotations

import gc

import pytest
from small_models import MODELS
from tvm import relax

from rlflow_tvm import dataflow
from rlflow_tvm.dataflow import Dataflow, canonical, variables_of


def test_a_variable_is_one_object():
    var = relax.Var("x", relax.TensorType((2, 3), "float32"))
    binding = relax.VarBinding(relax.Var("y", var.ty), relax.op.add(var, var))
    assert binding.value.args[0] is not binding.value.args[0], "else the table is not needed"
    assert canonical(binding.value.args[0]) is canonical(var)
    assert canonical(binding.var) is not canonical(var)
    first, second = variables_of(binding.value)
    assert first is second is canonical(var)


def test_nothing_is_kept_for_variables_that_are_gone():
    ty = relax.TensorType((2,), "float32")
    gc.collect()
    before = len(dataflow._VARIABLES)
    held = [canonical(relax.Var("x", ty)) for _ in range(500)]
    assert len(dataflow._VARIABLES) == before + 500
    del held
    gc.collect()
    assert len(dataflow._VARIABLES) == before
    kept = [canonical(relax.Var("x", ty)) for _ in range(500)]  # at addresses that were in use before
    assert all(canonical(var) is var for var in kept)


@pytest.mark.parametrize("name", MODELS)
def test_a_function_is_read_and_written(name):
    mod = MODELS[name]()
    flow = Dataflow.from_module(mod)
    assert flow.structural_hash == Dataflow.from_module(flow.module).structural_hash
    relax.analysis.well_formed(flow.module)
    assert [node.binding for node in flow.nodes] == dataflow.all_bindings(mod["main"])
    assert flow.inputs == mod["main"].attrs["num_input"]
    known = set(map(id, flow.params))
    for node in flow.nodes:
        assert all(id(var) in known for var in node.inputs), "what is read is bound before, by the same object"
        assert node.reads == tuple(dict.fromkeys(node.inputs))
        known.add(id(node.var))
    assert all(id(var) in known for var in flow.outputs)
