"""Rules and the range of numbers: none leads values out of it, or to where they cancel, that were not there."""

from __future__ import annotations

import numpy as np
import tvm
from small_models import LANES, machine_of, matched, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.passes import CATALOGUE, GraphState, RewriteAction, RuleSet

CANCELLING = {"distribute_scale", "distribute_divide", "distribute_scale_over_bias", "matmul_distribute_difference"}
"""Of (x - mean) / deviation, with 10.0625, 10 and 0.05, they make 201 - 200 in bfloat16: 1 in place of 1.25."""


def test_half_floats_are_not_led_out_of_their_range():
    """6 x 12544 and 1 / 1e-5 are no float16, 1e-4 x 1e-4 is 0; queries are scaled before they meet the keys for it."""
    names = ("mean_to_sum", "sum_after_scale", "divide_twice", "scale_then_divide", "divide_then_scale",
             "scale_after_matmul", "scale_after_right_operand", "fold_scale_chain", "scale_after_product",
             "associate_multiply", "distribute_scale", "distribute_divide", "factor_scale", "factor_divide",
             "matmul_distribute_difference", "sum_of_matmul_rows", "distribute_scale_over_bias",
             "matmul_distribute_left", "matmul_distribute_right", "sum_of_concat", "associate_add", "bias_after_sum",
             "matmul_associate_left", "matmul_associate_right", "fold_scale_into_matmul")  # fmt: skip

    def body(emit, x, a, b):
        s, divided = relax.const(np.array(0.125, str(x.ty.dtype))), emit(rx.divide(x, a))
        scaled = emit(rx.multiply(x, s))
        difference = emit(rx.subtract(x, scaled))
        products = rx.matmul(scaled, a), rx.matmul(x, scaled), rx.matmul(difference, a)
        factors = (rx.add(emit(how(x, s)), emit(how(scaled, s))) for how in (rx.multiply, rx.divide))
        spread = (how(difference, scaled) for how in (rx.multiply, rx.divide))
        both = emit(rx.add(x, scaled)), emit(rx.concat([x, scaled], 1)), emit(rx.add(x, a))
        sums = rx.matmul(both[0], a), rx.matmul(a, both[0]), rx.sum(both[1], [1]), rx.multiply(both[2], b)
        return (rx.mean(x, [0, 1]), rx.sum(scaled, [1]), rx.divide(divided, b), rx.multiply(divided, b),
                rx.divide(emit(rx.multiply(x, a)), b), rx.sum(emit(rx.matmul(x, a)), [0], keepdims=True),
                *(rx.multiply(emit(rx.multiply(x, y)), z) for y, z in ((a, b), (a, x), (x, x))),
                *(rx.add(emit(rx.add(x, y)), scaled) for y in (a, difference)), rx.multiply(emit(rx.matmul(x, a)), s),
                rx.matmul(emit(rx.matmul(x, a)), b), rx.matmul(x, emit(rx.matmul(a, b))),
                *products, *factors, *spread, *sums)  # fmt: skip

    def found(dtype: str) -> set[str]:
        return matched(module({"x": (4, 4)}, {"a": (4, 4), "b": (4, 4)}, body, dtype), *names)

    assert found("float32") == set(names)
    assert found("bfloat16") == set(names) - CANCELLING
    assert found("float16") == set()


def test_products_of_halves_are_not_taken_apart():
    """64 times 2000 less 64 times 2000 is 0, each of the two infinite; nor is it averaged what would be infinite. And
    of x less its mean a bias that is led past the product leaves little as a bfloat16."""
    names = ("bias_past_pointwise", "avg_pool_after_pointwise", "conv_of_concat", "resized_part_1_of_2",
             "split_matmul_sum", "matmul_of_concat", "matmul_of_mean_rows")  # fmt: skip

    def body(emit, x, y, m, p, q, c, a, b):
        pool = emit(rx.nn.avg_pool2d(x, [2, 2], [2, 2]))
        large = emit(rx.image.resize2d(x, (8, 8), method="linear"))
        images = [emit(rx.add(x, c)), pool]
        joined = [emit(rx.concat(parts, 1)) for parts in ([x, emit(rx.nn.relu(x))], [large, y])]
        rows = m, emit(rx.mean(m, [0], keepdims=True))
        wide = emit(rx.concat([m, emit(rx.nn.relu(m))], 1))
        return (*(rx.nn.conv2d(image, p) for image in images), *(rx.nn.conv2d(image, q) for image in joined),
                *(rx.matmul(row, a) for row in rows), rx.matmul(wide, b))  # fmt: skip

    inputs = {"x": (1, 4, 4, 4), "y": (1, 4, 8, 8), "m": (2, 4)}
    weights = {"p": (4, 4, 1, 1), "q": (4, 8, 1, 1), "c": (1, 4, 1, 1), "a": (4, 4), "b": (8, 4)}
    for dtype, left_out in (("float32", set()), ("bfloat16", {"bias_past_pointwise"}), ("float16", set(names))):
        assert matched(module(inputs, weights, body, dtype), *names) == set(names) - left_out


def test_means_of_halves_are_not_rounded_before_they_are_taken_away():
    """A row about 1000.25 has none as a half."""
    name, weights = "layer_norm_to_rms_norm", {"g": (8,), "b": (8,)}
    for dtype, found in (("float32", {name}), ("float16", set()), ("bfloat16", set())):
        mod = module({"x": (2, 8)}, weights, lambda emit, x, g, b: rx.nn.layer_norm(x, g, b, [-1]), dtype)
        assert matched(mod, name) == found


def test_weights_of_half_float_convolutions_are_not_scaled():
    """1e-3 x 1e-5 is 0 there, 300 x 300 infinite, of a kernel whose results are not; nor are two kernels multiplied."""
    names = ("fold_scale_into_conv", "norm_into_conv", "scale_into_next_conv", "scalar_into_conv",
             "compose_conv_with_pointwise", "depthwise_and_pointwise_to_dense")  # fmt: skip

    def body(emit, x, w, p, d, s, b):
        y, z = emit(rx.nn.conv2d(x, w, padding=1)), emit(rx.nn.conv2d(x, d, padding=1, groups=4))
        shifted = emit(rx.add(y, b))
        half = relax.const(np.array(0.5, str(x.ty.dtype)))
        scaled = rx.multiply(y, s), rx.add(emit(rx.multiply(shifted, s)), b), rx.multiply(y, half)
        return *scaled, rx.nn.conv2d(emit(rx.multiply(x, s)), w, padding=1), rx.nn.conv2d(y, p), rx.nn.conv2d(z, p)

    weights = {"w": (4, 4, 3, 3), "p": (4, 4, 1, 1), "d": (4, 1, 3, 3), "s": (1, 4, 1, 1), "b": (1, 4, 1, 1)}
    assert matched(module({"x": (1, 4, 6, 6)}, weights, body), *names) == set(names)
    assert matched(module({"x": (1, 4, 6, 6)}, weights, body, "float16"), *names) == set()


def test_what_a_mask_takes_back_is_not_added_last():
    """Scores plus (mask - 1) * 1e9: added to mask * 1e9 first, they would be lost. No three rewrites of sums lead
    there, and what they lead to is the same by the mask that is drawn for an input of that name."""
    names = ("subtract_to_add", "distribute_scale_over_bias", "bias_after_sum", "associate_add", "fold_bias_chain")

    def body(emit, scores, attention_mask):
        one, far = relax.const(1.0, "float32"), relax.const(1e9, "float32")
        return rx.add(scores, emit(rx.multiply(emit(rx.subtract(attention_mask, one)), far)))

    mod = module({"scores": (2, 8), "attention_mask": (2, 8)}, {}, body)
    start = GraphState.from_module(mod, RuleSet(tuple(rule for rule in CATALOGUE if rule.name in names), LANES))
    inputs = list(map(tvm.runtime.tensor, random_inputs(mod, 0).values()))
    before = machine_of(mod)["main"](*inputs).numpy()
    assert np.abs(before).max() > 1e8 > 10 > np.abs(before).min() > 0
    found, edge = {start.structural_hash: start}, [start]
    for _ in range(3):
        states = [state.apply(RewriteAction(rule, site)) for state in edge for rule in names
                  for site in state.sites[rule]]  # fmt: skip
        edge = [state for state in states if state.structural_hash not in found]
        found |= {state.structural_hash: state for state in edge}
    assert len(found) > 2
    for state in found.values():
        np.testing.assert_allclose(machine_of(state.mod)["main"](*inputs).numpy(), before, rtol=1e-6)


def test_rows_that_a_mask_moves_as_a_whole_are_what_they_were():
    """Of a row plus -1e9 nothing but the mask is left: only weights are no such masks."""
    names = ("softmax_ignores_shift", "softmax_ignores_subtraction", "layer_norm_ignores_shift")

    def shifted(by_weight: bool):
        def body(emit, x, rows, c, g, b):
            moved = [emit(how(x, c if by_weight else rows)) for how in (rx.add, rx.subtract)]
            return *map(rx.nn.softmax, moved), rx.nn.layer_norm(moved[0], g, b, [-1])

        return module({"x": (2, 8), "rows": (2, 1)}, {"c": (2, 1), "g": (8,), "b": (8,)}, body)

    assert matched(shifted(by_weight=True), *names) == set(names)
    assert matched(shifted(by_weight=False), *names) == set()
