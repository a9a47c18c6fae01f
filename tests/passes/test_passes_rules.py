"""Every rule of the catalogue on samples of what it matches: it fires, keeps the value; near-misses say why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import cycle, islice

import numpy as np
import pytest
import tvm
from small_models import LANES, TARGET, matched, module
from tvm import relax
from tvm.ir import GenericConst as Constant
from tvm.relax import op as rx

from rlflow_tvm.errors import CostError, RewriteError
from rlflow_tvm.float_check import float_check
from rlflow_tvm.passes import CATALOGUE, GraphState, RewriteAction, RewriteRule, RuleSet
from rlflow_tvm.passes.instance import instance_function
from rlflow_tvm.passes.proof.sampling import Sample, Sampler

ATTEMPTS = 20000
SAMPLES = 4
BY_NAME = {rule.name: rule for rule in CATALOGUE}
CONDITIONAL = [rule.name for rule in CATALOGUE if any(not text.startswith(("is_float", "dtype")) for text in rule.when)]
"""Rules with conditions of which near-misses can be drawn: samples are of single floats, or of integers too where
nothing is divided."""


def state_of(sample: Sample) -> GraphState:
    mod = tvm.IRModule({"main": instance_function(sample.rule, sample.instance, sample.dtype)})
    return GraphState.from_module(mod, RuleSet((sample.rule,), LANES))


@pytest.mark.parametrize("name", BY_NAME)
def test_rule_fires_on_its_samples(name):
    rule = BY_NAME[name]
    samples = list(islice(Sampler(rule, 2).samples(ATTEMPTS), SAMPLES))
    assert len(samples) == SAMPLES
    for sample in samples:
        state = state_of(sample)
        assert state.sites[name], sample
        for site in state.sites[name]:
            after = state.apply(RewriteAction(name, site))
            assert after.structural_hash != state.structural_hash, sample
            relax.analysis.well_formed(after.mod)
            tvm.ir.assert_structural_equal(after.mod["main"].ret_ty, state.mod["main"].ret_ty)
            assert state.matches.explain(rule, state.graph.nodes[site.roots[0]]) == ""


@pytest.mark.parametrize(
    "equation",
    [
        "subtract(x, y) => subtract(y, x)",
        "sqrt(multiply(x, x)) => x",
        "divide(x, sqrt(multiply(y, y))) => divide(x, y)",
        "divide(abs(x), sqrt(y)) => divide(x, sqrt(y))",
        "divide(x, abs(y)) => divide(x, y)",
    ],
)
def test_compiling_sees_a_wrong_rule(equation: str):
    condition = ("shape(x) == shape(y)",) if "y)" in equation else ()
    wrong = RewriteRule("wrong", "none", equation, when=condition)
    with pytest.raises(RewriteError, match="wrong: differs"):
        float_check([wrong], TARGET)


def test_rules_are_compiled_in_place_where_nothing_can_be_linked(monkeypatch):
    def no_compiler(*_):
        raise CostError("install a C++ compiler")

    rules = [BY_NAME["relu_idempotent"], BY_NAME["gelu_from_halved_input"]]
    linked = float_check(rules, TARGET)
    monkeypatch.setattr("rlflow_tvm.float_check.link_library", no_compiler)
    assert float_check(rules, TARGET).keys() == linked.keys()


def test_outputs_of_another_shape_or_type_are_a_difference(monkeypatch):
    for other in (np.zeros((3, 1), "float32"), np.zeros(3, "float16")):
        found = cycle([[np.zeros(3, "float32")], [other]])
        monkeypatch.setattr(
            "rlflow_tvm.float_check.outputs", lambda functions, *_, f=found: [next(f) for _ in functions]
        )
        with pytest.raises(RewriteError, match="relu_idempotent: differs by inf"):
            float_check([BY_NAME["relu_idempotent"]], TARGET)


@pytest.mark.parametrize("number", [0, 1])
def test_a_nan_in_any_output_is_a_difference(number, monkeypatch):
    def of_two(functions, _arguments, _target):
        found = [[np.zeros(3), np.zeros(3)] for _ in functions]
        found[1][number][2] = np.nan  # of what the first sample is rewritten to
        return found

    monkeypatch.setattr("rlflow_tvm.float_check.outputs", of_two)
    with pytest.raises(RewriteError, match="relu_idempotent: differs by nan"):
        float_check([BY_NAME["relu_idempotent"]], TARGET)


@pytest.mark.parametrize("name", CONDITIONAL)
def test_near_miss_says_why(name):
    rule = BY_NAME[name]
    seen, conditions = set(), {condition.text for condition in rule.conditions}
    for miss, condition in Sampler(rule, 3).near_misses(2000):
        if seen >= conditions:
            break
        if condition in seen:
            continue
        state = state_of(miss)
        if state.sites[name]:  # matched all the same, with the operands of a commutative operator the other way round
            assert all(any(site.variant) for site in state.sites[name]), str(miss)
            continue
        roots = range(len(rule.equation.left))
        reasons = [state.matches.explain(rule, node, root) for node in state.graph.nodes for root in roots]
        assert any(condition in reason for reason in reasons), (str(miss), condition, reasons)
        seen.add(condition)
    assert seen, "a condition that always holds is none"


def test_a_rule_of_another_operator_says_which_it_needs():
    rule = BY_NAME["relu_idempotent"]
    state = GraphState.from_module(
        module({"x": (3,)}, {}, lambda emit, x: rx.nn.relu(emit(rx.tanh(x)))), RuleSet((rule,), LANES)
    )
    assert "relu is needed, not tanh" in state.matches.explain(rule, state.graph.nodes[-1])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gelu_is_told_and_spelled_out_to_the_precision_of_its_type(dtype):
    def spelled(emit, x):
        one, half, root = (relax.const(value, dtype) for value in (1.0, 0.5, 2**0.5))
        error = emit(rx.add(emit(rx.erf(emit(rx.divide(x, root)))), one))
        return rx.multiply(emit(rx.multiply(x, half)), error)

    there, back = (BY_NAME[name] for name in ("gelu_from_halved_input", "gelu_to_error"))
    state = GraphState.from_module(module({"x": (3,)}, {}, spelled, dtype), RuleSet((there, back), LANES))
    gelu = state.apply(RewriteAction(there.name, state.sites[there.name][0]))
    again = gelu.apply(RewriteAction(back.name, gelu.sites[back.name][0]))
    numbers = [
        sorted(float(c.value.numpy()) for node in each.graph.nodes for c in node.value.args if isinstance(c, Constant))
        for each in (state, again)
    ]
    assert numbers[0] == numbers[1] == [0.5, 1.0, float(np.dtype(dtype).type(2**0.5))]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_weight_may_be_either_part_of_a_sum_that_is_multiplied(swapped):
    def product(emit, x, y, w):
        return rx.matmul(x, emit(rx.add(w, y) if swapped else rx.add(y, w)))

    rule = BY_NAME["matmul_distribute_right"]
    mod = module({"x": (3, 4), "y": (4, 5)}, {"w": (4, 5)}, product)
    assert len(GraphState.from_module(mod, RuleSet((rule,), LANES)).sites[rule.name]) == 1


Body = Callable[..., relax.Expr]
SWAPPED: dict[str, tuple[Body, Body]] = {
    "fold_bias_chain": (
        lambda emit, x, a, b: rx.add(emit(rx.add(x, a)), b),
        lambda emit, x, a, b: rx.add(b, emit(rx.add(a, x))),
    ),
    "distribute_scale_over_bias": (
        lambda emit, x, a, b: rx.multiply(emit(rx.add(x, a)), b),
        lambda emit, x, a, b: rx.multiply(b, emit(rx.add(a, x))),
    ),
    "fold_scale_into_matmul": (
        lambda emit, x, a, b: rx.multiply(emit(rx.matmul(x, a)), b),
        lambda emit, x, a, b: rx.multiply(b, emit(rx.matmul(x, a))),
    ),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_rule_fires_with_swapped_operands(name):
    shapes = {"x": (3, 4)}, {"a": (4, 4) if "matmul" in name else (4,), "b": (4,)}
    rules = RuleSet((BY_NAME[name],), LANES)
    as_written, swapped = (GraphState.from_module(module(*shapes, body), rules) for body in SWAPPED[name])
    ends = []
    for state in (as_written, swapped):
        (site,) = state.sites[name]
        ends.append(state.apply(RewriteAction(name, site)))
    assert as_written.structural_hash != swapped.structural_hash
    assert ends[0].structural_hash == ends[1].structural_hash


def test_operands_that_do_not_commute_are_not_swapped():
    state = GraphState.from_module(
        module({"x": (3, 4)}, {"a": (4,)}, lambda emit, x, a: rx.subtract(a, x)),
        RuleSet((BY_NAME["subtract_to_add"],), LANES),
    )
    assert state.sites["subtract_to_add"] == ()


def test_integers_are_not_divided_by_multiplying():
    def divided(dtype: str) -> GraphState:
        mod = module({"x": (3,)}, {"a": (3,)}, lambda emit, x, a: rx.divide(x, a), dtype)
        return GraphState.from_module(mod, RuleSet((BY_NAME["divide_to_multiply"],), LANES))

    assert divided("float32").sites["divide_to_multiply"]
    assert not divided("int32").sites["divide_to_multiply"]
    assert not divided("float16").sites["divide_to_multiply"]  # the inverse of 1e-5 is infinite


def test_a_result_of_the_operands_type_is_the_usual_one():
    """As importers of torch's programs write it."""

    def body(emit, x, w, y, k, b):
        dense = emit(rx.matmul(x, w, out_dtype="float32"))
        return rx.multiply(dense, b), emit(rx.nn.conv2d(y, k, out_dtype="float32"))

    shapes = {"w": (4, 4), "k": (4, 3, 1, 1), "b": (4,)}
    mod = module({"x": (3, 4), "y": (1, 3, 5, 5)}, shapes, body)
    names = ("fold_scale_into_matmul", "conv_1x1_to_matmul")
    assert matched(mod, *names) == set(names)


def test_parallel_products_are_merged_wherever_their_biases_stand():
    def body(emit, x, v, w, a, b):
        return rx.add(a, emit(rx.matmul(x, v))), rx.add(emit(rx.matmul(x, w)), b)

    mod = module({"x": (3, 4)}, {"v": (4, 5), "w": (4, 6), "a": (5,), "b": (6,)}, body)
    assert matched(mod, "merge_biased_matmuls")


@pytest.mark.parametrize("name", ["conv_factor_kernels", "fold_scale_into_conv"])
def test_narrow_weights_of_a_wide_result_are_not_added_or_scaled(name):
    """int8 kernels of 100 and 100 add up to -56 in int8, and to 200 in int32."""

    def sites(dtype: str, out_dtype: str | None) -> int:
        conv = functools.partial(rx.nn.conv2d, out_dtype=out_dtype)

        def body(emit, x, w, v, s):
            y = emit(conv(x, w))
            return rx.add(y, emit(conv(x, v))), rx.multiply(y, emit(rx.astype(s, out_dtype or dtype)))

        weights = {"w": (2, 1, 1, 1), "v": (2, 1, 1, 1), "s": (1, 2, 1, 1)}
        mod = module({"x": (1, 1, 2, 2)}, weights, body, dtype)
        return len(GraphState.from_module(mod, RuleSet((BY_NAME[name],), LANES)).sites[name])

    assert sites("int8", "int32") == sites("float16", "float32") == 0
    assert sites("int8", None) == sites("float32", None) == sites("float32", "float32") > 0


def test_pads_that_crop_are_not_joined():
    names = ("pad_into_conv", "pads_together", "pad_of_nothing", "relu_before_pad")

    def padded(width: int) -> tvm.IRModule:
        widths = [0] * 4 + [width] * 4

        def body(emit, x, w):
            y, z = emit(rx.nn.pad(x, widths)), rx.nn.pad(x, [0] * 7 + [width])
            return rx.nn.conv2d(y, w, padding=1), rx.nn.relu(emit(rx.nn.pad(y, widths))), z

        return module({"x": (1, 2, 8, 8)}, {"w": (2, 2, 3, 3)}, body)

    assert matched(padded(1), *names) == set(names) - {"pad_of_nothing"}
    assert matched(padded(-1), *names) == set()


def test_norms_are_matched_over_the_last_axes_in_order():
    names = ("scale_into_layer_norm", "bias_into_layer_norm", "scale_into_rms_norm", "layer_norm_to_rms_norm")

    def normed(*axes: int) -> set[str]:
        def body(emit, x, g, b, s):
            y = emit(rx.nn.layer_norm(x, g, b, list(axes)))
            return rx.multiply(y, s), rx.add(y, s), rx.multiply(emit(rx.nn.rms_norm(x, g, list(axes))), s)

        return matched(module({"x": (3, 3, 3)}, dict.fromkeys("gbs", (3,) * len(axes)), body), *names)

    assert normed(2) == normed(-1) == normed(1, 2) == set(names)
    assert normed(0) == normed(1) == normed(0, 1) == normed(2, 1) == set()


def test_means_of_integers_are_left_alone():
    """Their factors, 0.25 of four, would be 0."""
    names = ("avg_pool_to_depthwise", "adaptive_pool_to_mean", "keep_reduced_axes", "avg_pool_of_concat")

    def means(dtype: str) -> tvm.IRModule:
        def body(emit, x):
            pool = functools.partial(rx.nn.avg_pool2d, pool_size=(2, 2), strides=(2, 2))
            both = pool(emit(rx.concat([x, x], 1)))
            return pool(x), rx.nn.adaptive_avg_pool2d(x, (1, 1)), rx.mean(x, [2, 3]), both

        return module({"x": (1, 2, 4, 4)}, {}, body, dtype)

    assert matched(means("float32"), *names) == matched(means("float16"), *names) == set(names)
    assert matched(means("int32"), *names) == matched(means("uint8"), *names) == set()
    rule = BY_NAME["avg_pool_to_depthwise"]
    state = GraphState.from_module(means("int32"), RuleSet((rule,), LANES))
    reasons = [state.matches.explain(rule, node) for node in state.graph.nodes]
    assert any("avg_pool2d is needed as rules know it" in reason for reason in reasons)


def test_truth_values_are_left_alone():
    """Of them TVM's sum is whether any is true; what only moves them is as of numbers."""

    def joined(dtype: str) -> tvm.IRModule:
        def body(emit, x, y):
            both = emit(rx.concat([x, y], 1))
            return rx.sum(both, [1]), rx.reshape(emit(rx.reshape(x, (6,))), (3, 2))

        return module({"x": (2, 3), "y": (2, 3)}, {}, body, dtype)

    names = ("sum_of_concat", "compose_reshapes")
    assert matched(joined("int32"), *names) == set(names)
    assert matched(joined("bool"), *names) == {"compose_reshapes"}


@pytest.mark.parametrize(("dtype", "found"), [("float32", True), ("float16", True), ("float64", False)])
def test_norms_are_recognised_where_there_is_one(dtype, found):
    """TVM's layer norm is not for float64, and its RMS norm computes in float32."""

    def body(emit, x, g, b):
        centred = emit(rx.subtract(x, emit(rx.mean(x, [-1], keepdims=True))))
        power = emit(rx.mean(emit(rx.multiply(centred, centred)), [-1], keepdims=True))
        root = emit(rx.rsqrt(emit(rx.add(power, relax.const(1e-3, dtype)))))
        plain = emit(rx.mean(emit(rx.multiply(x, x)), [-1], keepdims=True))
        own = emit(rx.rsqrt(emit(rx.add(plain, relax.const(1e-3, dtype)))))
        normed = emit(rx.multiply(emit(rx.multiply(centred, root)), g))
        return rx.add(normed, b), rx.multiply(emit(rx.multiply(x, own)), g)

    names = ("layer_norm_from_root_inverse", "rms_norm_from_root_inverse")
    state = module({"x": (2, 3, 4)}, {"g": (4,), "b": (4,)}, body, dtype)
    assert matched(state, *names) == (set(names) if found else set())


@pytest.mark.parametrize(
    ("number", "constant", "dtype", "found"),
    [
        ("0.0", 0.0, "float64", True),
        ("0.0", 1e-50, "float64", False),  # a float32 would not hold it
        ("0.0", 1e300, "float64", False),
        ("1e-50", 1e-50, "float64", True),
        ("1e-50", 0.0, "float32", False),
        ("1e300", 1.0, "float16", False),
        ("0.1", 0.1, "float16", True),
        ("0.1", 0.1, "float32", True),
        ("0.1", 0.10000000149011612, "float64", False),  # the float32 next to 0.1
        ("2.0", 2, "int32", True),
        ("0.5", 0, "int32", False),
    ],
)
def test_numbers_are_compared_in_the_element_type_of_the_constant(number, constant, dtype, found):
    rule = RewriteRule("tried", "none", f"maximum(x, {number}) => x")
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.maximum(x, relax.const(constant, dtype)), dtype)
    assert bool(GraphState.from_module(mod, RuleSet((rule,), LANES)).sites["tried"]) == found


def test_whole_numbers_are_computed_exactly():
    """Their product has 63 bits, of which a float holds 53."""
    rule = RewriteRule("tried", "none", "multiply(multiply(x, number(a)), number(b)) => multiply(x, number(a * b))")
    number = relax.const(np.array(3037000499), "int64")
    mod = module({"x": (3,)}, {}, lambda emit, x: rx.multiply(emit(rx.multiply(x, number)), number), "int64")
    state = GraphState.from_module(mod, RuleSet((rule,), LANES))
    (node,) = state.apply(RewriteAction("tried", state.sites["tried"][0])).graph.nodes
    assert int(node.value.args[1].value.numpy()) == 3037000499**2
