"""Relax's passes and families of rules by name, and orders of them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op as rx

import rlflow_tvm
from rlflow_tvm import ir
from rlflow_tvm.differences import range_error
from rlflow_tvm.errors import KernelError, PlanError, RewriteError
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.frontend.corpus import CorpusGraph, corpus
from rlflow_tvm.kernels import extract_kernels
from rlflow_tvm.passes import GraphState, RewriteAction, default_rules, family_pass, ordering
from rlflow_tvm.passes.family_pass import Family
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.mended import OnConstants
from rlflow_tvm.passes.operations import Operations
from rlflow_tvm.passes.ordering import CLEANING_ORDER, PASSES, OrderedPasses, apply_pass
from rlflow_tvm.reporting.drawing import part
from rlflow_tvm.verify import flatten
from tests.small_models import LANES, TARGET, bound, conv_chain, machine_of, module, wasteful


def count(mod: tvm.IRModule) -> int:
    return Operations.of(Graph.from_module(mod)).total


def outputs(mod: tvm.IRModule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [t.numpy() for t in flatten(machine_of(mod)["main"](*map(tvm.runtime.tensor, arrays)))]


def test_counts_are_of_what_is_done_at_run_time():
    def body(emit, x, w):
        scaled = emit(rx.exp(w))  # of weights alone
        return rx.nn.softmax(emit(rx.matmul(x, scaled)))

    told = Operations.of(Graph.from_module(module({"x": (4, 6)}, {"w": (6, 8)}, body)))
    assert told.counts == {"relax.matmul": 1, "relax.nn.softmax": 1}
    assert told.flops == 2 * 4 * 6 * 8 + 4 * 32
    assert told.transcendentals == 32
    assert told.written == 64


def test_convolutions_and_pools_have_the_arithmetic_of_their_windows():
    told = Operations.of(Graph.from_module(conv_chain()))
    assert told.flops == 2 * (2 * 8 * 36 * 8 * 9) + 2 * 8 * 36

    def pooled(emit, x):
        return rx.nn.max_pool2d(x, pool_size=(2, 2), strides=(2, 2))

    assert Operations.of(Graph.from_module(module({"x": (1, 8, 6, 6)}, {}, pooled))).flops == 8 * 9 * 4


def test_passes_do_what_they_are_called():
    mod = wasteful()
    assert count(mod) == 6
    assert count(apply_pass(mod, "DeadCodeElimination")) == 5
    assert count(apply_pass(mod, "EliminateCommonSubexpr")) == 5
    assert count(apply_pass(mod, "rules:transpose")) == 3  # a family also leaves out what is dead


@pytest.fixture(scope="module")
def computed():
    """Small graphs, arguments, and what they compute."""
    found = []
    for mod in (wasteful(), conv_chain()):
        rng = np.random.default_rng(0)
        arrays = [
            rng.standard_normal([int(e) for e in p.ty.shape.values]).astype("float32") for p in mod["main"].params
        ]
        found.append((mod, arrays, outputs(mod, arrays)))
    return found


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_leaves_small_graphs_equal(name, computed):
    for mod, arrays, expected in computed:
        assert range_error(outputs(apply_pass(mod, name), arrays), expected) < 1e-5


def normalised(training: bool) -> tvm.IRModule:
    def body(emit, x, w, gamma, beta, mean, variance):
        normed = emit(rx.nn.batch_norm(emit(rx.nn.conv2d(x, w)), gamma, beta, mean, variance, 1, training=training))
        return emit(relax.TupleGetItem(normed, 0))

    vectors = dict.fromkeys(("gamma", "beta", "mean", "variance"), (8,))
    return module({"x": (1, 4, 6, 6)}, {"w": (8, 4, 3, 3), **vectors}, body)


def test_batch_normalisations_are_folded_where_weights_are_parameters_and_layouts_converted_after():
    mod = normalised(training=False)
    made = apply_pass(mod, "FoldBatchnormToConv2D")
    assert Operations.of(Graph.from_module(made)).counts == {"relax.nn.conv2d": 1, "relax.add": 1}
    converted = apply_pass(made, "ConvertLayoutNHWC")  # TVM's own ends the process here
    assert Operations.of(Graph.from_module(converted)).counts["relax.permute_dims"] == 2
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 1.5, [int(e) for e in p.ty.shape.values]).astype("float32") for p in mod["main"].params]
    expected = outputs(mod, arrays)
    assert range_error(outputs(made, arrays), expected) < 1e-5
    assert range_error(outputs(converted, arrays), expected) < 1e-5


def test_no_weight_is_taken_for_another_of_its_shape():
    """Passes join constants of equal contents; here all weights but the images' are of two shapes."""

    def body(emit, x, **weights):
        for k in range(0, len(weights), 5):
            kernel, *vectors = list(weights.values())[k : k + 5]
            x = emit(rx.nn.relu(emit(rx.nn.conv2d(x, kernel, padding=1))))
            x = emit(relax.TupleGetItem(emit(rx.nn.batch_norm(x, *vectors, 1, training=False)), 0))
            x = emit(rx.nn.batch_norm(emit(rx.nn.conv2d(x, kernel, padding=1)), *vectors, 1, training=False))
            x = emit(relax.TupleGetItem(x, 0))
        return x

    weights = {f"w{k}": (4,) if k % 5 else (4, 4, 3, 3) for k in range(15)}
    mod = module({"x": (1, 4, 6, 6)}, weights, body)
    made = apply_pass(mod, "FoldBatchnormToConv2D")
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 1.5, [int(e) for e in p.ty.shape.values]).astype("float32") for p in mod["main"].params]
    assert range_error(outputs(made, arrays), outputs(mod, arrays)) < 1e-5


def test_what_stands_in_for_weights_is_unlike_all_else():
    seen = []

    @tvm.transform.module_pass(opt_level=0)
    def recording(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        visit = lambda e: seen.append(e.value.numpy()) if isinstance(e, tvm.ir.GenericConst) else None  # noqa: E731
        relax.analysis.post_order_visit(mod["main"], visit)
        return mod

    def body(emit, x, **weights):
        for weight in (*weights.values(), relax.const(np.random.default_rng(0).random(4).astype("float32"))):
            x = emit(rx.add(x, weight))
        return x

    mod = module({"x": (4,)}, {f"w{k}": (4,) for k in range(20)}, body)
    made = OnConstants(recording)(mod)
    assert len(seen) == 21
    assert len({array.tobytes() for array in seen}) == 21
    assert tvm_ffi.structural_equal(made, mod)


@pytest.mark.parametrize(("dtype", "number"), [("int64", 3), ("float8_e4m3fn", 300)])
def test_weights_that_nothing_can_stand_in_for_stay_parameters(dtype, number):
    """Whole numbers; and of single numbers in eight bits there are fewer than there are weights."""

    params = []

    @tvm.transform.module_pass(opt_level=0)
    def recording(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        params.append(len(mod["main"].params))
        return mod

    def body(emit, x, **weights):
        x = emit(rx.astype(x, "float32"))
        for weight in weights.values():
            x = emit(rx.add(x, emit(rx.astype(weight, "float32"))))
        return x

    mod = module({"x": (1,)}, {f"w{k}": (1,) for k in range(number)}, body, dtype)
    made = OnConstants(recording)(mod)
    assert tvm_ffi.structural_equal(made, mod)
    (left,) = params
    assert left == 1 + number if dtype == "int64" else 1 < left < 1 + number


def test_an_element_type_as_an_operand_is_no_weight():
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x], {"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(rx.memory.view(builder.emit(rx.nn.relu(x)), (2, 3), "int32"))
        builder.emit_func_output(out)
    assert count(apply_pass(builder.get(), "FoldBatchnormToConv2D")) == 2
    with pytest.raises(KernelError, match=r"no kernel is known for relax\.memory\.view"):
        extract_kernels(builder.get(), TARGET)
    graph = Graph.from_module(builder.get())
    assert "constant int32" in str(part(graph, graph.outputs, {}))


def test_blocks_of_a_layout_count_as_the_channels_that_they_are():
    start = GraphState.from_module(conv_chain(), default_rules(LANES))
    blocked = start.apply(RewriteAction("block_conv", start.sites["block_conv"][0]))
    assert Operations.of(blocked.graph).flops == Operations.of(start.graph).flops > 0


@pytest.mark.parametrize("name", ["FoldBatchnormToConv2D", "DecomposeOpsForInference"])
def test_batch_normalisations_in_training_are_left(name):
    with pytest.raises(RewriteError, match=f"pass {name}.* is in training"):
        apply_pass(normalised(training=True), name)


@pytest.fixture(scope="module")
def slices() -> list[tuple[CorpusGraph, list[np.ndarray], list[np.ndarray]]]:
    """A slice of each family's training, with arguments and what it gives for them."""
    cut = {graph.family: graph for graph in corpus(draws=1) if graph.training and "." in graph.name}
    found = []
    for graph in cut.values():
        arrays = list(random_inputs(_all_inputs(graph.mod), 0).values())
        arrays = [np.abs(a) + np.asarray(0.5, a.dtype) if a.dtype.kind == "f" else a for a in arrays]  # roots, logs
        found.append((graph, arrays, outputs(graph.mod, arrays)))
    return found


@pytest.mark.parametrize("order", [CLEANING_ORDER, tuple(reversed(PASSES))])
def test_orders_leave_graphs_of_the_corpus_equal(order, slices):
    for graph, arrays, expected in slices:
        made = OrderedPasses(order)(graph.mod)
        assert not tvm_ffi.structural_equal(made, graph.mod)
        assert all(np.isfinite(e).mean() > 0.5 for e in expected)
        assert range_error(outputs(made, arrays), expected) < 1e-3, graph.name


def _all_inputs(mod: tvm.IRModule) -> tvm.IRModule:
    func = mod["main"]
    return tvm.IRModule({"main": func.with_attr("num_input", len(func.params))})


def test_an_order_is_a_pass_for_modules_with_weights_in_them():
    mod = bound(wasteful())
    made = tvm.transform.Sequential([OrderedPasses(["DeadCodeElimination", "rules:transpose"])])(mod)
    assert count(ir.detach(made).mod) == 3
    assert len(made["main"].params) == 1
    x = np.random.default_rng(1).standard_normal((4, 6)).astype("float32")
    assert range_error(outputs(made, [x]), outputs(mod, [x])) < 1e-5


def test_a_family_ends_and_gives_the_same_again():
    mod = wasteful()
    once = apply_pass(mod, "rules:transpose")
    assert tvm_ffi.structural_equal(once, apply_pass(mod, "rules:transpose"))
    assert tvm_ffi.structural_equal(once, apply_pass(once, "rules:transpose"))


def test_a_family_sees_what_a_module_was_changed_to():
    mod = wasteful()
    assert count(Family("transpose")(mod)) == 3
    mod["main"] = wasteful(16)["main"]
    made = Family("transpose")(mod)
    assert tvm_ffi.structural_equal(made, Family("transpose")(wasteful(16)))
    mod["other"] = wasteful()["main"]
    assert "other" in [gv.name_hint for gv in Family("transpose")(mod).get_global_vars()]


def test_a_family_remembers_a_module_but_no_weights():
    family_pass._beginning.cache_clear()
    mod = wasteful()
    for name in ("transpose", "algebra"):
        Family(name)(mod)
    told = family_pass._beginning.cache_info()
    assert (told.hits, told.currsize) == (1, 1)
    Family("transpose")(bound(wasteful()))
    assert family_pass._beginning.cache_info().currsize == 0


def test_a_pass_that_fails_is_an_error_that_names_it_and_left_out_of_an_order(monkeypatch, caplog):
    @tvm.transform.module_pass(opt_level=0)
    def broken(_mod, _context):
        raise ValueError("it cannot be")

    @tvm.transform.module_pass(opt_level=0)
    def other_interface(mod, _context):
        return relax.transform.BundleModelParams()(mod)

    monkeypatch.setitem(ordering.PASSES, "Broken", lambda: broken)
    monkeypatch.setitem(ordering.PASSES, "Other", lambda: other_interface)
    mod = wasteful()
    with pytest.raises(RewriteError, match=r"pass Broken fails: .*it cannot be"):
        apply_pass(mod, "Broken")
    with pytest.raises(RewriteError, match=r"pass Other changes what main takes"):
        apply_pass(mod, "Other")
    with caplog.at_level("WARNING", "rlflow_tvm"):
        made = OrderedPasses(["Broken", "DeadCodeElimination"])(mod)
    assert count(made) == 5
    assert "pass Broken fails" in caplog.text


def test_what_loses_the_form_of_a_graph_is_refused(monkeypatch):
    monkeypatch.setitem(ordering.PASSES, "ToNonDataflow", relax.transform.ToNonDataflow)
    with pytest.raises(RewriteError, match=r"pass ToNonDataflow: .*one dataflow block"):
        apply_pass(wasteful(), "ToNonDataflow")


def test_an_order_is_saved_and_loaded(tmp_path):
    path = tmp_path / "order.json"
    OrderedPasses(CLEANING_ORDER).save(path)
    assert rlflow_tvm.passes.OrderedPasses.load(path).order == CLEANING_ORDER
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no such pass order file"),
        ("{", "not a pass order file"),
        ("[]", "pass order format None"),
        (json.dumps({"format": 9}), "pass order format 9, this version reads 1: train again"),
        (json.dumps({"format": 1, "passes": "x"}), "damaged"),
        (json.dumps({"format": 1, "passes": ["Nonesuch"]}), "no pass is called 'Nonesuch'"),
    ],
)
def test_files_that_are_none_are_told(tmp_path, text, told):
    path = tmp_path / "order.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(told)) as raised:
        OrderedPasses.load(path)
    assert str(path) in str(raised.value)
