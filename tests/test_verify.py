"""The check that an optimised module passes before it is handed out: wrong rules are seen, whatever the weights."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import tvm
from small_models import LANES, TARGET, module
from tvm import relax, te
from tvm.relax import op as rx

from rlflow_tvm import verify
from rlflow_tvm.differences import TOLERANCE, range_error
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.ir import Detached, detach
from rlflow_tvm.kernels import Choices
from rlflow_tvm.kernels.tuned import marked
from rlflow_tvm.passes import GraphState, RewriteAction, RewriteRule, RuleSet
from rlflow_tvm.verify import Comparison, check_state

NAN, INF = np.nan, np.inf
WRONG = RewriteRule("wrong", "none", "tanh(x) => negative(x)")
RIGHT = RewriteRule("right", "none", "tanh(x) => negative(tanh(negative(x)))")


def rewritten(mod: tvm.IRModule, weights: dict[str, np.ndarray], rule: RewriteRule) -> GraphState:
    """`mod` with those weights, after `rule` at its first site."""
    bound = Detached(mod, {name: tvm.runtime.tensor(array) for name, array in weights.items()}).bind()
    state = GraphState.from_module(bound, RuleSet((rule,), LANES))
    return state.apply(RewriteAction(rule.name, state.sites[rule.name][0]))


def near_one(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(1, 2, shape).astype("float32")


def normalised(emit, x, mean, variance, w):
    y = emit(rx.divide(emit(rx.subtract(x, mean)), emit(rx.sqrt(variance))))
    return rx.tanh(emit(rx.matmul(y, w)))


def test_variances_stay_positive():
    mod = module({"x": (4, 8)}, {"mean": (8,), "variance": (8,), "w": (8, 8)}, normalised)
    weights = {"mean": near_one(8), "variance": near_one(8), "w": near_one(8, 8)}
    with pytest.raises(RewriteError, match=r"first after wrong@.* \(action 1\)"):
        check_state(rewritten(mod, weights, WRONG), TARGET)
    assert check_state(rewritten(mod, weights, RIGHT), TARGET) <= TOLERANCE


def test_that_outputs_differ_is_told_though_the_search_for_the_rule_is_interrupted(monkeypatch):
    def interrupted(self, _actions):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.Comparison, "_first_wrong", interrupted)
    mod = module({"x": (4, 8)}, {"mean": (8,), "variance": (8,), "w": (8, 8)}, normalised)
    weights = {"mean": near_one(8), "variance": near_one(8), "w": near_one(8, 8)}
    with pytest.raises(RewriteError, match=r"differ by .* of their range: this is a bug"):
        check_state(rewritten(mod, weights, WRONG), TARGET)


def test_kernels_chosen_by_measuring_are_checked_too():
    mod = module({"x": (4, 8)}, {}, lambda emit, x: rx.tanh(x))
    state = rewritten(mod, {}, RIGHT)
    asked = []

    def doubled(func):
        asked.append(func)
        x = te.placeholder((4, 8), name="x")
        wrong = te.create_prim_func([x, te.compute((4, 8), lambda i, j: 2 * x[i, j])])
        return marked(wrong).with_attr("global_symbol", func.attrs["global_symbol"])

    with pytest.raises(RewriteError, match=r"built with the kernels that measured fastest .* they are right"):
        check_state(state, TARGET, choices=Choices(schedule=doubled))
    assert len(asked) == 1
    assert check_state(state, TARGET, choices=Choices()) <= TOLERANCE


def test_outputs_of_another_type_are_wrong(monkeypatch):
    state = rewritten(module({"x": (4, 8)}, {}, lambda emit, x: rx.tanh(x)), {}, RIGHT)
    comparison = Comparison(state.origin(), TARGET)
    assert comparison.error(state) <= TOLERANCE
    run = verify.run_executable
    monkeypatch.setattr(verify, "run_executable", lambda *args: [a.astype("float16") for a in run(*args)])
    assert comparison.error(state) == INF


def test_matrix_under_a_root_keeps_its_signs_where_nothing_else_is_finite():
    mod = module({"x": (4, 8)}, {"w": (8, 8)}, lambda emit, x, w: rx.tanh(emit(rx.matmul(x, emit(rx.sqrt(w))))))
    with pytest.raises(RewriteError, match="first after wrong@"):
        check_state(rewritten(mod, {"w": near_one(8, 8)}, WRONG), TARGET)
    unknown = GraphState.from_module(mod, RuleSet((WRONG,), LANES))
    assert Comparison(unknown, TARGET).error(unknown.apply(RewriteAction("wrong", unknown.sites["wrong"][0]))) > 0.1


def test_indices_stay_what_they_are(monkeypatch):
    x = relax.Var("x", relax.TensorType((16, 4), "float32"))
    index = relax.const(np.arange(8, 16, dtype="int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(rx.tanh(builder.emit(rx.take(x, index, axis=0))))
        builder.emit_func_output(output)
    seen = []

    def build_module(mod, *others):
        seen.extend(tensor.numpy().tolist() for tensor in detach(mod).weights.values())
        return verify_build(mod, *others)

    verify_build = verify.build_module
    monkeypatch.setattr(verify, "build_module", build_module)
    state = GraphState.from_module(builder.get(), RuleSet((RIGHT,), LANES))
    check_state(state.apply(RewriteAction("right", state.sites["right"][0])), TARGET)
    assert seen
    assert all(values == list(range(8, 16)) for values in seen)


def test_lost_bias_of_zeros_is_seen():
    mod = module({"x": (4, 8)}, {"b": (8,)}, lambda emit, x, b: rx.tanh(emit(rx.add(x, b))))
    lost = RewriteRule("lost", "none", "add(x, b) => x", when=("is_weight(b)",))
    with pytest.raises(RewriteError, match="first after lost@"):
        check_state(rewritten(mod, {"b": np.zeros(8, "float32")}, lost), TARGET)


def test_inputs_without_negative_numbers_where_nothing_else_is_finite():
    def logarithms(emit, x, w):
        return rx.tanh(emit(rx.matmul(emit(rx.log(x)), w)))

    mod = module({"x": (4, 8)}, {"w": (8, 8)}, logarithms)
    weights = {"w": near_one(8, 8)}
    with pytest.raises(RewriteError, match="first after wrong@"):
        check_state(rewritten(mod, weights, WRONG), TARGET)
    assert check_state(rewritten(mod, weights, RIGHT), TARGET) <= TOLERANCE


def test_of_integers_few_may_differ_and_by_little():
    expected = np.arange(2000)
    actual = expected.copy()
    actual[7] += 1
    assert range_error([actual], [expected]) == 1 / 1999 <= TOLERANCE
    actual[7] = 1999
    assert range_error([actual], [expected]) > 0.9
    actual[7] = 8
    assert range_error([actual[:20]], [expected[:20]]) > TOLERANCE
    actual[:20] = 0
    assert range_error([actual], [expected]) == 1.0, "more than some are all"
    assert range_error([np.array(True)], [np.array(False)]) == 1.0
    assert range_error([actual[:1]], [expected[:2]]) == INF


def test_what_is_filled_in_does_not_hide_the_rest():
    scores = np.random.default_rng(0).standard_normal((8, 8))
    for filling in (-65504.0, -1e9, -3.4e38):
        expected = np.where(np.tri(8, dtype=bool), scores, filling)
        wrong = np.where(np.tri(8, dtype=bool), 1.1 * scores, filling)
        assert range_error([wrong], [expected]) > 0.01
        assert range_error([expected], [expected]) == 0.0
        assert range_error([np.where(np.tri(8, dtype=bool), scores, 1.5 * filling)], [expected]) > 1.0
    added = scores - 1e4 * (1 - np.tri(8))
    assert range_error([np.where(np.tri(8, dtype=bool), 1.1 * scores, added)], [added]) > 0.01
    assert range_error([np.array([1e-9, 0, 0, 5e5])], [np.array([0, 0, 0, 5e5])]) < 1e-6  # one is no filling
    assert range_error([np.array([1e6, 0.56])], [np.array([1e6, 0.5])]) < 1e-6
    large = np.geomspace(1.0, 1e6, 50)
    assert range_error([large + 1.0], [large]) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("axis", [1, 2])
def test_large_coordinates_do_not_hide_small_scores(axis):
    """As a detector gives them, in one output."""
    rng = np.random.default_rng(0)
    boxes, scores = 640 * rng.random((1, 4, 300)), rng.random((1, 80, 300))
    expected = np.moveaxis(np.concatenate([boxes, scores], 1), 1, axis).astype("float32")
    wrong = np.moveaxis(np.concatenate([boxes, scores[:, ::-1]], 1), 1, axis).astype("float32")
    assert range_error([wrong], [expected]) > 0.05
    assert range_error([expected * (1 + 1e-5)], [expected]) < 1e-4
    rounded = expected + rng.normal(0, 640 * 1e-6, expected.shape).astype("float32")
    assert range_error([rounded], [expected]) <= TOLERANCE, "as sums of large numbers leave it"


def saturated(emit, x, w, v):
    for _ in range(8):
        x = emit(rx.add(x, emit(rx.matmul(x, w))))
    return rx.sigmoid(emit(rx.matmul(x, v)))


def test_an_output_of_one_number_is_not_left_saturated(caplog):
    mod = module({"x": (1, 64)}, {"w": (64, 64), "v": (64, 1)}, saturated)
    doubled = RewriteRule("doubled", "none", "sigmoid(x) => sigmoid(add(x, x))")
    weights = {"w": near_one(64, 64), "v": np.random.default_rng(0).standard_normal((64, 1)).astype("float32") / 16}
    with pytest.raises(RewriteError, match="first after doubled@"):
        check_state(rewritten(mod, weights, doubled), TARGET)
    assert not caplog.text
    weights["v"] *= 1e4  # with which all of them saturate it
    assert check_state(rewritten(mod, weights, doubled), TARGET) <= TOLERANCE
    assert re.search(r"is one value or two on random inputs.* might not show", caplog.text)


def test_a_single_number_may_be_rounded_otherwise():
    """Of which nobody knows the range: what is lost beside a hundred is more than a hundred thousandth of it."""

    def shifted(emit, x, v, w):
        return rx.subtract(emit(rx.nn.relu(emit(rx.add(emit(rx.matmul(x, v)), w)))), w)

    mod = module({"x": (1, 64)}, {"v": (64, 1), "w": (1,)}, shifted)
    weights = {"v": near_one(64, 1), "w": np.full(1, 1e3, "float32")}
    right = rewritten(mod, weights, RewriteRule("unshifted", "none", "subtract(relu(add(x, w)), w) => x"))
    assert 0.0 < check_state(right, TARGET) <= TOLERANCE
    wrong = rewritten(mod, weights, RewriteRule("halved", "none", "subtract(relu(add(x, w)), w) => relu(x)"))
    with pytest.raises(RewriteError, match="first after halved@"):
        check_state(wrong, TARGET)


def test_a_label_is_compared_for_many_inputs():
    """For one it mostly stays what it is, whatever is lost."""

    def labelled(emit, x, w, b):
        return rx.argmax(emit(rx.add(emit(rx.matmul(x, w)), b)), 1)

    mod = module({"x": (1, 64)}, {"w": (64, 10), "b": (10,)}, labelled)
    weights = {"w": near_one(64, 10), "b": near_one(10)}
    for text, right in (("add(x, b) => x", False), ("add(x, b) => add(b, x)", True)):
        rule = RewriteRule("bias", "none", text, when=("is_weight(b)", "not is_weight(x)"))
        state = rewritten(mod, weights, rule)
        if right:
            assert check_state(state, TARGET) == 0.0
        else:
            with pytest.raises(RewriteError, match="first after bias@"):
                check_state(state, TARGET)


def test_a_saturated_output_of_narrow_floats_is_seen_to_be():
    x = np.zeros(100)
    x[0] = 1.0
    for dtype in ("float32", "float16", ml_dtypes.bfloat16):
        assert verify._visible_share(x.astype(dtype)) == 0.01


def test_of_integers_and_booleans_those_that_differ_from_most_are_seen():
    x = np.zeros(100)
    x[:3] = 1, 2, 3
    for dtype in ("int64", "uint8"):
        assert verify._visible_share(x.astype(dtype)) == pytest.approx(0.03)
    assert verify._visible_share(np.zeros(100, bool)) == 0.0
    assert verify._visible_share(np.zeros(16, bool)) == 1.0


CONVOLUTIONS = {
    "conv1d": (rx.nn.conv1d, (1, 64, 9), (64, 64, 3), {}, 192),
    "conv2d": (rx.nn.conv2d, (1, 16, 9, 9), (64, 16, 3, 3), {}, 144),
    "conv2d of the last channels": (
        rx.nn.conv2d,
        (1, 9, 9, 16),
        (3, 3, 16, 64),
        {"data_layout": "NHWC", "kernel_layout": "HWIO"},
        144,
    ),
    "conv3d": (rx.nn.conv3d, (1, 16, 5, 5, 5), (32, 16, 3, 3, 3), {}, 432),
    "matrices": (rx.matmul, (8, 5, 48), (8, 48, 64), {}, 48),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_weights_are_drawn_by_what_they_sum(name):
    operator, data, kernel, layouts, fan_in = CONVOLUTIONS[name]
    mod = module({"x": data}, {"w": kernel}, lambda emit, x, w: operator(x, w, **layouts))
    (drawn,) = verify._drawn_weights(GraphState.from_module(mod, RuleSet((), LANES)), verify._Draw(), 0).values()
    assert np.var(drawn.numpy()) == pytest.approx(2 / fan_in, rel=0.05)


def above(limit: float, weights: dict[str, np.ndarray]) -> GraphState:
    """Which elements of a product are above a limit, as it begins."""
    mod = module({"x": (4, 8)}, {"w": (8, 8)}, lambda emit, x, w: rx.greater(emit(rx.matmul(x, w)), relax.const(limit)))
    bound = Detached(mod, {name: tvm.runtime.tensor(array) for name, array in weights.items()})
    return GraphState.from_module(bound.bind() if weights else mod, RuleSet((WRONG,), LANES))


def test_an_output_that_only_the_own_weights_do_not_saturate_is_compared_with_them():
    (expected,) = Comparison(above(100.0, {"w": 100 * near_one(8, 8)}), TARGET)._decided.expected
    assert 0.1 < expected.mean() < 0.9


def test_an_output_of_one_value_is_warned_of(caplog):
    Comparison(above(0.0, {}), TARGET)
    assert not caplog.text
    Comparison(above(1e3, {}), TARGET)
    assert re.search(r"all but 0.00 % of one of them is one value .* might not show", caplog.text)


def test_a_lost_mask_is_seen():
    def masked(emit, x, mask):
        return rx.nn.softmax(emit(rx.add(x, emit(rx.multiply(rx.astype(mask, "float32"), relax.const(5.0))))))

    x, mask = relax.Var("x", relax.TensorType((2, 8), "float32")), relax.Var("mask", relax.TensorType((2, 8), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, mask]):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(masked(builder.emit, x, mask)))
        builder.emit_func_output(output)
    lost = RewriteRule("lost", "none", "softmax(add(x, y), axis=k) => softmax(x, axis=k)")
    with pytest.raises(RewriteError, match="first after lost@"):
        check_state(rewritten(builder.get(), {}, lost), TARGET)


def test_output_that_is_never_finite_is_an_error():
    mod = module({"x": (4, 8)}, {"w": (8,)}, lambda emit, x, w: rx.tanh(emit(rx.multiply(x, w))))
    with pytest.raises(RewriteError, match=r"100 % of one of them is NaN or infinite"):
        check_state(rewritten(mod, {"w": np.full(8, NAN, "float32")}, RIGHT), TARGET)


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([NAN, 1, 2], [NAN, 1, 2], 0.0),
        ([INF, 1, 2], [INF, 1, 2], 0.0),
        ([NAN, 1, 2], [INF, 1, 2], INF),
        ([INF, 1, 2], [NAN, 1, 2], INF),
        ([-INF, 1, 2], [INF, 1, 2], INF),
        ([0, 1, 2], [INF, 1, 2], INF),
        ([INF, 1, 2], [0, 1, 2], INF),
        ([NAN, NAN], [INF, INF], INF),
        ([NAN, 1, 2.5], [NAN, 1, 2], 0.5),
        ([1, 2, 3], [1, 2], INF),
        ([], [], 0.0),
    ],
)
def test_error_is_a_share_of_the_range_and_compares_what_is_not_finite(actual, expected, error):
    assert range_error([np.array(actual, "float32")], [np.array(expected, "float32")]) == pytest.approx(error)
