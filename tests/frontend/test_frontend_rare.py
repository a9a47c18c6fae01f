"""What exporters seldom write, or of tensors of seldom ranks and types: by ONNX Runtime on the original."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from rlflow_tvm.frontend import clean as cleaning
from rlflow_tvm.frontend import from_onnx, to_onnx
from rlflow_tvm.frontend.clean import clean
from rlflow_tvm.frontend.graph import Graph

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_a_row_of_pixels_is_resized(make_model, assert_imports_right, operators, mode, coordinates, scale):
    """As audio models do it: without loops of TVM's, which could not be written back."""
    attrs = {"mode": mode, "coordinate_transformation_mode": coordinates}
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], **attrs)
    model = make_model([node], {"x": (1, 3, 20)}, ["y"], {"s": np.array([1, 1, scale], np.float32)})
    mod = assert_imports_right(model)
    if mode == "nearest" or coordinates != "align_corners":
        assert "call_tir" not in operators(mod)
        to_onnx(mod)


def test_local_response_normalization_of_halves(make_model, assert_imports_right):
    node = helper.make_node("LRN", ["x"], ["y"], size=5, alpha=0.1, beta=0.7, bias=2.0)
    half = {"dtypes": {"x": "float16"}, "out_dtype": "float16"}
    assert_imports_right(make_model([node], {"x": (1, 8, 6, 6)}, ["y"], **half), tolerance=2e-3)


def test_an_empty_auto_pad_says_nothing(make_model, assert_imports_right):
    """`SAME_UPPER` it was taken for, behind which the shape does not tell."""
    convolved = helper.make_node("Conv", ["x", "w"], ["c"], auto_pad="", pads=[0, 1, 0, 1])
    nodes = [convolved, helper.make_node("GlobalAveragePool", ["c"], ["y"])]
    weights = {"w": np.random.default_rng(0).standard_normal((3, 3, 3, 3)).astype(np.float32)}
    assert_imports_right(make_model(nodes, {"x": (1, 3, 8, 8)}, ["y"], weights))


def test_an_input_that_is_an_output_too_keeps_its_shape(make_model, assert_imports_right):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["r"]),
        helper.make_node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
    ]
    weights = {"one": np.array(1), "zero": np.array(0)}
    mod = assert_imports_right(make_model(nodes, {"x": (1, 8)}, ["x", "y"], weights))
    assert len(mod["main"].ret_ty.fields) == 2


def test_a_value_of_a_pad_that_mirrors_says_nothing(make_model, assert_imports_right):
    node = helper.make_node("Pad", ["x"], ["y"], mode="reflect", pads=[0, 0, 1, 1, 0, 0, 1, 1], value=0.5)
    assert_imports_right(make_model([node], {"x": (1, 2, 4, 4)}, ["y"], opset=9))


@pytest.mark.parametrize("attrs", [{"axis": 1}, {"axis": -1}, {}])
def test_what_a_known_condition_leaves_is_known(make_model, assert_imports_right, operators, attrs):
    node = helper.make_node("Compress", ["x", "c"], ["y"], **attrs)
    model = make_model([node], {"x": (2, 3)}, ["y"], {"c": np.array([True, False, True])})
    assert operators(assert_imports_right(model))[-1] == "take"


@pytest.mark.parametrize("operator", ["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceSumSquare"])
def test_a_reduction_of_nothing_may_say_what_it_keeps(make_model, assert_imports_right, operator):
    node = helper.make_node(operator, ["x"], ["y"], noop_with_empty_axes=1, keepdims=0)
    given = {"x": np.random.default_rng(0).uniform(1, 2, (2, 3)).astype(np.float32)}
    assert_imports_right(make_model([node], {"x": (2, 3)}, ["y"]), given=given)


def test_names_of_a_loop_are_found_without_asking_for_all_before():
    graph = Graph(onnx.ModelProto(graph=onnx.GraphProto()), {}, "loop")
    began = time.perf_counter()
    names = {graph.fresh_name("y") for _ in range(20_000)}
    assert len(names) == 20_000
    assert time.perf_counter() - began < 2.0, "each by as many questions as there are names would take minutes"


def test_a_name_that_looks_like_a_count_is_not_given_twice(make_model):
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Relu", ["y"], ["y_1"])]
    graph = clean(make_model(nodes, {"x": (2, 3)}, ["y_1"]), "model")
    assert [graph.fresh_name("y") for _ in range(3)] == ["y_2", "y_3", "y_4"]
    assert from_onnx(make_model(nodes, {"x": (2, 3)}, ["y_1"])) is not None


def test_an_attribute_without_its_value_is_zero(make_model, assert_imports_right):
    """As writers in other languages leave zeros out."""
    node = helper.make_node("Concat", ["x", "x"], ["y"])
    node.attribute.append(onnx.AttributeProto(name="axis", type=onnx.AttributeProto.INT))
    assert_imports_right(make_model([node], {"x": (2, 3)}, ["y"]))


@pytest.mark.parametrize("operator", ["ReduceLogSumExp", "ReduceL2", "ReduceMax", "ReduceMean"])
def test_that_nothing_is_done_without_axes_says_nothing_beside_axes(make_model, assert_imports_right, operator):
    nodes = [helper.make_node(operator, ["x", "a"], ["y"], noop_with_empty_axes=1, keepdims=0)]
    kinds = {"ReduceMax": "bool", "ReduceMean": "int32"}
    dtype = kinds.get(operator, "float32")
    half = {"dtypes": {"x": dtype}, "out_dtype": dtype}
    x = (10 * np.random.default_rng(0).standard_normal((4, 5))).astype(dtype)
    x = x * (np.arange(5) > 2) * (np.arange(4)[:, None] > 1) if dtype == "bool" else x
    given = {"given": {"x": x.astype(dtype)}}
    model = make_model(nodes, {"x": (4, 5)}, ["y"], {"a": np.array([1])}, opset=20, **half)
    assert_imports_right(model, **given)


@pytest.mark.parametrize("opset", [9, 10, 11])
def test_a_declared_shape_of_another_batch_size_says_nothing(make_model, assert_imports_right, opset):
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Softmax", ["r"], ["y"], axis=1)]
    model = make_model(nodes, {"x": (4, 6)}, ["y"], opset=opset)
    shape = model.graph.output[0].type.tensor_type.shape
    del shape.dim[:]
    shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=extent) for extent in (1, 6))
    assert_imports_right(model)


def test_local_functions_are_inlined_without_the_weights(make_model, assert_imports_right, monkeypatch):
    """ONNX's inliner takes no more than 2 GB."""
    w = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    model = make_model([helper.make_node("Twice", ["x", "w"], ["y"], domain="own")], {"x": (2, 512)}, ["y"], {"w": w})
    body = [helper.make_node("MatMul", ["a", "b"], ["t"]), helper.make_node("Add", ["t", "t"], ["c"])]
    opsets = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("own", "Twice", ["a", "b"], ["c"], body, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    inline, sizes = cleaning.inliner.inline_local_functions, []
    monkeypatch.setattr(cleaning.inliner, "inline_local_functions", lambda m: sizes.append(m.ByteSize()) or inline(m))
    assert_imports_right(model)
    assert sizes
    assert max(sizes) < 10_000
