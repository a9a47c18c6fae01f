"""Bad input: each is one clear line that names the culprit and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from frontend_error import message
from google.protobuf.message import EncodeError
from onnx import helper
from tvm import relax

from rlflow_tvm.frontend import (
    from_onnx,
    import_models,
    input_names,
    onnxruntime_outputs,
    random_inputs,
    split_shapes,
    zoo,
)
from rlflow_tvm.frontend.converters import CONVERTERS

node = helper.make_node


@pytest.fixture
def relu(make_model) -> onnx.ModelProto:
    return make_model([node("Relu", ["image"], ["y"])], {"image": ("batch", 3, 224, 224)}, ["y"])


def test_a_missing_file(tmp_path: Path) -> None:
    text = message(lambda: from_onnx(tmp_path / "none.onnx"))
    assert "none.onnx: no such file" in text


def test_a_folder(tmp_path: Path) -> None:
    assert "not a file" in message(lambda: from_onnx(tmp_path))


def test_a_name_that_is_too_long() -> None:
    name = "a" * 300
    assert f"{name}: cannot be read (File name too long)" in message(lambda: from_onnx(name))
    assert split_shapes(f"{name}@x=1,2") == (name, {"x": (1, 2)})


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    assert "empty.onnx: the file is empty" in message(lambda: from_onnx(str(tmp_path / "empty.onnx")))


@pytest.mark.parametrize(
    "content", ["This is a text file.\nNot a model.\n", "{}\n", "<html><body>404</body></html>", "\n\n\n", "0"]
)
def test_a_text_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text(content)
    text = message(lambda: from_onnx(tmp_path / "text.onnx"))
    assert "text.onnx: not an ONNX" in text


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(part: float, tmp_path: Path) -> None:
    data = zoo.load("demo").SerializeToString()
    (tmp_path / "cut.onnx").write_bytes(data[: int(part * len(data))])
    text = message(lambda: from_onnx(tmp_path / "cut.onnx"))
    assert "cut.onnx: not an ONNX file, or a truncated one" in text


def test_an_empty_model() -> None:
    assert "not an ONNX model" in message(lambda: from_onnx(onnx.ModelProto()))


def test_a_dynamic_dimension(relu: onnx.ModelProto) -> None:
    text = message(lambda: from_onnx(relu))
    assert "dimension 0 (batch) of input 'image' is dynamic" in text
    assert "--shape image=1,3,224,224" in text


def test_an_input_without_shape(make_model) -> None:
    model = make_model([node("Relu", ["image"], ["y"])], {"image": None}, ["y"])
    text = message(lambda: from_onnx(model))
    assert "input 'image' has no shape" in text
    assert "--shape image=" in text
    assert len(from_onnx(model, {"image": (2, 3)})["main"].params) == 1


def test_a_shape_for_an_input_that_is_not_there(relu: onnx.ModelProto) -> None:
    text = message(lambda: from_onnx(relu, shapes={"picture": (1, 3, 224, 224)}))
    assert "no input 'picture': it has the inputs image" in text


def test_a_shape_of_another_rank(relu: onnx.ModelProto) -> None:
    text = message(lambda: from_onnx(relu, shapes={"image": (1, 3, 224)}))
    assert "'image' has 3 dimensions, the model's input has 4" in text


def test_a_shape_against_a_fixed_dimension(relu: onnx.ModelProto) -> None:
    text = message(lambda: from_onnx(relu, shapes={"image": (1, 4, 224, 224)}))
    assert "dimension 1 is fixed at 3" in text


def test_a_shape_that_is_not_positive(relu: onnx.ModelProto) -> None:
    text = message(lambda: from_onnx(relu, shapes={"image": (0, 3, 224, 224)}))
    assert "positive" in text


def test_a_shape_that_no_file_can_hold(relu: onnx.ModelProto) -> None:
    text = message(lambda: from_onnx(relu, shapes={"image": (10**20, 3, 224, 224)}))
    assert f"of input 'image': give positive whole numbers, none above {2**63 - 1}" in text


def test_shapes_that_do_not_fit_the_weights(make_model) -> None:
    model = make_model([node("MatMul", ["x", "w"], ["y"])], {"x": (2, "n")}, ["y"], {"w": np.ones((4, 5), np.float32)})
    text = message(lambda: from_onnx(model, shapes={"x": (2, 3)}))
    assert "shape inference failed" in text


def test_an_unsupported_operator(make_model) -> None:
    model = make_model([node("Det", ["x"], ["y"], name="the_determinant")], {"x": (3, 3)}, ["y"])
    text = message(lambda: from_onnx(model))
    assert "node 'the_determinant' uses the operator Det, which TVM cannot import" in text


def test_an_unnamed_unsupported_operator(make_model) -> None:
    model = make_model([node("Relu", ["x"], ["r"]), node("Det", ["r"], ["y"])], {"x": (3, 3)}, ["y"])
    assert "node 'Det_1' uses the operator Det" in message(lambda: from_onnx(model))


def test_an_operator_of_another_domain_is_not_taken_for_the_standard_one(make_model) -> None:
    model = make_model([node("Relu", ["x"], ["y"], domain="com.example", name="own")], {"x": (3, 3)}, ["y"])
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    text = message(lambda: from_onnx(model))
    assert "node 'own' uses the operator com.example.Relu" in text


def test_random_operators_are_not_folded(make_model) -> None:
    model = make_model([node("RandomNormal", [], ["r"], shape=[3]), node("Add", ["x", "r"], ["y"])], {"x": (3,)}, ["y"])
    assert "operator RandomNormal" in message(lambda: from_onnx(model))


def test_an_operator_that_tvm_refuses(make_model) -> None:
    nodes = [node("Pad", ["x", "p"], ["y"], name="pad")]
    model = make_model(nodes, {"x": (4,), "p": (2,)}, ["y"], dtypes={"p": "int64"})
    text = message(lambda: from_onnx(model))
    assert "cannot import node 'pad' (operator Pad): Dynamic pads are not supported yet." in text


def test_a_shape_that_tvm_gets_wrong_within(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, "Relu", lambda bb, inputs, attrs, opset: relax.op.flatten(inputs[0]))
    nodes = [node("Relu", ["x"], ["r"], name="it"), node("ReduceMax", ["r"], ["y"], keepdims=0)]
    text = message(lambda: from_onnx(make_model(nodes, {"x": (2, 3)}, ["y"])))
    assert "TVM imports 'r' of node 'it' (operator Relu) with the shape (6,), ONNX says (2, 3)" in text


def test_an_attribute_that_tvm_ignores(make_model) -> None:
    def shrink(antialias: int) -> onnx.ModelProto:
        nodes = [node("Resize", ["x", "", "s"], ["y"], mode="linear", antialias=antialias, name="shrink")]
        return make_model(nodes, {"x": (1, 1, 8, 8)}, ["y"], {"s": np.array([1, 1, 0.5, 0.5], np.float32)})

    text = message(lambda: from_onnx(shrink(1)))
    assert "ignores attribute 'antialias' of node 'shrink' (operator Resize)" in text
    assert len(from_onnx(shrink(0))["main"].params) == 1


@pytest.mark.parametrize(
    ("nodes", "remedy"),
    [
        (
            [node("LayerNormalization", ["x", "w"], ["a", "b"], name="it"), node("Add", ["a", "b"], ["y"])],
            "first output",
        ),
        ([node("BatchNormalization", ["x", *"wwww"], ["y", "", ""], training_mode=1, name="it")], "inference mode"),
    ],
)
def test_what_tvm_would_get_wrong(nodes: list[onnx.NodeProto], remedy: str, make_model) -> None:
    model = make_model(nodes, {"x": (2, 4)}, ["y"], {"w": np.ones(4, np.float32)})
    text = message(lambda: from_onnx(model))
    assert f"node 'it' uses the operator {nodes[0].op_type}" in text
    assert remedy in text


def test_control_flow(make_model) -> None:
    branch = helper.make_graph(
        [node("Relu", ["x"], ["b"])], "b", [], [helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, [3])]
    )
    other = onnx.GraphProto.FromString(branch.SerializeToString())
    nodes = [node("If", ["c"], ["y"], then_branch=branch, else_branch=other, name="choice")]
    model = make_model(nodes, {"x": (3,), "c": ()}, ["y"], dtypes={"c": "bool"})
    text = message(lambda: from_onnx(model))
    assert "node 'choice' uses the operator If, control flow" in text


def test_a_shape_that_depends_on_data(make_model) -> None:
    model = make_model([node("NonZero", ["x"], ["y"], name="where")], {"x": (3, 3)}, ["y"], out_dtype="int64")
    text = message(lambda: from_onnx(model))
    assert "the shape of node 'where' (NonZero) is known only at run time" in text


def test_dropout_in_training(make_model) -> None:
    model = make_model([node("Dropout", ["x", "", "t"], ["y"], name="drop")], {"x": (3,)}, ["y"], {"t": np.array(True)})
    assert "node 'drop' (Dropout) is in training mode" in message(lambda: from_onnx(model))


def test_an_invalid_graph(make_model) -> None:
    model = make_model([node("Relu", ["nobody"], ["y"])], {"x": (3,)}, ["y"])
    text = message(lambda: from_onnx(model))
    assert "not a valid ONNX model" in text
    assert "nobody" in text


def test_a_constant_that_would_fill_the_memory(make_model) -> None:
    model = make_model(
        [node("ConstantOfShape", ["s"], ["c"], name="huge"), node("Add", ["x", "c"], ["y"])],
        {"x": (1,)},
        ["y"],
        {"s": np.array([1 << 20, 1 << 20])},
    )
    assert "node 'huge' (ConstantOfShape)" in message(lambda: from_onnx(model))


def test_an_old_broadcast_of_an_unknown_operand(make_model) -> None:
    model = make_model(
        [node("Add", ["x", "b"], ["y"], broadcast=1, axis=1, name="old")], {"x": (1, 2, 3), "b": (2,)}, ["y"], opset=6
    )
    assert "node 'old' (Add)" in message(lambda: from_onnx(model))


def test_inputs_that_cannot_be_drawn() -> None:
    image = relax.Var("image", relax.TensorType((tvm.tirx.Var("batch", "int64"), 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [image]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.nn.relu(image))
        builder.emit_func_output(output)
    assert "'image' has a dynamic shape" in message(lambda: random_inputs(builder.finalize(), 0))


def test_divisors_are_drawn_without_zeros(make_model) -> None:
    """A process that divides an integer by zero is ended."""
    model = make_model(
        [node("Unsqueeze", ["by", "first"], ["b"]), node("Div", ["a", "b"], ["q"]), node("Mod", ["a", "b"], ["r"])],
        {"a": (4, 64), "by": (64,)}, ["q", "r"], {"first": np.array([0])},
    )  # fmt: skip
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.INT32
    drawn = random_inputs(from_onnx(model), 0)
    assert set(drawn["by"].tolist()) == {1, 2}
    assert set(drawn["a"].ravel().tolist()) == {0, 1}


def test_shapes_for_several_models(relu: onnx.ModelProto, make_model, tmp_path: Path) -> None:
    onnx.save(relu, tmp_path / "a.onnx")
    onnx.save(make_model([node("Relu", ["text"], ["y"])], {"text": ("n", 8)}, ["y"]), tmp_path / "b.onnx")
    paths = {name: tmp_path / f"{name}.onnx" for name in "ab"}
    mods = import_models(paths, {"image": (2, 3, 224, 224), "text": (5, 8)})
    assert [[int(d) for d in mod["main"].params[0].ty.shape] for mod in mods.values()] == [[2, 3, 224, 224], [5, 8]]
    text = message(lambda: import_models(paths, {"image": (2, 3, 224, 224), "txt": (5, 8)}))
    assert "no input 'txt': a has the inputs image; b has the inputs text" in text


def test_files_are_loaded_once(make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model([node("Add", ["x", "w"], ["y"])], {"x": (2, 3), "w": (3,)}, ["y"], {"w": np.ones(3, np.float32)})
    model.ir_version = 3  # whose weights are inputs too
    onnx.save(model, tmp_path / "a.onnx")
    assert input_names(tmp_path / "a.onnx") == ["x"]
    loads, load = [], onnx.load
    monkeypatch.setattr(onnx, "load", lambda *args, **options: loads.append(1) or load(*args, **options))
    paths = dict.fromkeys(("one", "two"), tmp_path / "a.onnx")
    assert [len(mod["main"].params) for mod in import_models(paths, {"x": (2, 3)}).values()] == [1, 1]
    assert len(loads) == 1
    assert "no input 'w': one has the inputs x; two has" in message(lambda: import_models(paths, {"w": (3,)}))


def test_a_model_that_is_too_large_for_onnxruntime(relu: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(_: onnx.ModelProto) -> bytes:
        raise EncodeError("Failed to serialize proto")

    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", too_large)
    text = message(lambda: onnxruntime_outputs(relu, {}))
    assert "ONNX Runtime cannot run the model (Failed to serialize proto)" in text


def test_what_onnxruntime_refuses(relu: onnx.ModelProto) -> None:
    text = message(lambda: onnxruntime_outputs(relu, {"image": np.zeros((1, 3, 2, 2), np.float32)}))
    assert "ONNX Runtime cannot run the model" in text


def _damage_shape(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] = 50


def _damage_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


@pytest.mark.parametrize("damage", [_damage_shape, _damage_type])
def test_weights_that_cannot_be_read(damage: Callable[[onnx.ModelProto], None], make_model) -> None:
    model = make_model([node("Add", ["x", "w"], ["y"])], {"x": (2, 3)}, ["y"], {"w": np.ones((2, 3), np.float32)})
    damage(model)
    assert "the weight 'w' cannot be read" in message(lambda: from_onnx(model))


def test_a_name_that_is_no_text(make_model, tmp_path: Path) -> None:
    model = make_model([node("Relu", ["x"], ["y"])], {"x": (2, 3)}, ["y"])
    (tmp_path / "bad.onnx").write_bytes(model.SerializeToString().replace(b"Relu", b"\xffelu"))
    assert "bad.onnx: a name in it is no text" in message(lambda: from_onnx(tmp_path / "bad.onnx"))
    model = make_model([node("Relu", ["input"], ["y"])], {"input": (2, 3)}, ["y"])
    (tmp_path / "bad.onnx").write_bytes(model.SerializeToString().replace(b"input", b"\xffnput"))
    assert "bad.onnx: a name in it is no text" in message(lambda: import_models({"a": tmp_path / "bad.onnx"}, {}))


def test_a_tensor_filled_with_two_values(make_model) -> None:
    two = onnx.numpy_helper.from_array(np.array([1, 2], np.float32))
    nodes = [node("ConstantOfShape", ["s"], ["c"], name="it", value=two), node("Add", ["x", "c"], ["y"])]
    model = make_model(nodes, {"x": (2, 3)}, ["y"], {"s": np.array([2, 3])})
    assert "'it' is to fill a tensor with 2 values" in message(lambda: from_onnx(model))


def test_an_input_that_is_missing(make_model) -> None:
    model = make_model([node("Concat", ["x", "", "x"], ["y"], axis=0, name="it")], {"x": (2, 3)}, ["y"])
    assert "node 'it' uses the operator Concat without its input 1" in message(lambda: from_onnx(model))


@pytest.mark.parametrize("wrong", ["gamma", "beta", "mean", "var"])
@pytest.mark.parametrize("first", ["Conv", "Relu"])
def test_a_batch_norm_of_other_lengths(first: str, wrong: str, make_model) -> None:
    names = ["gamma", "beta", "mean", "var"]
    weights = {name: np.ones(5 if name == wrong else 4, np.float32) for name in names}
    before = node(first, ["x", "w"] if first == "Conv" else ["x"], ["c"])
    model = make_model(
        [before, node("BatchNormalization", ["c", *names], ["y"], name="it")],
        {"x": (1, 4, 6, 6)},
        ["y"],
        {**weights, "w": np.ones((4, 4, 1, 1), np.float32)},
    )
    message(lambda: from_onnx(model))


def test_what_tvm_raises_when_a_type_is_wrong(make_model) -> None:
    model = make_model([node("Gather", ["x", "i"], ["y"], name="it")], {"x": (3, 3)}, ["y"], {"i": np.ones(2)})
    message(lambda: from_onnx(model))


def test_one_file_at_several_shapes(relu: onnx.ModelProto, tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    onnx.save(relu, file)
    names = [f"{file}@image=1,3,224,224", f"{file}@image=2,3,224,224"]
    assert [split_shapes(name) for name in names] == [
        (str(file), {"image": (1, 3, 224, 224)}),
        (str(file), {"image": (2, 3, 224, 224)}),
    ]
    mods = import_models(dict.fromkeys(names, file), {"image": (9, 9, 9, 9)})
    assert [int(mod["main"].params[0].ty.shape[0]) for mod in mods.values()] == [1, 2]


def test_what_is_no_shape(tmp_path: Path) -> None:
    named = tmp_path / "a@b.onnx"
    named.touch()
    assert split_shapes(str(named)) == (str(named), {})
    assert split_shapes("zoo:resnet18@64") == ("zoo:resnet18@64", {})
    text = message(lambda: split_shapes("a.onnx@image"))
    assert text == "a.onnx@image: no such file, and FILE@NAME=EXTENT,EXTENT,... is expected, as input=1,3,224,224"
    for wrong in ("image=1,x", "=1", "image=-1"):
        message(lambda wrong=wrong: split_shapes(f"a.onnx@{wrong}"))
