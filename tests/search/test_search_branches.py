"""Blocks that were trained with several branches and exported so: the family that makes one convolution of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from rlflow_tvm import from_onnx
from rlflow_tvm.frontend.net import Net
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search.settled import exhausted
from rlflow_tvm.verify import Comparison
from tests.small_models import LANES, TARGET

FAMILY = TERMINATING_FAMILIES["branches"]
CHANNELS = 8
Block = Callable[[Net, str], str]


def norm(net: Net, x: str) -> str:
    """A batch norm that has no convolution to be folded into."""
    name = net.unused("norm")
    rng = np.random.default_rng(len(name))
    given = [rng.standard_normal(CHANNELS, np.float32) for _ in range(3)]
    given.append(rng.random(CHANNELS, np.float32) + 0.5)
    inputs = [net.constant(f"{name}.{i}", array) for i, array in enumerate(given)]
    return net.node("BatchNormalization", [x, *inputs])


def conv(net: Net, x: str, kernel: int | tuple[int, int], stride: int = 1, groups: int = 1) -> str:
    return net.conv(x, CHANNELS, CHANNELS, kernel, stride, groups=groups)


def total(net: Net, *parts: str) -> str:
    first, *others = parts
    for other in others:
        first = net.node("Add", [first, other])
    return first


def repvgg(net: Net, x: str) -> str:
    return total(net, conv(net, x, 1), conv(net, x, 3), norm(net, x))


def mobileone_depthwise(net: Net, x: str) -> str:
    scale = conv(net, x, 1, groups=CHANNELS)
    return total(net, scale, norm(net, x), *(conv(net, x, 3, groups=CHANNELS) for _ in range(3)))


def mobileone_pointwise(net: Net, x: str) -> str:
    return total(net, norm(net, x), *(conv(net, x, 1) for _ in range(3)))


def repvit(net: Net, x: str) -> str:
    return norm(net, total(net, conv(net, x, 3, groups=CHANNELS), conv(net, x, 1, groups=CHANNELS), x))


def conditional_positions(net: Net, x: str) -> str:
    return total(net, conv(net, x, 3, groups=CHANNELS), x)


def asymmetric(net: Net, x: str) -> str:
    return total(net, conv(net, x, (1, 3)), conv(net, x, (3, 3)), conv(net, x, (3, 1)))


def downsampling(net: Net, x: str) -> str:
    return total(net, conv(net, x, 3, 2), conv(net, x, 1, 2))


def grouped(net: Net, x: str) -> str:
    return total(net, conv(net, x, 5, groups=2), conv(net, x, 3, groups=2))


def state_of(tmp_path: Path, *blocks: Block, extent: int = 6) -> GraphState:
    net, x = Net(0), "image"
    for block in blocks:
        x = net.node("Relu", [block(net, x)])
    net.dense(net.global_average(x), CHANNELS, 5, "logits")
    path = tmp_path / "net.onnx"
    onnx.save(
        net.model("net", {"image": (onnx.TensorProto.FLOAT, (1, CHANNELS, extent, extent))}, {"logits": (1, 5)}), path
    )
    return GraphState.from_module(from_onnx(path), default_rules(LANES))


def at_run_time(state: GraphState) -> list[str]:
    """The operators that are no work on weights."""
    return [node.op for node in state.graph.nodes if node.var not in state.graph.weight_only]


@pytest.mark.parametrize(
    "block",
    [
        repvgg,
        mobileone_depthwise,
        mobileone_pointwise,
        repvit,
        conditional_positions,
        asymmetric,
        downsampling,
        grouped,
    ],
)
def test_a_block_becomes_one_convolution(block, tmp_path):
    start = state_of(tmp_path, block)
    assert at_run_time(start).count("relax.add") > 2
    state = exhausted(start, FAMILY)
    assert at_run_time(state)[:3] == ["relax.nn.conv2d", "relax.add", "relax.nn.relu"]
    assert at_run_time(state).count("relax.nn.conv2d") == 1
    assert "relax.multiply" not in at_run_time(state)
    assert exhausted(state, FAMILY) is state
    assert Comparison(start, TARGET).check(state) < 1e-5


def test_each_of_several_blocks_does(tmp_path):
    start = state_of(tmp_path, repvgg, mobileone_depthwise, mobileone_pointwise, downsampling, repvgg)
    state = exhausted(start, FAMILY)
    assert at_run_time(state).count("relax.nn.conv2d") == 5
    assert Comparison(start, TARGET).check(state) < 1e-5


def other_tensors(net: Net, x: str) -> str:
    return total(net, conv(net, x, 3), conv(net, net.node("Relu", [x]), 3))


def other_strides(net: Net, x: str) -> str:
    return total(net, conv(net, x, 3), net.node("MaxPool", [x], kernel_shape=[1, 1]))


def read_elsewhere(net: Net, x: str) -> str:
    y = conv(net, x, 3)
    return total(net, net.node("Relu", [y]), total(net, y, conv(net, x, 1)))


@pytest.mark.parametrize("block", [other_tensors, other_strides, read_elsewhere])
def test_what_are_no_branches_of_one_tensor_stays(block, tmp_path):
    """Nor are convolutions joined of which one is read by something else too: it would be computed all the same."""
    start = state_of(tmp_path, block)
    state = exhausted(start, FAMILY)
    assert at_run_time(state).count("relax.nn.conv2d") == at_run_time(start).count("relax.nn.conv2d")
