"""Heads that enlarge small feature maps and convolve them afterwards: the family that convolves them before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from rlflow_tvm import from_onnx
from rlflow_tvm.differences import range_error
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs, zoo
from rlflow_tvm.frontend.net import Net
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.passes.operations import Operations
from rlflow_tvm.passes.rules import TERMINATING_FAMILIES
from rlflow_tvm.search.settled import exhausted
from rlflow_tvm.verify import Comparison, run_module
from tests.small_models import LANES, TARGET

FAMILY = TERMINATING_FAMILIES["resize"]
MAPS = {"a": (4, 16), "b": (6, 8), "c": (8, 4), "d": (8, 1)}
"""Feature maps: channels, height and width."""
WIDTH = 8
Head = Callable[[Net], str]


def resized(net: Net, x: str, channels: int, extent: int = 16, mode: str = "linear") -> str:
    name = net.unused("size")
    size = net.constant(name, np.array([1, channels, extent, extent]))
    return net.node("Resize", [x, "", "", size], mode=mode)


def joined(net: Net, *parts: str) -> str:
    return net.node("Concat", list(parts), axis=1)


def linear(net: Net, x: str) -> str:
    """A linear layer on each pixel, written as one on rows."""
    channels, extent = MAPS[x]
    name = net.unused("linear")
    rows = net.node("Transpose", [net.reshape(x, (1, channels, extent * extent))], perm=[0, 2, 1])
    product = net.node("MatMul", [rows, net.weight(f"{name}.weight", (channels, WIDTH), channels**-0.5)])
    biased = net.node("Add", [product, net.weight(f"{name}.bias", (WIDTH,), 0.5)])
    return net.reshape(net.node("Transpose", [biased], perm=[0, 2, 1]), (1, WIDTH, extent, extent))


def segformer(net: Net) -> str:
    parts = [linear(net, x) for x in MAPS]
    parts = [parts[0], *(resized(net, x, WIDTH) for x in parts[1:])]
    return net.conv(joined(net, *parts[::-1]), 4 * WIDTH, WIDTH, 1)


def hrnet(net: Net) -> str:
    parts = [net.node("Relu", [x]) for x in MAPS]
    parts = [resized(net, x, channels) for x, (channels, _) in zip(parts, MAPS.values(), strict=True)]
    return net.conv(joined(net, *parts), 26, WIDTH, 1)


def deeplab(net: Net) -> str:
    maps = [net.conv_relu("a", 4, WIDTH, kernel) for kernel in (1, 3, 3, 3)]
    pooled = net.node("GlobalAveragePool", [net.conv("b", 6, WIDTH, 1)])
    return net.conv(joined(net, *maps, resized(net, pooled, WIDTH)), 5 * WIDTH, WIDTH, 1)


def yolo(net: Net) -> str:
    larger = resized(net, net.node("Sigmoid", ["b"]), 6, mode="nearest")
    return net.conv(joined(net, larger, "a"), 10, WIDTH, 1)


def fpn(net: Net) -> str:
    """Sums in the place of concatenations."""
    parts = [net.conv(resized(net, net.node("Relu", [x]), MAPS[x][0]), MAPS[x][0], WIDTH, 1) for x in "bc"]
    return net.node("Add", parts)


def state_of(tmp_path: Path, head: Head) -> GraphState:
    net = Net(0)
    net.node("Relu", [head(net)], "logits")
    inputs = {name: (onnx.TensorProto.FLOAT, (1, c, e, e)) for name, (c, e) in MAPS.items()}
    path = tmp_path / "head.onnx"
    onnx.save(net.model("head", inputs, {"logits": (1, WIDTH, 16, 16)}), path)
    return GraphState.from_module(from_onnx(path), default_rules(LANES))


def at_run_time(state: GraphState) -> list[str]:
    """The operators that are no work on weights."""
    nodes = [node for node in state.graph.nodes if node.var not in state.graph.weight_only]
    return [node.op.removeprefix("relax.") for node in nodes]


def resized_from(state: GraphState) -> list[int]:
    """The heights of what is convolved at run time."""
    convs = [n for n in state.graph.nodes if n.op == "relax.nn.conv2d" and n.var not in state.graph.weight_only]
    return [int(node.value.args[0].ty.shape.values[2]) for node in convs]


@pytest.mark.parametrize(
    ("head", "heights", "share"),
    [(segformer, [16, 8, 4, 1], 0.3), (hrnet, [16, 8, 4, 1], 0.7), (yolo, [16, 8], 0.9), (fpn, [8, 4], 0.6)],
)
def test_what_is_enlarged_is_convolved_before(head, heights, share, tmp_path):
    start = state_of(tmp_path, head)
    state = exhausted(start, FAMILY)
    assert sorted(resized_from(state), reverse=True) == heights
    found = at_run_time(state)
    assert not {"concat", "matmul", "permute_dims", "reshape"} & set(found)
    assert Operations.of(state.graph).flops < share * Operations.of(start.graph).flops
    assert exhausted(state, FAMILY) is state
    assert Comparison(start, TARGET).check(state) < 1e-5


def test_one_pixel_is_convolved_once_and_the_others_stay_together(tmp_path):
    start = state_of(tmp_path, deeplab)
    state = exhausted(start, FAMILY)
    assert resized_from(state).count(1) == 1
    found = at_run_time(state)
    assert found.count("concat") == 1
    assert "image.resize2d" not in found
    assert Comparison(start, TARGET).check(state) < 1e-5


def shrinking(net: Net) -> str:
    larger = resized(net, resized(net, "a", 4, 20), 4)
    return net.conv(joined(net, larger, "a"), 8, WIDTH, 1)


def neighbours(net: Net) -> str:
    return net.conv(joined(net, resized(net, "b", 6), "a"), 10, WIDTH, 3)


def behind_relu(net: Net) -> str:
    return net.conv(net.node("Relu", [joined(net, resized(net, "b", 6), "a")]), 10, WIDTH, 1)


def read_elsewhere(net: Net) -> str:
    larger = resized(net, "b", 6)
    y = net.conv(joined(net, larger, "a"), 10, WIDTH, 1)
    return net.node("Add", [y, net.conv(larger, 6, WIDTH, 3)])


def narrowing(net: Net) -> str:
    """Two convolutions of which the first leaves less to the second than both as one would have."""
    return net.conv(net.conv("a", 4, 1, 1), 1, WIDTH, 1)


@pytest.mark.parametrize("head", [shrinking, neighbours, behind_relu, read_elsewhere, narrowing])
def test_what_would_not_gain_stays(head, tmp_path):
    start = state_of(tmp_path, head)
    assert exhausted(start, FAMILY) is start


def test_a_small_segformer_keeps_its_outputs(monkeypatch):
    for needed in ("onnxscript", "transformers", "onnxruntime"):
        pytest.importorskip(needed)
    config = {"depths": (1,) * 4, "hidden_sizes": (8, 8, 16, 16), "num_attention_heads": (1, 1, 2, 2),
              "decoder_hidden_size": 16, "num_labels": 5}  # fmt: skip
    monkeypatch.setitem(zoo.TORCH_MODELS, "small", zoo._Pixels("segformer", 64, tuple(config.items())))
    model = zoo._export(*zoo.torch_module("small"))
    mod = from_onnx(model)
    start = GraphState.from_module(mod, default_rules(LANES))
    state = exhausted(start, FAMILY)
    assert at_run_time(start).count("concat") == 1
    assert "concat" not in at_run_time(state)
    assert at_run_time(state).count("image.resize2d") == 3
    assert Operations.of(state.graph).flops < 0.9 * Operations.of(start.graph).flops
    assert Comparison(start, TARGET).check(state) < 1e-5
    inputs = random_inputs(mod, 0)
    found = run_module(state.bound(), TARGET, list(inputs.values()))
    assert range_error(found, onnxruntime_outputs(model, inputs)) < 1e-4
