"""Networks with axes in two orders: permutations sink past what does not mind them, and images stay in blocks."""

from __future__ import annotations

import pytest
import tvm
from small_models import LANES, TARGET, module
from tvm.relax import op as rx

from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search.settled import exhausted
from rlflow_tvm.verify import Comparison

CHANNELS = 8
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
_ELEMENTWISE = ("relax.add", "relax.multiply", "relax.subtract", "relax.nn.gelu")


def convnext(blocks: int = 2, scale: tuple[int, ...] = (CHANNELS, 1, 1)) -> tvm.IRModule:
    """ConvNeXt (Liu et al. 2022): norms and products with channels last, convolutions and sums with channels first."""

    def body(emit, image, stem, head, **w):
        def norm(x, name):
            return emit(rx.nn.layer_norm(emit(rx.permute_dims(x, _LAST)), w[f"g{name}"], w[f"b{name}"], axes=[-1]))

        x = emit(rx.permute_dims(norm(emit(rx.nn.conv2d(image, stem, strides=2)), "s"), _FIRST))
        for i in range(blocks):
            y = norm(emit(rx.nn.conv2d(x, w[f"depth{i}"], padding=1, groups=CHANNELS)), i)
            y = emit(rx.nn.gelu(emit(rx.add(emit(rx.matmul(y, w[f"up{i}"])), w[f"a{i}"]))))
            y = emit(rx.permute_dims(emit(rx.matmul(y, w[f"down{i}"])), _FIRST))
            x = emit(rx.add(emit(rx.multiply(y, w[f"scale{i}"])), x))
        return rx.mean(emit(rx.nn.conv2d(emit(rx.permute_dims(norm(x, "h"), _FIRST)), head)), [2, 3])

    weights = {"stem": (CHANNELS, 3, 2, 2), "head": (CHANNELS, CHANNELS, 2, 2)}
    weights |= {f"{n}{i}": (CHANNELS,) for n in "gb" for i in ("s", "h", *range(blocks))}
    for i in range(blocks):
        weights |= {f"depth{i}": (CHANNELS, 1, 3, 3), f"up{i}": (CHANNELS, 16), f"a{i}": (16,)}
        weights |= {f"down{i}": (16, CHANNELS), f"scale{i}": scale}
    return module({"image": (1, 3, 10, 10)}, weights, body)


def metaformer() -> tvm.IRModule:
    """A block that mixes by a pool, less what it is a pool of, as EfficientFormer's and PoolFormer's do."""

    def body(emit, image, stem, up, down, s, t):
        x = emit(rx.nn.conv2d(image, stem, padding=1))
        pooled = emit(rx.nn.avg_pool2d(x, (3, 3), (1, 1), (1, 1)))
        x = emit(rx.add(x, emit(rx.multiply(emit(rx.subtract(pooled, x)), s))))
        y = emit(rx.nn.conv2d(emit(rx.nn.gelu(emit(rx.nn.conv2d(x, up)))), down))
        x = emit(rx.subtract(x, emit(rx.multiply(y, t))))
        return rx.mean(x, [2, 3])

    weights = {"stem": (CHANNELS, 3, 3, 3), "up": (16, CHANNELS, 1, 1), "down": (CHANNELS, 16, 1, 1)}
    weights |= {"s": (1, CHANNELS, 1, 1), "t": (1, CHANNELS, 1, 1)}
    return module({"image": (1, 3, 6, 6)}, weights, body)


def settled(mod: tvm.IRModule, *families: str) -> tuple[GraphState, GraphState]:
    """The module's state, and what it is when one family after the other is exhausted."""
    start = state = GraphState.from_module(mod, default_rules(LANES))
    for family in families:
        state = exhausted(state, TERMINATING_FAMILIES[family])
        assert exhausted(state, TERMINATING_FAMILIES[family]).structural_hash == state.structural_hash
    return start, state


def runtime(state: GraphState, *operators: str) -> list:
    return [n for n in state.graph.nodes if n.var not in state.graph.weight_only and n.op in operators]


@pytest.mark.parametrize("scale", [(CHANNELS, 1, 1), (1, CHANNELS, 1, 1), (1,), (1, 5, 5), (CHANNELS, 5, 1)])
def test_no_element_wise_operator_reads_a_permutation(scale):
    """Sums and scales have their channels last, where products write them, whatever axes the scale has."""
    start, state = settled(convnext(scale=scale), "permute")
    permuted = {node.var for node in runtime(state, "relax.permute_dims")}
    assert runtime(start, "relax.multiply")
    assert len(permuted) < len(runtime(start, "relax.permute_dims"))
    assert all(permuted.isdisjoint(node.inputs) for node in runtime(state, *_ELEMENTWISE))
    assert Comparison(start, TARGET).check(state) < 1e-5


def test_the_convolutions_of_such_a_network_are_blocked_by_permutations_alone():
    start, state = settled(convnext(), "permute", "layout")
    assert not runtime(state, "relax.layout_transform")
    blocked = [node for node in runtime(state, "relax.nn.conv2d") if len(node.var.ty.shape.values) == 5]
    assert len(blocked) >= 3
    assert Comparison(start, TARGET).check(state) < 1e-5


def test_what_is_subtracted_from_a_pool_stays_in_blocks():
    start, state = settled(metaformer(), "layout")
    assert not runtime(state, "relax.layout_transform")
    assert Comparison(start, TARGET).check(state) < 1e-5


def test_a_permutation_stays_where_a_weight_is_larger_than_what_is_permuted():
    def body(emit, x, w):
        return rx.multiply(emit(rx.permute_dims(x, (2, 0, 1))), w)

    mod = module({"x": (4, 1, 3)}, {"w": (5, 3, 4, 1)}, body)
    assert settled(mod, "permute")[1].actions == ()
