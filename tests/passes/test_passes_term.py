"""Rules as text and as data: round trips, and what is said of malformed ones."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import tvm
from small_models import LANES, module
from tvm.relax import op as rx

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import CATALOGUE, GraphState, RewriteRule, RuleSet
from rlflow_tvm.passes.attribute import Attribute
from rlflow_tvm.passes.instance import instance_function
from rlflow_tvm.passes.proof.sampling import Sampler
from rlflow_tvm.passes.term import Apply, Item, Number, Var, depth, parse_equation, subterms

BY_NAME = {rule.name: rule for rule in CATALOGUE}


@pytest.mark.parametrize("name", BY_NAME)
def test_equation_round_trips_as_text(name):
    equation = BY_NAME[name].equation
    assert parse_equation(str(equation)) == equation
    assert str(parse_equation(str(equation))) == str(equation)


@pytest.mark.parametrize("name", BY_NAME)
def test_rule_round_trips_as_json(name):
    rule = BY_NAME[name]
    read = RewriteRule.from_json(json.loads(json.dumps(rule.to_json())))
    assert (read.name, read.family, read.when, read.symmetric) == (rule.name, rule.family, rule.when, rule.symmetric)
    assert read.equation == rule.equation
    assert read.to_json() == rule.to_json()


@pytest.mark.parametrize("name", BY_NAME)
def test_rule_read_from_json_matches_what_the_rule_matches(name):
    rule = BY_NAME[name]
    read = RewriteRule.from_json(rule.to_json())
    sampler = Sampler(rule)
    misses = islice((miss for miss, _ in sampler.near_misses(50)), 2)
    for sample in (*islice(sampler.samples(5000), 3), *misses):
        mod = tvm.IRModule({"main": instance_function(rule, sample.instance, sample.dtype)})
        expected, found = (GraphState.from_module(mod, RuleSet((r,), LANES)).sites for r in (rule, read))
        assert found == expected


def test_where_names_a_term_once_and_an_attribute_for_all():
    equation = parse_equation(
        "relu(x), tanh(x) => s[0], s[1] where s = split(x, at=p, axis=k); p = [dim(x, 0) // 2]; k = 0"
    )
    split = Apply("split", (Var("x"),), (("at", Attribute("p")), ("axis", Attribute("k"))))
    assert equation.right == (Item(split, 0), Item(split, 1))
    assert equation.lets == (("p", Attribute("[dim(x, 0) // 2]")), ("k", Attribute("0")))


def test_terms_have_depths_and_subterms():
    (term,) = parse_equation("add(relu(x), split(y, at=p, axis=0)[1]) => x").left
    assert depth(term) == 3
    assert [type(t) for t in subterms(term)] == [Apply, Apply, Var, Item, Apply, Var]
    assert depth(Number(1.0)) == depth(Var("x")) == 0


MALFORMED = {
    "relu(x) -> x": "exactly one => is needed",
    "relu(x) => x => x": "exactly one => is needed",
    "relu((x) => x": "cannot be read near",
    "foo(x) => x": "no operator foo",
    "Nope[f](x) => x": "no class Nope; there are Unary, Binary",
    "relu(x, axis=1) => x": "relu has no attribute 'axis'",
    "add(x) => x": "add takes 2 operands, not 1",
    "Unary[f](x, y) => x": "relu takes 1 operands, not 2",
    "Unary[f](x, alpha=1) => x": "stands for its attributes too",
    "relu(x, **k, **j) => x": "at most one **name",
    "relu(x), relu(y) => x": "2 terms on the left, 1 on the right",
    "relu(x) => relu(x) where 1 = 2": "where-clause '1 = 2' is not of the form name = value",
    "relu('a') => x": "'a' is no term",
    "split(x, at=p, axis=k)[a] => x": "is no term",
    "relu(*x) => x": "is no term",
    "relu(x) => y": "y stands on the right side only",
    "x => x": "the left term x is no operator",
    "Unary[f](x) => Unary[g](x)": "g stands on the right side only",
    "concat(x, y, **k) => concat(x, y, **j)": "j stands on the right side only",
    "reshape(x, shape=s) => reshape(x, shape=t)": "'t' is not bound by the left side",
    "relu(x) => reshape(x, shape=s) where s = t": "'t' is not bound by the left side",
    "relu(x) => reshape(x, shape=x.shape)": "'x.shape' is not allowed in a rule",
    "relu(x) => reshape(x, shape=(lambda: 1)())": "is not allowed in a rule",
    "relu(x) => reshape(x, shape=[i for i in s])": "is not allowed in a rule",
    "relu(x) => reshape(x, shape=2 ** 9)": "is not allowed in a rule",
    "relu(x) => reshape(x, shape=len(x=1))": "is not allowed in a rule",
    "reshape(x, shape=s) => reshape(x, shape=s[::2])": "'::2' is not allowed in a rule",
    "relu(x) => reshape(x, shape=open('rule'))": "'open' is not bound by the left side",
    "relu(x) => s where s = relu(x); s = abs(x)": "s is said twice behind where",
    "relu(x) => x where x = relu(x)": "x is a term behind where, and a name on the left",
    "concat(axis=0) => concat(axis=0)": "concat takes at least 1 operands, not 0",
    "take(x, i, axis=i, mode=m) => x": "i stands for two things",
    "permute_dims(x, axes=p) => permute_dims(x, axes=p) where p = [0]": "p stands for two things",
    "softmax(x, axis=f) => Unary[f](x)": "f stands for two things",
    "reshape(x, shape=k) => permute_dims(x, **k)": "k stands for two things",
    "reshape(x, shape=s) => permute_dims(x, **x)": "x stands for two things",
    "pad(x, **k) => reshape(x, shape=k)": "k stands for two things",
    "Unary[f](x) => multiply(x, number(f))": "f stands for two things",
    "relu(x) => reshape(x, shape=x)": "x stands for two things",
    "softmax(x, axis=k), softmax(y, axis=k + 1) => x, y": "which is matched by itself, does not know k",
    "relu(x), softmax(y, axis=rank(x) - 1) => x, y": "which is matched by itself, does not know x",
    "pack(x, block=2 * o) => x where o = 2": "which is matched by itself, does not know o",
    "pad(x, **k) => pad(x, **q) where q = k": "q stands for two things",
    "split(x, at=p, axis=k) => x": "gives several tensors: take one of them, as split(x, at=p, axis=k)[0]",
    "relu(x) => relu(split(x, at=[1], axis=0))": "gives several tensors",
    "relu(x)[0] => x": "relu(x)[0] is no part of anything",
    "relu(x[0]) => x": "x[0] is no part of anything",
    "Commutative[f](x, y) => Linear[f](y, x)": "f need not be one of Linear",
    "Unary[f](x) => Binary[f](x, x)": "f need not be one of Binary",
    "x.relu(y) => y": "no operator x.relu",
    "(lambda: 1)(x) => x": "no operator lambda: 1",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_rule_text_is_refused(text):
    with pytest.raises(RewriteError) as caught:
        RewriteRule("bad", "none", text)
    assert MALFORMED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("when", ["x.shape == 1", "k == 1", "__import__('os') == 1", "(lambda: True)()", "rank(x"])
def test_malformed_condition_is_refused(when):
    with pytest.raises(RewriteError):
        RewriteRule("bad", "none", "relu(x) => x", when=(when,))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("relu(block) => relu(block)", "block"),
        ("pack(x, block=lanes) => x", "lanes"),
        ("conv2d(x, w, **range) => x", "range"),
        ("Unary[max](x) => x", "max"),
        ("relu(x) => reshape(x, shape=shape) where shape = [dim(x, 0)]", "shape"),
    ],
)
def test_variable_that_would_hide_a_parameter_or_function_is_refused(text, name):
    with pytest.raises(RewriteError, match=f"rule bad: {name} is a parameter or function"):
        RewriteRule("bad", "none", text)


def touch(path: Path) -> str:
    return f"__import__('pathlib').Path({str(path)!r}).touch()"


@pytest.mark.parametrize(
    "rule",
    [
        {"equation": "relu(x) => reshape(x, shape={call})", "when": []},
        {"equation": "reshape(x, shape={call}) => x", "when": []},
        {"equation": "relu(x) => x", "when": ["{call}"]},
        {"equation": "relu(x) => x where s = {call}", "when": []},
        {"equation": "{call}(x) => x", "when": []},
    ],
)
def test_text_of_a_rule_file_is_never_executed(rule, tmp_path):
    mark = tmp_path / "executed"
    data = {
        "name": "evil",
        "family": "none",
        "equation": rule["equation"].format(call=touch(mark)),
        "when": [text.format(call=touch(mark)) for text in rule["when"]],
    }
    with pytest.raises(RewriteError):
        RewriteRule.from_json(data)
    assert not mark.exists()


@pytest.mark.parametrize("text", ["__import__('os')", "x.ty", "x(1)", "(lambda: 1)()", "[i for i in p]", "y", "p ** 2"])
def test_attribute_expression_outside_the_language_is_refused_when_evaluated(text):
    (x,) = module({"x": (2, 3)}, {}, lambda emit, x: rx.nn.relu(x))["main"].params
    with pytest.raises(RewriteError):
        Attribute(text).value({"x": x, "p": (0, 1)})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dim(x, 0) * 2 - 1", 3),
        ("[dim(x, 1) // 2, -p[0] % 5]", (1, 4)),
        ("p[1:] == [2] and not p[0] > 1 or False", True),
        ("0 < p[0] <= p[1] < 2", False),
        ("compose([2, 0, 1], inverse([2, 0, 1])) == range(3)", True),
        ("swap_last(rank(x))", (1, 0)),
        ("permuted(shape(x), [1, 0])", (3, 2)),
        ("moves_only_units([1, 4, 1], [1, 0, 2])", True),
        ("moves_only_units([2, 4], [1, 0])", False),
        ("broadcasts_along_channels([1, 8, 1, 1], [2, 8, 5, 5])", True),
        ("broadcasts_along_channels([1, 1, 1, 1], [2, 8, 5, 5])", False),
        ("nchwc(8)", "NCHW8c"),
        ("max(p[0], 7) in [7, 8]", True),
        ("prod(shape(x))", 6),
    ],
)
def test_attribute_expressions(text, value):
    (x,) = module({"x": (2, 3)}, {}, lambda emit, x: rx.nn.relu(x))["main"].params
    assert Attribute(text).value({"x": x, "p": (1, 2)}) == value


@pytest.mark.parametrize(
    "text",
    [
        "'%10000000000d' % 1",
        "len(range(10000000000)) > 0",
        "range(10 * 1000000000000000000000)",
        "[0] * 10000000000",
        "10000000000 * 'a'",
        "[0] * 4000 + [0] * 4000",
        "swap_last(10000000000)",
        "normal(None, 10000000000)",
        "constant_along([1], [0], 10000000000)",
        "prod(range(1, 4097))",
        "prod(range(1, 400)) * prod(range(1, 400))",
        "nchwc([[[1] * 4096] * 4096] * 4096)",
        "[[[0]]]",
        "a * a where a = prod(range(1, 400)) / 7",
        "a + a where a = 7 / prod(range(1, 400))",
        "a - a where a = 7 / prod(range(1, 400))",
        "a % a where a = 7 / prod(range(1, 400))",
    ],
)
def test_attribute_expression_that_would_fill_the_memory_is_refused(text):
    text, _, where = text.partition(" where a = ")
    named = {"a": Attribute(where).value({})} if where else {}
    with pytest.raises(RewriteError, match=r"more than 4096|is not formatted"):
        Attribute(text).value(named)


def test_a_text_is_no_number():
    """One of a few letters may have a thousand million digits."""
    with pytest.raises(RewriteError, match="no number"):
        Attribute("'1e999999999' / 1").value({})


def test_names_that_use_each_other_twice_are_refused():
    lets = "; ".join(["t0 = add(x, x)"] + [f"t{i} = add(t{i - 1}, t{i - 1})" for i in range(1, 40)])
    with pytest.raises(RewriteError, match="t8 is more than 1000 terms, written out"):
        RewriteRule("doubled", "none", f"relu(x) => t39 where {lets}")


def test_terms_that_are_too_deep_are_refused():
    """Printing one, and building it, calls itself for each operator."""
    chain = "; ".join(f"t{i} = " + "relu(" * 30 + ("x" if i == 0 else f"t{i - 1}") + ")" * 30 for i in range(8))
    with pytest.raises(RewriteError, match="more than 100 operators deep"):
        RewriteRule("deep", "none", f"relu(x) => t7 where {chain}")
    with pytest.raises(RewriteError, match="more than 100 operators deep"):
        RewriteRule("deep", "none", "relu(" * 101 + "x" + ")" * 101 + " => x")
    RewriteRule("deep", "none", f"relu(x) => t2 where {'; '.join(chain.split('; ')[:3])}")


def test_left_term_that_would_have_too_many_forms_is_refused():
    def summed(count: int, symmetric: bool = False) -> RewriteRule:
        term = "x"
        for number in range(count):
            term = f"add({term}, y{number})"
        return RewriteRule("sums", "none", f"{term} => x", symmetric=symmetric)

    summed(10)
    summed(30, symmetric=True)  # matched as written
    with pytest.raises(RewriteError, match="rule sums: 11 commutative operators in one left term"):
        summed(11)


@pytest.mark.parametrize("field", ["name", "family", "equation", "when"])
def test_rule_data_without_a_field_is_refused(field):
    data = BY_NAME["relu_idempotent"].to_json()
    del data[field]
    with pytest.raises(RewriteError, match=f"no field '{field}'"):
        RewriteRule.from_json(data)


def test_rules_of_one_name_are_refused():
    rule = CATALOGUE[0]
    with pytest.raises(RewriteError, match=f"two rules are called {rule.name}"):
        RuleSet((rule, *CATALOGUE), LANES)
