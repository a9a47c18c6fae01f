"""Cleaning and single operators: numbers against ONNX Runtime on the same small model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from small_weights import NORM, drawn, norm_weights

from rlflow_tvm import ir
from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs, parameter_names, random_inputs
from rlflow_tvm.frontend.clean import clean

node = helper.make_node


def test_identities_and_dropouts_vanish(make_model, assert_imports_right, operators) -> None:
    model = make_model(
        [
            node("Identity", ["x"], ["a"]),
            node("Dropout", ["a"], ["b"]),
            node("Relu", ["b"], ["c"]),
            node("Identity", ["c"], ["y"]),
        ],
        {"x": (2, 3)},
        ["y"],
    )
    assert operators(assert_imports_right(model)) == ["nn.relu"]


def test_shape_chains_are_folded(make_model, assert_imports_right, operators) -> None:
    model = make_model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["batch"]),
            node("Unsqueeze", ["batch", "axes"], ["batch1"]),
            node("Concat", ["batch1", "rest"], ["target"], axis=0),
            node("Reshape", ["x", "target"], ["r"]),
            node("Shape", ["r"], ["rs"]),
            node("ConstantOfShape", ["rs"], ["ones"], value=helper.make_tensor("v", 1, [1], [2.0])),
            node("Mul", ["r", "ones"], ["y"]),
        ],
        {"x": (2, 3, 4)},
        ["y"],
        {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([-1])},
    )
    mod = assert_imports_right(model)
    assert operators(mod) == ["reshape", "multiply"]


def test_dead_nodes_and_weights_go(make_model) -> None:
    model = make_model(
        [node("Relu", ["x"], ["y"]), node("MatMul", ["x", "w"], ["unread"])],
        {"x": (2, 3), "unused": (7,)},
        ["y"],
        {"w": drawn(3, 3)},
    )
    graph = clean(model, "small")
    assert [n.op_type for n in graph.nodes] == ["Relu"]
    assert not graph.constants
    assert [p.name for p in from_onnx(model)["main"].params] == ["x", "unused"]


def test_the_given_model_is_left_as_it_was(make_model) -> None:
    model = make_model([node("Identity", ["x"], ["a"]), node("Relu", ["a"], ["y"])], {"x": ("n", 3)}, ["y"])
    before = model.SerializeToString(deterministic=True)
    from_onnx(model, shapes={"x": (4, 3)})
    assert model.SerializeToString(deterministic=True) == before


def test_given_shapes_are_propagated(make_model) -> None:
    model = make_model([node("Flatten", ["x"], ["y"])], {"x": ("batch", 3, "h", "w")}, ["y"])
    func = from_onnx(model, shapes={"x": (2, 3, 4, 5)})["main"]
    assert [int(d) for d in func.params[0].ty.shape] == [2, 3, 4, 5]
    assert [int(d) for d in func.ret_ty.shape] == [2, 60]


def test_old_operator_sets_are_converted(make_model, run) -> None:
    model = make_model(
        [
            node("Add", ["x", "b"], ["a"], broadcast=1, axis=1),
            node("BatchNormalization", ["a", *NORM], ["n"], is_test=1),
            node("Relu", ["n"], ["y"]),
        ],
        {"x": (1, 8, 5, 5)},
        ["y"],
        {"b": drawn(8), **norm_weights(8)},
        opset=6,
    )
    modern = make_model(
        [
            node("Add", ["x", "b"], ["a"]),
            node("BatchNormalization", ["a", *NORM], ["n"]),
            node("Relu", ["n"], ["y"]),
        ],
        {"x": (1, 8, 5, 5)},
        ["y"],
        {"b": drawn(8).reshape(8, 1, 1), **norm_weights(8)},
    )
    mod = from_onnx(model)
    inputs = random_inputs(mod, 0)
    (found,), (expected,) = run(mod, inputs), onnxruntime_outputs(modern, inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [12, 13])
def test_softmax_of_both_meanings(opset: int, make_model, assert_imports_right) -> None:
    model = make_model([node("Softmax", ["x"], ["y"], axis=1)], {"x": (2, 3, 4)}, ["y"], opset=opset)
    assert_imports_right(model)


_OPERATORS = {
    "clip": ([node("Clip", ["x", "lo", "hi"], ["y"])], {"lo": np.float32(0), "hi": np.float32(0.5)}, 18),
    "clip-open": ([node("Clip", ["x", "", "hi"], ["y"])], {"hi": np.float32(0.5)}, 18),
    "clip-old": ([node("Clip", ["x"], ["y"], min=-0.5, max=0.5)], {}, 10),
    "pad": ([node("Pad", ["x", "p", "v"], ["y"])], {"p": np.array([0, 0, 1, 2, 0, 0, 3, 4]), "v": np.float32(2)}, 17),
    "pad-axes": (
        [node("Pad", ["x", "p", "", "a"], ["y"])],
        {"p": np.array([1, 2, 3, 4]), "a": np.array([-1, 2])},
        18,
    ),
    "pad-reflect": ([node("Pad", ["x", "p"], ["y"], mode="reflect")], {"p": np.array([0, 0, 1, 2] * 2)}, 17),
    "sum": ([node("Sum", ["x", "b", "x"], ["y"])], {"b": drawn(4, 1, 1)}, 18),
    "max": ([node("Max", ["x", "b"], ["y"])], {"b": drawn(6)}, 18),
    "min": ([node("Min", ["x", "b"], ["y"])], {"b": drawn(6, 1)}, 18),
    "mean": ([node("Mean", ["x", "b", "x"], ["y"])], {"b": drawn(6)}, 18),
    "gather": ([node("Gather", ["x", "i"], ["y"], axis=2)], {"i": np.array([[0, -1], [-6, 2]])}, 18),
    "gather-scalar": ([node("Gather", ["x", "i"], ["y"], axis=-1)], {"i": np.array(-2)}, 18),
    "gather-nd": ([node("GatherND", ["x", "i"], ["y"])], {"i": np.array([[0, 1], [0, -1]])}, 18),
    "gather-nd-all": (
        [node("GatherND", ["x", "i"], ["y"])],
        {"i": np.stack([np.zeros(4, np.int64), np.arange(4)], -1)},
        18,
    ),
    "gemm": (
        [node("Flatten", ["x"], ["f"]), node("Gemm", ["f", "w", "c"], ["y"], alpha=0.5, beta=2.0, transB=1)],
        {"w": drawn(5, 144), "c": drawn(5)},
        18,
    ),
    "average-pool": (
        [node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 1, 1])],
        {},
        18,
    ),
    "average-pool-padded": (
        [node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)],
        {},
        18,
    ),
    "max-pool-ceil": ([node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)], {}, 18),
    "max-pool-same": (
        [node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")],
        {},
        18,
    ),
    "conv-same": (
        [node("Conv", ["x", "w"], ["y"], strides=[2, 2], auto_pad="SAME_UPPER")],
        {"w": drawn(3, 4, 3, 3)},
        18,
    ),
    "conv-same-lower": (
        [node("Conv", ["x", "w"], ["y"], strides=[1, 3], auto_pad="SAME_LOWER")],
        {"w": drawn(3, 4, 2, 4)},
        18,
    ),
    "conv-valid": ([node("Conv", ["x", "w"], ["y"], auto_pad="VALID")], {"w": drawn(3, 4, 2, 4)}, 18),
    "average-pool-same": (
        [node("AveragePool", ["x"], ["y"], kernel_shape=[2, 3], strides=[1, 2], auto_pad="SAME_LOWER")],
        {},
        18,
    ),
    "lp-pool-same": (
        [node("LpPool", ["x"], ["y"], kernel_shape=[3, 2], strides=[2, 1], auto_pad="SAME_UPPER")],
        {},
        18,
    ),
    "lp-pool-ceil": (
        [node("LpPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 1], pads=[1] * 4, ceil_mode=1)],
        {},
        18,
    ),
    "lp-pool-ceil-newer": (
        [node("LpPool", ["x"], ["y"], kernel_shape=[3, 2], strides=[2, 3], pads=[1] * 4, ceil_mode=1)],
        {},
        22,
    ),
    "conv-grouped": (
        [node("Conv", ["x", "w"], ["y"], group=2, dilations=[2, 1], pads=[2, 0, 1, 1])],
        {"w": drawn(6, 2, 3, 2)},
        18,
    ),
    "max-pool-indices-unread": ([node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 2])], {}, 18),
    "split-into-one": ([node("Split", ["x"], ["s"], axis=1, num_outputs=1), node("Relu", ["s"], ["y"])], {}, 18),
    "split-into-one-as-output": ([node("Split", ["x", "n"], ["y"], axis=2)], {"n": np.array([6])}, 13),
    "hard-swish": ([node("HardSwish", ["x"], ["y"])], {}, 18),
    "hard-sigmoid": ([node("HardSigmoid", ["x"], ["y"], alpha=0.3)], {}, 18),
    "square": ([node("Pow", ["x", "e"], ["y"])], {"e": np.array([2.0], np.float32)}, 18),
    "cube": ([node("Pow", ["x", "e"], ["y"])], {"e": np.float32(3)}, 18),
    "pow-of-more-axes": ([node("Pow", ["x", "e"], ["y"])], {"e": np.full([1] * 5, 2, np.float32)}, 18),
    "pow-of-integer": ([node("Pow", ["x", "e"], ["y"])], {"e": np.array(2)}, 18),
    "lrn": ([node("LRN", ["x"], ["y"], size=3, alpha=0.5, beta=0.75, bias=2.0)], {}, 18),
    "layer-norm": (
        [node("LayerNormalization", ["x", "g", "b"], ["y"], axis=-1)],
        {"g": drawn(6), "b": drawn(6, seed=3)},
        18,
    ),
    "split": ([node("Split", ["x"], ["a", "y"], axis=1, num_outputs=2)], {}, 18),
    "slice": (
        [node("Slice", ["x", "s", "e", "a", "t"], ["y"])],
        {"s": np.array([5, 0]), "e": np.array([-99, 3]), "a": np.array([2, 3]), "t": np.array([-2, 1])},
        18,
    ),
    "reduce": ([node("ReduceMean", ["x", "a"], ["y"], keepdims=0)], {"a": np.array([-1])}, 18),
    "expand": ([node("Expand", ["x", "s"], ["y"])], {"s": np.array([2, 4, 6, 6])}, 18),
}


@pytest.mark.parametrize("name", sorted(_OPERATORS))
def test_operators_compute_what_onnxruntime_computes(name: str, make_model, assert_imports_right) -> None:
    nodes, weights, opset = _OPERATORS[name]
    model = make_model(nodes, {"x": (1, 4, 6, 6)}, ["y"], weights, opset)
    mod = assert_imports_right(model)
    assert len(mod.functions) == 1, "the operator came as loops"


@pytest.mark.parametrize(("mode", "pads"), [("SAME_UPPER", [2, 0, 2, 1]), ("SAME_LOWER", [2, 1, 2, 0])])
@pytest.mark.parametrize("operator", ["LpPool", "MaxPool"])
def test_dilations_are_padded_for(operator: str, mode: str, pads: list[int], make_model, run) -> None:
    def model(**padding) -> onnx.ModelProto:
        pool = node(operator, ["x"], ["y"], kernel_shape=[3, 2], strides=[1, 2], dilations=[2, 2], **padding)
        return make_model([pool], {"x": (1, 4, 6, 6)}, ["y"])

    mod = from_onnx(model(auto_pad=mode))
    inputs = random_inputs(mod, 0)
    # ONNX Runtime leaves the dilations out of auto_pad, where the standard has them.
    (found,), (expected,) = run(mod, inputs), onnxruntime_outputs(model(pads=pads), inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


_CEIL = {
    "max": ("MaxPool", 2, 2, {"pads": [1] * 4}, (3, 3)),
    "max-of-one-side": ("MaxPool", 3, 3, {"pads": [1] * 4}, (2, 3)),
    "max-dilated": ("MaxPool", 2, 4, {"pads": [1] * 4, "dilations": [2, 2]}, (3, 3)),
    "max-valid": ("MaxPool", 1, 3, {"auto_pad": "VALID"}, (3, 4)),
    "average-of-one-side": ("AveragePool", 3, 3, {"pads": [1] * 4}, (2, 3)),
    "average-padded": ("AveragePool", 2, 2, {"pads": [1] * 4, "count_include_pad": 1}, (3, 3)),
    "lp-of-one-side": ("LpPool", 3, 3, {"pads": [1] * 4}, (2, 3)),
}


@pytest.mark.parametrize("name", sorted(_CEIL))
def test_no_window_of_a_pool_starts_in_the_end_padding(name: str, make_model, assert_imports_right) -> None:
    operator, size, stride, attrs, extents = _CEIL[name]
    nodes = [
        node(operator, ["x"], ["p"], kernel_shape=[size] * 2, strides=[stride] * 2, ceil_mode=1, **attrs),
        node("MaxPool", ["p"], ["half"], kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
    ]
    assert_imports_right(make_model(nodes, {"x": (1, 4, *extents)}, ["p", "half"]))
    # ONNX Runtime itself takes the inferred shape for this one.
    like = [nodes[0], node("Shape", ["p"], ["n"]), node("ConstantOfShape", ["n"], ["zeros"])]
    found = from_onnx(make_model(like, {"x": (1, 4, *extents)}, ["p", "zeros"]))["main"].ret_ty.fields
    assert ir.known_shape(found[0]) == ir.known_shape(found[1])


@pytest.mark.parametrize("opset", [10, 18])
def test_a_pool_whose_inferred_shape_is_contradicted(opset: int, make_model, run) -> None:
    def model(ceil_mode: int) -> onnx.ModelProto:
        pool = node("MaxPool", ["x"], ["p"], kernel_shape=[2, 2], strides=[2, 2], pads=[1] * 4, ceil_mode=ceil_mode)
        nodes = [pool, node("Add", ["p", "w"], ["y"])]
        return make_model(nodes, {"x": (1, 4, 3, 3)}, ["y"], {"w": drawn(4, 2, 2)}, opset)

    mod = from_onnx(model(1))  # which ONNX Runtime, that infers as ONNX does, refuses
    inputs = random_inputs(mod, 0)
    (found,), (expected,) = run(mod, inputs), onnxruntime_outputs(model(0), inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_padding_that_an_average_would_count(make_model) -> None:
    pool = node(
        "AveragePool",
        ["x"],
        ["y"],
        kernel_shape=[3, 3],
        strides=[3, 3],
        pads=[1] * 4,
        ceil_mode=1,
        count_include_pad=1,
        name="it",
    )
    with pytest.raises(FrontendError, match=r"node 'it' \(AveragePool\) counts the padding of windows"):
        from_onnx(make_model([pool], {"x": (1, 4, 2, 3)}, ["y"]))


def test_negative_token_ids_count_from_the_end(make_model, run) -> None:
    table = drawn(10, 3)
    model = make_model(
        [node("Gather", ["table", "ids"], ["y"])], {"ids": (4,)}, ["y"], {"table": table}, dtypes={"ids": "int64"}
    )
    (found,) = run(from_onnx(model), {"ids": np.array([-1, 0, -10, 9])})
    np.testing.assert_array_equal(found, table[[9, 0, 0, 9]])


def test_a_mask_without_axes_is_on(make_model) -> None:
    nodes = [node("Where", ["use_mask", "x", "z"], ["y"])]
    model = make_model(nodes, {"use_mask": (), "x": (2, 3)}, ["y"], {"z": drawn(3)}, dtypes={"use_mask": "bool"})
    drawn_mask = random_inputs(from_onnx(model), 0)["use_mask"]
    assert drawn_mask.shape == ()
    assert drawn_mask


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_images_are_drawn_from_all_bytes(dtype: str, make_model) -> None:
    nodes = [node("Cast", ["image"], ["a"], to=1), node("Cast", ["mask"], ["b"], to=1), node("Add", ["a", "b"], ["y"])]
    model = make_model(nodes, {"image": (3, 32, 32), "mask": (32,)}, ["y"], dtypes={"image": dtype, "mask": dtype})
    inputs = random_inputs(from_onnx(model), 0)
    assert inputs["image"].dtype == dtype
    assert inputs["image"].min() == np.iinfo(dtype).min
    assert inputs["image"].max() == np.iinfo(dtype).max
    assert set(inputs["mask"].tolist()) == {0, 1}


def test_parameters_are_identifiers() -> None:
    names = ["image", "gpu_0/data_0", "gpu_0:data_0", "gpu_0_data_0", "2nd", "größe"]
    assert parameter_names(names) == {
        "image": "image",
        "gpu_0/data_0": "gpu_0_data_0_1",
        "gpu_0:data_0": "gpu_0_data_0_2",
        "gpu_0_data_0": "gpu_0_data_0",
        "2nd": "input_2nd",
        "größe": "gr__e",
    }


def test_inputs_whose_names_are_no_identifiers(make_model, assert_imports_right) -> None:
    model = make_model([node("Sub", ["a/b:0", "w.1"], ["a_b_0"])], {"a/b:0": (2, 3), "w.1": (3,)}, ["a_b_0"])
    mod = assert_imports_right(model)
    assert [p.name for p in mod["main"].params] == ["a_b_0", "w_1"]


def test_weights_come_in_their_final_shape(make_model) -> None:
    model = make_model(
        [
            node("Conv", ["x", "w", "b"], ["c"]),
            node("Flatten", ["c"], ["f"]),
            node("Gemm", ["f", "v"], ["y"], transB=1),
        ],
        {"x": (1, 4, 3, 3)},
        ["y"],
        {"w": drawn(2, 4, 3, 3), "b": drawn(2), "v": drawn(5, 2)},
    )
    detached = ir.detach(from_onnx(model))
    assert [tuple(t.shape) for t in detached.weights.values()] == [(2, 4, 3, 3), (1, 2, 1, 1), (2, 5)]


def test_a_model_without_weights_or_nodes_imports(make_model) -> None:
    model = make_model([node("Identity", ["x"], ["y"])], {"x": (2, 3)}, ["y"])
    func = from_onnx(model)["main"]
    assert [p.name for p in func.params] == ["x"]
    assert [int(d) for d in func.ret_ty.shape] == [2, 3]


def test_rules_know_what_was_written_as_a_power_or_as_a_clip(make_model, operators) -> None:
    nodes = [node("Pow", ["x", "e"], ["p"]), node("HardSwish", ["p"], ["y"])]
    mod = from_onnx(make_model(nodes, {"x": (2, 3)}, ["y"], {"e": np.float32(3)}))
    assert set(operators(mod)) == {"multiply", "add", "nn.relu", "minimum"}


def test_constants_of_one_element_are_numbers_where_no_axis_is_lost(make_model) -> None:
    nodes = [node("Mul", ["x", "s"], ["m"]), node("Add", ["t", "m"], ["a"]), node("Sub", ["a", "u"], ["y"])]
    weights = {"s": drawn(1), "t": drawn(1, 1), "u": drawn(1, 1, 1)}
    func = from_onnx(make_model(nodes, {"x": (2, 3)}, ["y"], weights))["main"]
    constants = [arg.value.numpy().shape for b in func.body.blocks[0].bindings for arg in b.value.args[:2]
                 if isinstance(arg, tvm.ir.GenericConst)]  # fmt: skip
    assert constants == [(), (), (1, 1, 1)]


def test_several_outputs_are_a_tuple(make_model, assert_imports_right) -> None:
    model = make_model([node("Relu", ["x"], ["a"]), node("Sigmoid", ["x"], ["b"])], {"x": (2, 3)}, ["b", "a", "b"])
    assert len(assert_imports_right(model)["main"].ret_ty.fields) == 3


def test_local_functions_are_inlined(make_model, operators) -> None:
    body = onnx.helper.make_function(
        "local", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    model = make_model([node("Twice", ["x"], ["y"], domain="local")], {"x": (2, 3)}, ["y"])
    model.functions.append(body)
    model.opset_import.append(helper.make_opsetid("local", 1))
    assert operators(from_onnx(model)) == ["add"]


def test_float_masks_are_drawn_as_masks(make_model) -> None:
    """Of normal numbers, times 1e9, nothing that they are added to would be seen."""
    model = make_model([node("Add", ["x", "the_mask"], ["y"])], {"x": (4, 64), "the_mask": (4, 64)}, ["y"])
    inputs = random_inputs(from_onnx(model), 0)
    assert (set(inputs["the_mask"].ravel().tolist()), inputs["the_mask"][:, 0].all()) == ({0.0, 1.0}, True)
    assert len(set(inputs["x"].ravel().tolist())) > 200
