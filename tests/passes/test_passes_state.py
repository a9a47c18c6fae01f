"""States: immutable, one action further, their sites kept up to date; the splice into the graph."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from small_models import LANES, MODELS, TARGET, bound, conv_chain, module
from tvm import relax, tirx
from tvm.relax import op as rx

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.frontend import from_onnx
from rlflow_tvm.frontend.zoo_demo import demo_model
from rlflow_tvm.frontend.zoo_light import light_files
from rlflow_tvm.kernels import extract_kernels
from rlflow_tvm.passes import CATALOGUE, GraphState, RewriteAction, RewriteRule, RuleSet, Site, default_rules
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.matcher import Matches
from rlflow_tvm.passes.ops import OPERATORS
from rlflow_tvm.search import random_states
from rlflow_tvm.verify import Comparison

LIGHT = ("light_squeezenet", "light_resnet50", "light_inception_v2")


def start(mod: tvm.IRModule, *rules: RewriteRule) -> GraphState:
    return GraphState.from_module(mod, RuleSet(rules, LANES) if rules else default_rules(LANES))


def catalogue_rule(name: str) -> RewriteRule:
    return next(rule for rule in CATALOGUE if rule.name == name)


def first(state: GraphState, rule: str) -> GraphState:
    """`state` after `rule` at its first site."""
    return state.apply(RewriteAction(rule, state.sites[rule][0]))


def pack(x: relax.Expr, block: int = LANES) -> relax.Expr:
    return OPERATORS["pack"].make([x], {"block": block})


def unpack(x: relax.Expr, block: int = LANES) -> relax.Expr:
    return OPERATORS["unpack"].make([x], {"block": block})


def operators(state: GraphState) -> list[str]:
    return [node.op.removeprefix("relax.") for node in state.graph.nodes]


@pytest.fixture(scope="module")
def imported() -> dict[str, tvm.IRModule]:
    light = light_files()
    return {"demo": from_onnx(demo_model(0)), **{name: from_onnx(light[name]) for name in LIGHT}}


def test_apply_leaves_the_state_as_it_was():
    state = start(conv_chain())
    text, structural_hash, sites = state.mod.script(), state.structural_hash, dict(state.sites)
    after = first(state, "block_conv")
    assert after.structural_hash != structural_hash
    assert (len(state.actions), len(after.actions)) == (0, 1)
    assert state.mod.script() == text
    assert state.sites == sites
    again = GraphState.from_module(state.mod, state.ruleset)
    assert (again.structural_hash, dict(again.sites)) == (structural_hash, sites)


def test_same_action_gives_the_same_state_twice():
    state = start(conv_chain())
    one, two = first(state, "block_conv"), first(state, "block_conv")
    assert one.structural_hash == two.structural_hash
    assert one.sites == two.sites
    tvm.ir.assert_structural_equal(one.mod, two.mod)


def test_site_that_is_not_there_is_refused():
    state = start(conv_chain())
    action = RewriteAction("block_conv", state.sites["block_conv"][0])
    after = state.apply(action)
    with pytest.raises(RewriteError, match="does not match there"):
        after.apply(RewriteAction("block_conv", Site((1000,), (0,))))
    with pytest.raises(RewriteError, match="no rule of that name"):
        state.apply(RewriteAction("no_such_rule", action.site))


def test_rule_set_finds_rules_by_name():
    rules = default_rules(LANES)
    assert rules["block_conv"] is catalogue_rule("block_conv")
    with pytest.raises(RewriteError, match="no rule is called 'nothing'"):
        rules["nothing"]


@pytest.mark.parametrize(("channels", "block"), [(16, 8), (24, 8), (12, 4), (6, 1), (1, 1)])
def test_block_is_all_lanes_or_half_of_them(channels, block):
    assert RuleSet((), 8).block(channels) == block


def site_keys(state: GraphState, matches: Matches) -> dict[str, list[tuple]]:
    """By rule: where it matches, in which operand order, and what its variables stand for."""
    position = state.graph.position
    named = {var: f"parameter {i}" for i, var in enumerate(state.graph.params)}
    named |= {var: f"binding {i}" for var, i in position.items()}

    def meant(value: object) -> str:
        if isinstance(value, tvm.ir.GenericConst):
            return f"constant {value.value.numpy().tolist()}"
        return named[value] if isinstance(value, relax.Var) else str(value)

    return {
        rule: sorted(
            (
                tuple(position[root] for root in match.roots),
                match.variant,
                tuple(sorted((name, meant(value)) for name, value in match.env.items())),
            )
            for match in found
        )
        for rule, found in matches.by_rule.items()
    }


def check_sites(state: GraphState) -> None:
    scratch = Matches.of(Graph.from_function(state.mod["main"]), state.ruleset)
    fresh = GraphState(state.start, scratch, (), state.start_hash)
    assert fresh.sites == state.sites
    assert site_keys(fresh, scratch) == site_keys(state, state.matches)


def walk(mod: tvm.IRModule, steps: int, seed: int) -> int:
    """Random moves, the sites compared after each; returns how many were made."""
    made = 0
    for state in random_states(start(mod), steps, np.random.default_rng(seed)):
        made += 1
        check_sites(state)
        relax.analysis.well_formed(state.mod)
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_sites_are_those_of_matching_from_scratch(name, seed):
    assert walk(MODELS[name](), steps=15, seed=seed) >= 5


@pytest.mark.parametrize("name", ["demo", *LIGHT])
def test_sites_of_imported_models_are_those_of_matching_from_scratch(name, imported):
    assert walk(imported[name], steps=8, seed=1) >= 4


def test_sites_follow_what_turns_into_weight_work_far_away():
    def body(emit, x, w, b, c):
        kept = emit(emit(rx.split(emit(rx.concat([x, w], 0)), [2], 0))[1])
        for step in (rx.tanh, rx.sigmoid, rx.tanh, rx.sigmoid, rx.tanh, rx.sigmoid, rx.tanh):
            kept = emit(step(kept))
        return rx.add(emit(rx.add(x, kept)), b)

    rules = [catalogue_rule(name) for name in ("split_of_concat_1", "fold_bias_chain")]
    state = start(module({"x": (2, 4)}, {"w": (2, 4), "b": (4,), "c": (4,)}, body), *rules)
    assert not state.sites["fold_bias_chain"]
    after = first(state, "split_of_concat_1")
    assert len(after.sites["fold_bias_chain"]) == 1
    check_sites(after)


def test_convolutions_of_one_input_share_one_pack():
    def body(emit, x, v, w):
        return rx.nn.conv2d(x, v, padding=1), rx.nn.conv2d(x, w)

    state = start(module({"x": (1, 8, 6, 6)}, {"v": (8, 8, 3, 3), "w": (4, 8, 1, 1)}, body))
    after = first(first(state, "block_conv"), "block_conv")
    packs = [n for n in after.graph.nodes if n.op == "relax.layout_transform" and n.inputs[0].name == "x"]
    assert len(packs) == 1
    assert len(after.graph.users[packs[0].var]) == 2


def test_equal_subterms_of_a_right_side_are_one_node():
    rule = RewriteRule("double", "none", "relu(x) => add(tanh(x), tanh(x))")
    after = first(start(module({"x": (3,)}, {}, lambda emit, x: rx.nn.relu(x)), rule), "double")
    assert operators(after) == ["tanh", "add"]


def test_several_roots_where_the_order_has_to_change():
    def body(emit, x, a, b):
        left = emit(rx.nn.relu(emit(rx.matmul(x, a))))
        later = emit(rx.permute_dims(b, (1, 0)))  # stands behind the first product and its user
        return rx.add(left, emit(rx.matmul(x, later)))

    state = start(module({"x": (3, 8)}, {"a": (8, 5), "b": (5, 8)}, body))
    after = first(state, "merge_matmuls")
    position = {var: i for i, var in enumerate(n.var for n in after.graph.nodes)}
    assert all(position[v] < i for i, n in enumerate(after.graph.nodes) for v in n.inputs if v in position)
    assert operators(after).count("matmul") == 1
    assert operators(after)[-1] == "add"
    relax.analysis.well_formed(after.mod)
    assert Comparison(state, TARGET).error(after) < 1e-5


def test_both_results_of_merged_products_as_outputs():
    state = start(
        module({"x": (3, 8)}, {"a": (8, 5), "b": (8, 2)}, lambda emit, x, a, b: (rx.matmul(x, b), rx.matmul(x, a)))
    )
    after = first(state, "merge_matmuls")
    assert [v.name for v in after.graph.outputs] == [v.name for v in state.graph.outputs]
    assert Comparison(state, TARGET).error(after) < 1e-5


def test_rewrite_that_would_depend_on_itself_is_refused():
    text = "relu(x), tanh(y) => s[0], s[1] where s = split(concat(x, y, axis=0), at=[dim(x, 0)], axis=0)"
    rule = RewriteRule("join", "none", text)
    chained = start(module({"x": (3,)}, {}, lambda emit, x: rx.tanh(emit(rx.nn.relu(x)))), rule)
    with pytest.raises(RewriteError, match="depend on itself"):
        first(chained, "join")
    apart = start(module({"x": (3,)}, {}, lambda emit, x: rx.add(emit(rx.tanh(x)), emit(rx.nn.relu(x)))), rule)
    relax.analysis.well_formed(first(apart, "join").mod)


def test_rewrite_that_changes_the_type_is_refused():
    rule = RewriteRule("shrink", "none", "relu(x) => reshape(x, shape=[prod(shape(x))])")
    state = start(module({"x": (2, 3)}, {}, lambda emit, x: rx.nn.relu(x)), rule)
    with pytest.raises(RewriteError, match="would change its type"):
        first(state, "shrink")


@pytest.mark.parametrize("right", ["matmul(x, x)", "split(x, at=[1], axis=0)[3]"])
def test_right_side_that_is_ill_typed_is_refused(right):
    rule = RewriteRule("wrong", "none", f"relu(x) => {right}")
    state = start(module({"x": (2, 3)}, {}, lambda emit, x: rx.nn.relu(x)), rule)
    with pytest.raises(RewriteError, match=r"rule wrong: .* is ill-typed"):
        first(state, "wrong")


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(1e-5, "float16"), (50000.0, "float16"), (float("inf"), "float32"), (float("nan"), "float32")],
)
def test_right_side_whose_number_is_none_is_refused(number, dtype):
    """The inverse of 1e-5 is more than a float16 holds, that of 50000 one of which it has lost the last bits."""
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.divide(x, relax.const(number, dtype)), dtype)
    state = start(mod, catalogue_rule("divide_by_number"))
    with pytest.raises(RewriteError, match=r"cannot be (computed|evaluated)"):
        first(state, "divide_by_number")


def test_a_number_that_the_left_side_computes_is_rounded_as_the_constant_is():
    rule = RewriteRule("thirds", "none", "multiply(x, number(1 / 3)) => divide(x, 3.0)")
    for value, sites in ((1 / 3, 1), (0.3334, 0)):
        mod = module({"x": (3,)}, {}, lambda emit, x, v=value: rx.multiply(x, relax.const(v, "float32")))
        assert len(start(mod, rule).sites["thirds"]) == sites


def test_left_side_whose_number_is_none_has_no_site():
    rule = RewriteRule("inverse", "none", "multiply(multiply(x, number(c)), number(1 / c)) => x")

    def scaled(a: float, b: float) -> GraphState:
        def body(emit, x):
            return rx.multiply(emit(rx.multiply(x, relax.const(a))), relax.const(b))

        return start(module({"x": (3,)}, {}, body), rule)

    assert len(scaled(2.0, 0.5).sites["inverse"]) == 1
    state = scaled(0.0, 0.0)
    assert not state.sites["inverse"]
    assert "1 / c cannot be evaluated" in state.matches.explain(rule, state.graph.nodes[-1])


def test_a_bare_number_beside_a_tensor_is_no_operand():
    """As TVM's FoldBatchnormToConv2D leaves them."""

    def body(emit, x, a):
        y = emit(rx.multiply(emit(rx.matmul(x, a)), tirx.FloatImm("float32", 0.5)))
        return rx.nn.relu(emit(rx.nn.relu(emit(rx.divide(y, tirx.FloatImm("float32", 2.0))))))

    state = start(module({"x": (2, 3)}, {"a": (3, 3)}, body))
    after = first(state, "relu_idempotent")
    assert operators(after) == ["matmul", "multiply", "divide", "nn.relu"]
    check_sites(after)


def test_output_takes_the_place_of_what_replaces_it():
    def body(emit, x):
        return unpack(emit(pack(emit(rx.nn.relu(x)))))

    state = start(module({"x": (1, 8, 3, 3)}, {}, body))
    after = first(state, "cancel_unpack_of_pack")
    assert operators(after) == ["nn.relu"]
    assert after.graph.outputs == state.graph.outputs
    relax.analysis.well_formed(after.mod)


def test_two_outputs_replaced_by_one_variable():
    def body(emit, x):
        y = emit(pack(emit(rx.nn.relu(x))))
        return (
            unpack(y),
            rx.permute_dims(emit(rx.permute_dims(emit(rx.nn.relu(x)), (0, 2, 3, 1))), (0, 3, 1, 2)),
            unpack(y),
        )

    state = start(module({"x": (1, 8, 3, 3)}, {}, body))
    after = state
    for rule in ("cancel_unpack_of_pack", "cancel_unpack_of_pack", "cancel_permutes"):
        after = first(after, rule)
        relax.analysis.well_formed(after.mod)
        check_sites(after)
    assert set(operators(after)) == {"nn.relu"}
    assert Comparison(state, TARGET).error(after) == 0.0


def test_output_replaced_by_an_input():
    """An output may become an input; a module that computes nothing at all is a state, but is known to be empty."""
    mod = module({"x": (1, 8, 3, 3)}, {}, lambda emit, x: (rx.nn.relu(x), unpack(emit(pack(x)))))
    state = start(mod)
    after = first(state, "cancel_unpack_of_pack")
    assert after.graph.output.fields[1].same_as(after.graph.params[0])
    assert not after.graph.is_empty
    relax.analysis.well_formed(after.mod)
    assert Comparison(state, TARGET).error(after) == 0.0

    alone = first(
        start(module({"x": (1, 8, 3, 3)}, {}, lambda emit, x: unpack(emit(pack(x))))), "cancel_unpack_of_pack"
    )
    assert alone.graph.is_empty
    relax.analysis.well_formed(alone.mod)


def test_value_used_twice_is_kept_for_its_other_user():
    def body(emit, x):
        y = emit(rx.nn.relu(x))
        return rx.add(emit(rx.nn.relu(y)), y)

    after = first(start(module({"x": (3,)}, {}, body)), "relu_idempotent")
    assert operators(after) == ["nn.relu", "add"]
    assert after.graph.nodes[1].inputs[0].same_as(after.graph.nodes[1].inputs[1])


def test_work_on_weights_alone_is_not_rewritten():
    def body(emit, x, w):
        folded = emit(rx.nn.relu(emit(rx.nn.relu(w))))
        return rx.add(emit(rx.nn.relu(emit(rx.nn.relu(x)))), folded)

    state = start(module({"x": (3,)}, {"w": (3,)}, body))
    (site,) = state.sites["relu_idempotent"]
    assert state.graph.nodes[site.roots[0]].inputs[0] not in state.graph.weight_only


def test_module_keeps_its_attributes_and_other_functions():
    mod = conv_chain().with_attr("source", "test")
    mod["helper"] = module({"x": (2,)}, {}, lambda emit, x: rx.nn.relu(x))["main"]
    after = first(start(mod), "block_conv")
    assert after.mod.attrs["source"] == "test"
    assert {gv.name_hint for gv in after.mod.get_global_vars()} == {"main", "helper"}


def test_a_function_that_calls_main_calls_what_is_rewritten():
    builder, ty = relax.BlockBuilder(), relax.TensorType((2, 3), "float32")
    with builder.function("main", [x := relax.Var("x", ty)]):
        with builder.dataflow():
            y = builder.emit(rx.add(x, relax.const(np.full((2, 3), 0.5, np.float32))))
            out = builder.emit_output(rx.nn.relu(builder.emit(rx.nn.relu(y))))
        builder.emit_func_output(out)
    with builder.function("wrapper", [x := relax.Var("x", ty)]):
        with builder.dataflow():
            out = builder.emit_output(relax.Call(builder.get().get_global_var("main"), [x]))
        builder.emit_func_output(out)
    mod = builder.get()
    state = first(start(mod), "relu_idempotent")
    assert sum(kernel.count for kernel in extract_kernels(state.mod, TARGET)) == 1
    after = state.bound()
    relax.analysis.well_formed(after)  # raises
    given = tvm.runtime.tensor(np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3))
    result = relax.VirtualMachine(tvm.compile(after, TARGET), tvm.cpu())["wrapper"](given).numpy()
    np.testing.assert_array_equal(result, np.maximum(given.numpy() + np.float32(0.5), 0))


def test_bound_module_holds_the_weights_again():
    mod = bound(conv_chain())
    state = start(mod)
    after = first(state, "block_conv")
    assert [p.name for p in after.bound()["main"].params] == ["x"]
    assert start(after.bound()).graph.structural_hash == after.structural_hash


def test_sites_are_the_same_for_bound_and_detached():
    mod = bound(conv_chain())
    state = start(mod)
    assert start(state.mod).sites == state.sites
    assert start(state.mod).structural_hash == state.structural_hash


def test_sites_are_listed_once_and_in_order():
    state = start(
        module({"x": (3,), "y": (3,)}, {}, lambda emit, x, y: rx.add(emit(rx.nn.relu(x)), emit(rx.nn.relu(x))))
    )
    for rule, sites in state.sites.items():
        assert len(set(sites)) == len(sites), rule
        assert list(sites) == sorted(sites), rule
