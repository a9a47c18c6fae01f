"""Synthesis: what is found is proved and as general as what was written by hand; a stopped search goes on."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes import CATALOGUE
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.synthesis.coverage import RuleIndex, covered, instances
from rlflow_tvm.passes.synthesis.decide import decide
from rlflow_tvm.passes.synthesis.enumerate import ShuffledFields, domain_for, enumerate_terms
from rlflow_tvm.passes.synthesis.generalise import Point, generalised, skeleton
from rlflow_tvm.passes.synthesis.ground import apply, leaf, rewritten
from rlflow_tvm.passes.synthesis.journal import Journal
from rlflow_tvm.passes.synthesis.pairs import paired
from rlflow_tvm.passes.synthesis.search import find_rules
from rlflow_tvm.passes.synthesis.world import BATCHES, IMAGES, KNOWN, MATRICES, WORLDS
from rlflow_tvm.passes.verify import PROOF_VERSION, Proof, verify_rule

OPERATORS = ("relu", "permute_dims", "concat")
BY_NAME = {rule.name: rule for rule in CATALOGUE}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The journal of the search whose rules are `found`."""
    return tmp_path_factory.mktemp("synthesis") / "journal"


@pytest.fixture(scope="module")
def found(kept):
    return find_rules(OPERATORS, 2, journal=kept)


def test_hand_written_rules_are_found_again(found):
    rules, counts = found
    index = RuleIndex(one.rule for one in rules)
    for name in ("compose_permutes", "cancel_permutes", "relu_idempotent", "flatten_concat", "nest_concat",
                 "flatten_concat_right", "permute_after_unary", "permute_before_unary"):  # fmt: skip
        points = instances(BY_NAME[name], 8)
        outcome = covered(points, index)
        assert points, name
        assert outcome.not_at_all == 0, name
    assert counts.enumerated > counts.paired > counts.groups >= counts.implied + counts.unproved
    assert counts.kept == len(rules)


def test_every_found_rule_is_proved_on_other_samples(found):
    for one in found[0]:
        outcome = verify_rule(one.rule, instances=24, seed=99)
        assert isinstance(outcome, Proof), outcome


def test_no_found_rule_does_what_another_does(found):
    rules = [one.rule for one in found[0]]
    for rule in rules:
        points = instances(rule, 4)
        assert covered(points, RuleIndex(r for r in rules if r is not rule), steps=1).at_once < len(points), rule


def told(found) -> list[dict]:
    return [one.to_json() for one in found[0]]


def test_neither_a_journal_nor_the_number_of_processes_changes_anything(found):
    assert told(find_rules(OPERATORS, 2, jobs=2)) == told(found)


def test_a_stopped_search_goes_on(found, kept, tmp_path):
    journal = shutil.copy(kept, tmp_path / "journal")
    lines = journal.read_text().splitlines(keepends=True)
    cut = "".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:20]
    journal.write_text(cut)
    assert told(find_rules(OPERATORS, 2, journal=journal)) == told(found)
    with pytest.raises(RewriteError, match=r"is of another search \(seed 0, "):
        find_rules(OPERATORS, 2, seed=1, journal=journal)
    journal.write_text(journal.read_text().replace(f'"proofs": {PROOF_VERSION}', '"proofs": 0', 1))
    with pytest.raises(RewriteError, match=r"is of another search \(proofs 0\)"):
        find_rules(OPERATORS, 2, journal=journal)


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path):
    path, settings = tmp_path / "journal", {"seed": 0}
    path.write_text('{"settings": {"se')
    Journal(path, settings).put("a", [])
    path.write_text(path.read_text() + '{"group": "b", "fo')
    Journal(path, settings).put("c", [])
    again = Journal(path, settings)
    assert [again.has(key) for key in "abc"] == [True, False, True]
    with pytest.raises(RewriteError, match=r"is of another search \(seed 0\)"):
        Journal(path, {"seed": 1})


def test_decisions_of_nobody_knows_which_search_are_not_read(tmp_path):
    path, settings = tmp_path / "journal", {"seed": 0}
    path.write_text('{"settings": {"se{"settings": {"seed": 0}}\n{"group": "a", "found": []}\n5\n[]\n')
    journal = Journal(path, settings)
    assert not journal.has("a")
    journal.put("b", [])
    odd = ['"text"', '{"group": "c"}', '{"group": "d", "found": 7}', '{"group": 1, "found": []}']
    path.write_text("\n".join([path.read_text(), *odd]) + "\n")
    again = Journal(path, settings)
    assert [again.has(key) for key in ("a", "b", "c", "d", 1)] == [False, True, False, False, False]


def test_values_that_are_equal_by_chance_make_no_rule(found):
    enumeration = enumerate_terms(MATRICES, ("relu",), 1)
    relu_of_scalar = next(n for n, term in enumerate(enumeration.terms) if term.operator == "relu")
    assert enumeration.node(relu_of_scalar, 0).operator == "relu"
    assert not any(str(one.rule.equation).endswith("relu(x) => x") for one in found[0])


@pytest.mark.parametrize(
    ("operators", "key", "conditions"),
    [
        (("conv2d", "concat"), "conv2d(concat(x, y), concat(z, w)) => concat(conv2d(x, z), conv2d(y, w))",
         {"shape(x) == shape(z)"}),  # without it the two are different once in some hundred draws
        (("conv2d", "multiply", "reshape"), "conv2d(x, multiply(y, reshape(z))) => multiply(z, conv2d(x, y))",
         {"rank(x) == 4", "dim(x, 2) == 1"}),  # an extent can be asked of tensors of so many axes
    ],
)  # fmt: skip
def test_conditions_that_few_draws_tell_are_found(operators, key, conditions):
    pairs = paired(IMAGES, operators, 3, 0).by_key[key]
    back = [Point(point.right, point.left) for alike in pairs.values() for point in alike]
    assert any(conditions <= set(one.rule.when) for one in decide(back))


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_no_two_extents_of_a_world_agree_under_every_valuation(world):
    assert len({tuple(v[s] for v in world.valuations) for s in world.valuations[0]}) == len(world.valuations[0])


@pytest.mark.parametrize("operator", KNOWN)
def test_terms_of_every_known_operator_are_enumerated(operator):
    for world in WORLDS:
        terms = enumerate_terms(world, (operator,), 1).terms
        if any(term.operator == operator for term in terms):
            return
    pytest.fail(f"no term of {operator}")


def test_equal_terms_have_equal_values():
    """Each class, evaluated anew on other values."""
    found = enumerate_terms(BATCHES, ("permute_dims", "sum", "concat"), 2)
    again = enumerate_terms(BATCHES, ("permute_dims", "sum", "concat"), 2, seed=5)
    assert len(found.classes) > 20
    assert sorted(found.classes.values()) == sorted(again.classes.values())


def test_an_order_of_a_field_has_the_laws_of_a_lattice():
    domain, rng = ShuffledFields(), np.random.default_rng(0)
    a, b, c = (domain.draw((40,), rng) for _ in range(3))
    one = domain.maximum(domain.maximum(a, b), c)
    other = domain.maximum(a, domain.maximum(b, c))
    assert all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
    assert np.array_equal(domain.maximum(a, a)[0], a[0])
    assert np.array_equal(domain.maximum(a, domain.minimum(a, b))[0], a[0])  # absorption
    assert 5 < int((domain.maximum(a, b)[0] == a[0]).sum()) < 35
    assert isinstance(domain_for(("exp", "add")), ShuffledFields)


def test_ground_terms_are_one_object_when_equal():
    x = leaf("x", (2, 3))
    a = apply("add", (x, leaf("y", (2, 3))), {})
    assert apply("add", (leaf("y", (2, 3)), x), {}) is a  # commutative
    assert pickle.loads(pickle.dumps(a)) is a
    assert (a.size, a.shape) == (1, (2, 3))
    halves = [apply("split", (a,), {"at": (1,), "axis": 1}, item) for item in (0, 1)]
    assert apply("concat", tuple(halves), {"axis": 1}).size == 3  # add, split, concat
    with pytest.raises(RewriteError):
        apply("matmul", (x, x), {})


def test_a_rule_rewrites_a_ground_term_where_its_conditions_hold():
    x = leaf("x", (2, 3, 4))
    rule = RewriteRule("r", "f", "permute_dims(permute_dims(x, axes=p), axes=q) => permute_dims(x, axes=compose(p, q))",
                       when=("compose(p, q) != range(rank(x))",))  # fmt: skip
    once = apply("permute_dims", (x,), {"axes": (1, 2, 0)})
    twice = apply("permute_dims", (once,), {"axes": (1, 2, 0)})
    assert list(rewritten(rule, (twice,))) == [(apply("permute_dims", (x,), {"axes": (2, 0, 1)}),)]
    back = apply("permute_dims", (once,), {"axes": (2, 0, 1)})
    assert list(rewritten(rule, (back,))) == []


def test_attributes_become_variables_and_expressions():
    points = []
    for axes, axis in (((1, 0, 2), 0), ((2, 0, 1), 1), ((0, 2, 1), 2)):
        x = leaf("x", (2, 3, 4))
        left = apply("sum", (apply("permute_dims", (x,), {"axes": axes}),), {"axis": (axis,), "keepdims": True})
        right = apply("permute_dims", (apply("sum", (x,), {"axis": (axes[axis],), "keepdims": True}),), {"axes": axes})
        points.append(Point((left,), (right,)))
    assert len({skeleton(point) for point in points}) == 1
    (equation,) = generalised(points)
    assert equation.text == (
        "sum(permute_dims(x, axes=p), axis=a, keepdims=True) => "
        "permute_dims(sum(x, axis=picked(normal(a, rank(x)), p), keepdims=True), axes=p)"
    ) or equation.text == (
        "sum(permute_dims(x, axes=p), axis=a, keepdims=d) => "
        "permute_dims(sum(x, axis=picked(normal(a, rank(x)), p), keepdims=d), axes=p)"
    )


def _marked(mark: str) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            count += mark.encode() in process.read_bytes()
        except OSError:
            continue
    return count


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_killed_search_leaves_no_process_behind(tmp_path):
    mark = f"RLFLOW_TVM_TEST_MARK={os.getpid()}.{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    command = [sys.executable, "-m", "rlflow_tvm.rules", "generate", "--depth", "2", "--out", str(tmp_path / "f.json")]
    process = subprocess.Popen(command, env={**os.environ, name: value}, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while _marked(mark) < 3 and time.monotonic() < deadline:  # itself and two workers
            time.sleep(0.2)
        assert _marked(mark) >= 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 20
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _marked(mark) == 0
