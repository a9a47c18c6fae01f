"""Every rule of the catalogue on its own instances: it fires, what comes out is equal, and near-misses say why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tvm
from one_module import outputs
from small_models import LANES, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.passes import CATALOGUE, GraphState, Instance, RewriteAction, RewriteRule, RuleSet
from rlflow_tvm.passes.instance import instance_function
from rlflow_tvm.passes.ops import CLASSES
from rlflow_tvm.passes.term import Apply, subterms
from rlflow_tvm.verify import range_error

TOLERANCE = 1e-4
"""Of the output's range: one rewrite of a few small operators, in single precision."""

NEED_POSITIVE = frozenset({"relax.sqrt", "relax.rsqrt", "relax.divide"})
BY_NAME = {rule.name: rule for rule in CATALOGUE}
NEAR_MISSES = {f"{rule.name}-{i}": (rule, miss) for rule in CATALOGUE for i, miss in enumerate(rule.near_misses)}
MEMBER_ATTRIBUTES = {"leaky_relu": {"alpha": 0.1}}


def state_of(rule: RewriteRule, instance: Instance) -> GraphState:
    return GraphState.from_module(tvm.IRModule({"main": instance_function(rule, instance)}), RuleSet((rule,), LANES))


def member_instances(rule: RewriteRule) -> tuple[Instance, ...]:
    """The rule's first instance with each operator of the classes that it ranges over."""
    terms = [t for left in rule.equation.left for t in subterms(left) if isinstance(t, Apply) and t.member is not None]
    classes = {term.member: CLASSES[term.head] for term in terms}
    first = rule.instances[0]
    return tuple(
        replace(first, attributes={**first.attributes, name: (member, MEMBER_ATTRIBUTES.get(member, {}))})
        for name, members in classes.items()
        for member in members
    )


@dataclass(frozen=True)
class Pair:
    """A function before and after one rewrite."""

    rule: str
    before: relax.Function
    after: relax.Function

    def arguments(self, rng: np.random.Generator) -> list[np.ndarray]:
        operators = {b.value.op.name for b in self.before.body.blocks[0].bindings if isinstance(b.value, relax.Call)}
        shapes = [[int(extent) for extent in param.ty.shape.values] for param in self.before.params]
        if operators & NEED_POSITIVE:
            return [rng.uniform(0.5, 1.5, shape).astype("float32") for shape in shapes]
        return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def pairs_of(rule: RewriteRule) -> list[Pair]:
    """Every instance, rewritten at every site."""
    pairs = []
    for instance in (*rule.instances, *member_instances(rule)):
        state = state_of(rule, instance)
        for site in state.sites[rule.name]:
            after = state.apply(RewriteAction(rule.name, site))
            pairs.append(Pair(rule.name, state.mod["main"], after.mod["main"]))
    return pairs


@pytest.fixture(scope="session")
def all_pairs() -> list[Pair]:
    return [pair for rule in CATALOGUE for pair in pairs_of(rule)]


@pytest.fixture(scope="session")
def errors(all_pairs: list[Pair]) -> dict[str, list[float]]:
    """Rule name -> the differences between before and after, as shares of the range."""
    rng = np.random.default_rng(0)
    arguments = [pair.arguments(rng) for pair in all_pairs]
    found = outputs([f for pair in all_pairs for f in (pair.before, pair.after)], [a for a in arguments for _ in "ba"])
    result: dict[str, list[float]] = {}
    for pair, before, after in zip(all_pairs, found[::2], found[1::2], strict=True):
        assert all(np.isfinite(array).all() for array in before), pair.rule
        result.setdefault(pair.rule, []).append(range_error(after, before))
    return result


@pytest.mark.parametrize("name", BY_NAME)
def test_rule_carries_instances_and_near_misses(name):
    rule = BY_NAME[name]
    assert len(rule.instances) >= 3
    assert any(1 in shape for instance in rule.instances for shape in instance.shapes.values())
    assert len(rule.near_misses) >= 1
    assert all(miss.reason for miss in rule.near_misses)


@pytest.mark.parametrize("name", BY_NAME)
def test_rule_fires_on_its_instances(name):
    rule = BY_NAME[name]
    for instance in (*rule.instances, *member_instances(rule)):
        state = state_of(rule, instance)
        assert state.sites[name], instance
        for site in state.sites[name]:
            after = state.apply(RewriteAction(name, site))
            assert after.structural_hash != state.structural_hash, instance
            relax.analysis.well_formed(after.mod)
            tvm.ir.assert_structural_equal(after.mod["main"].ret_ty, state.mod["main"].ret_ty)
            assert state.matches.explain(rule, state.graph.nodes[site.roots[0]]) == ""


@pytest.mark.parametrize("name", BY_NAME)
def test_rule_keeps_the_value(name, errors):
    assert len(errors[name]) >= len(BY_NAME[name].instances)
    assert max(errors[name]) <= TOLERANCE


def test_comparison_sees_a_wrong_rule():
    wrong = RewriteRule(
        "wrong", "none", "subtract(x, y) => subtract(y, x)", instances=(Instance({"x": (3,), "y": (3,)}),)
    )
    pair = pairs_of(wrong)[0]
    arguments = pair.arguments(np.random.default_rng(0))
    before, after = outputs([pair.before, pair.after], [arguments, arguments])
    assert range_error(after, before) > 0.1


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_miss_says_why(case):
    rule, miss = NEAR_MISSES[case]
    state = state_of(rule, miss)
    assert state.sites[rule.name] == ()
    roots = range(len(rule.equation.left))
    reasons = [state.matches.explain(rule, node, root) for node in state.graph.nodes for root in roots]
    assert any(miss.reason in reason for reason in reasons), reasons


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
