"""Resizes: what rules take them for, against kernels that TVM makes and against ONNX Runtime on what is imported."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from float_domain import Floats
from onnx import helper, numpy_helper
from small_models import LANES, TARGET, module
from tvm.relax import op as rx

from rlflow_tvm import from_onnx
from rlflow_tvm.float_check import outputs
from rlflow_tvm.frontend import onnxruntime_outputs
from rlflow_tvm.passes import GraphState, RuleSet
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.instance import Instance, instance_function
from rlflow_tvm.passes.ops import OPERATORS
from rlflow_tvm.passes.proof.domains import Unfit
from rlflow_tvm.passes.proof.interpolation import COORDINATES, METHODS, ROUNDINGS, taps
from rlflow_tvm.passes.proof.meaning import meaning
from rlflow_tvm.passes.rule import RewriteRule
from rlflow_tvm.passes.rules import CATALOGUE

ALONE = RewriteRule("resize2d", "test", "resize2d(x, **k) => x")
EXTENTS = (
    ((2, 3), (4, 6)),
    ((4, 5), (12, 7)),
    ((8, 7), (4, 3)),
    ((1, 6), (5, 2)),
    ((3, 3), (3, 8)),
    ((16, 12), (5, 48)),
)
"""Of the image before and after; none of which has a position half way that single precision takes for another."""


def attributes(**given: Any) -> dict[str, Any]:
    return {**OPERATORS["resize2d"].attributes, **given}


def settings(method: str) -> list[dict[str, Any]]:
    """All that a method may be told."""
    if method == "nearest_neighbor":
        return [{"rounding_method": rounding} for rounding in ("", *ROUNDINGS)]
    if method == "cubic":
        return [{"cubic_alpha": alpha, "cubic_exclude": beyond} for alpha in (-0.75, -0.5) for beyond in (0, 1)]
    return [{}]


@pytest.mark.parametrize("method", METHODS)
def test_a_resize_is_what_tvm_computes(method):
    rng = np.random.default_rng(0)
    functions, arguments, expected = [], [], []
    for how, mode, ((high, wide), size) in product(settings(method), COORDINATES, EXTENTS):
        k = attributes(size=size, method=method, coordinate_transformation_mode=mode, **how)
        x = rng.standard_normal((1, 2, high, wide)).astype("float32")
        functions.append(instance_function(ALONE, Instance({"x": x.shape}, {"k": k})))
        arguments.append([x])
        expected.append((k, meaning("resize2d", Floats(), [(x,)], k)[0]))
    for (found,), (k, wanted) in zip(outputs(functions, arguments, TARGET), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=str(k))


def test_blocks_are_resized_each_as_the_image():
    k = attributes(size=(5, 7), layout="NCHW4c")
    x = np.random.default_rng(0).standard_normal((2, 2, 3, 4, 4)).astype("float32")
    function = instance_function(ALONE, Instance({"x": x.shape}, {"k": k}))
    ((found,),) = outputs([function], [[x]], TARGET)
    np.testing.assert_allclose(found, meaning("resize2d", Floats(), [(x,)], k)[0], rtol=1e-4, atol=1e-5)
    plain = np.moveaxis(x, -1, 2).reshape(2, 8, 3, 4)
    resized = meaning("resize2d", Floats(), [(plain,)], attributes(size=(5, 7)))[0]
    np.testing.assert_allclose(np.moveaxis(found, -1, 2).reshape(2, 8, 5, 7), resized, rtol=1e-4, atol=1e-5)


ONNX_MODES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
SIZES = ((12, 10), (7, 3), (6, 5), (3, 2), (9, 20))


def resizes() -> onnx.ModelProto:
    """An image resized by each method to each size."""
    ways: list[dict[str, Any]] = [{"mode": "linear"}, {"mode": "cubic"}]
    ways += [{"mode": "nearest", "nearest_mode": rounding} for rounding in ROUNDINGS if rounding != "round"]
    nodes, sizes = [], {f"size{i}": np.array([1, 2, *size]) for i, size in enumerate(SIZES)}
    for way, mode, size in product(ways, ONNX_MODES, sizes):
        inputs, name = ["image", "", "", size], f"y{len(nodes)}"
        nodes.append(helper.make_node("Resize", inputs, [name], coordinate_transformation_mode=mode, **way))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "resizes",
        [value("image", onnx.TensorProto.FLOAT, (1, 2, 6, 5))],
        [value(node.output[0], onnx.TensorProto.FLOAT, None) for node in nodes],
        [numpy_helper.from_array(size, name) for name, size in sizes.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_an_imported_resize_is_what_onnx_runtime_computes():
    pytest.importorskip("onnxruntime")
    model = resizes()
    image = np.random.default_rng(0).standard_normal((1, 2, 6, 5)).astype("float32")
    expected = onnxruntime_outputs(model, {"image": image})
    nodes = [node for node in Graph.from_module(from_onnx(model)).nodes if node.op == "relax.image.resize2d"]
    assert len(nodes) == len(expected) == 6 * len(ONNX_MODES) * len(SIZES)
    for node, wanted in zip(nodes, expected, strict=True):
        k = OPERATORS["resize2d"].attributes_of(node.value)
        assert k is not None
        np.testing.assert_allclose(
            meaning("resize2d", Floats(), [(image,)], k)[0], wanted, rtol=1e-4, atol=1e-5, err_msg=str(k)
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", COORDINATES)
def test_weights_sum_up_to_one(method, mode):
    for extent, count in ((1, 4), (5, 13), (6, 2)):
        for each in taps(extent, count, attributes(method=method, coordinate_transformation_mode=mode)):
            assert sum(weight for _, weight in each) == 1
            assert all(0 <= place < extent for place, _ in each)


@pytest.mark.parametrize(
    ("size", "options", "dtype", "known"),
    [
        ((8, 8), {}, "float32", True),
        ((8, 8), {}, "float16", True),
        ((8, 8), {"method": "nearest_neighbor"}, "int32", False),  # TVM makes them floats meanwhile
        ((8, 8), {"layout": "NHWC"}, "float32", False),
        ((8, 8), {"out_dtype": "float16"}, "float32", False),
        ((8, 8), {"coordinate_transformation_mode": "tf_crop_and_resize"}, "float32", False),
        ((8, 8), {"coordinate_transformation_mode": "align_corners"}, "float32", True),
        ((1, 8), {"coordinate_transformation_mode": "align_corners"}, "float32", False),
    ],
)  # fmt: skip
def test_which_resizes_rules_know(size, options, dtype, known):
    mod = module({"x": (1, 4, 4, 4)}, {}, lambda emit, x: rx.image.resize2d(x, size, **options), dtype)
    (node,) = Graph.from_module(mod).nodes
    assert (OPERATORS["resize2d"].attributes_of(node.value) is not None) == known


@pytest.mark.parametrize(
    ("extent", "count", "options"),
    [
        (4, 0, {}),
        (4, 1, {"coordinate_transformation_mode": "align_corners"}),
        (4, 8, {"coordinate_transformation_mode": "tf_crop_and_resize"}),
        (4, 8, {"method": "area"}),
        (4, 8, {"method": "nearest_neighbor", "rounding_method": "away"}),
    ],
)
def test_what_is_no_resize(extent, count, options):
    with pytest.raises(Unfit):
        taps(extent, count, attributes(**options))


def test_no_rule_leads_past_a_resize_what_does_not_commute_with_it():
    """A ReLU does not, nor a convolution of neighbours, nor one that reads every other pixel."""

    def body(emit, x, w, v):
        larger = emit(rx.image.resize2d(x, (8, 8)))
        return rx.nn.relu(larger), rx.nn.conv2d(larger, w, padding=1), rx.nn.conv2d(larger, v, strides=2)

    mod = module({"x": (1, 4, 4, 4)}, {"w": (4, 4, 3, 3), "v": (4, 4, 1, 1)}, body)
    rules = tuple(rule for rule in CATALOGUE if rule.family == "resize")
    sites = GraphState.from_module(mod, RuleSet(rules, LANES)).sites
    assert not any(sites.values())


def test_a_resize_keeps_a_constant_image_and_what_is_added_to_it():
    k = attributes(size=(7, 9), method="cubic", cubic_exclude=1)
    (found,) = meaning("resize2d", Floats(), [(np.full((1, 1, 3, 4), 2.5),)], k)
    np.testing.assert_allclose(found, 2.5)
