"""Whole models: they import in the common form, and compute what ONNX Runtime computes on the original."""

from __future__ import annotations

import onnx
import pytest
import tvm
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.frontend import from_onnx, zoo
from rlflow_tvm.frontend.export import EXPORTERS
from rlflow_tvm.frontend.zoo_light import light_files

_CONVOLUTIONS = {
    "light_bvlc_alexnet": 5,
    "light_densenet121": 121,
    "light_inception_v1": 57,
    "light_inception_v2": 69,
    "light_resnet50": 53,
    "light_shufflenet": 49,
    "light_squeezenet": 26,
    "light_vgg19": 16,
    "light_zfnet512": 5,
}
_NEVER_LEFT = {
    "nn.batch_norm",
    "nn.dropout",
    "shape_of",
    "shape_to_tensor",
    "stack",
    "strided_slice",
    "broadcast_to",
    "call_tir",
}


def _assert_common_form(mod: tvm.IRModule, inputs: int) -> None:
    func = mod["main"]
    assert [gv.name_hint for gv in mod.get_global_vars()] == ["main"]
    assert len(func.params) == ir.num_inputs(func) == inputs
    bindings = ir.single_block(func)
    for binding in bindings:
        assert isinstance(binding.var.ty, relax.TensorType)
        assert all(isinstance(d, tvm.tirx.IntImm) for d in binding.var.ty.shape.values)
    relax.analysis.well_formed(mod)  # raises where it is not


def test_every_light_model_is_known() -> None:
    assert set(light_files()) == set(_CONVOLUTIONS)


@pytest.mark.parametrize("name", sorted(_CONVOLUTIONS))
def test_light_models_import_from_the_wheel(name: str, operators) -> None:
    model = onnx.load(light_files()[name])
    mod = from_onnx(light_files()[name])
    _assert_common_form(mod, inputs=1)
    names = operators(mod)
    assert names.count("nn.conv2d") == _CONVOLUTIONS[name]
    assert not _NEVER_LEFT & set(names)
    assert {f"relax.{name}" for name in names} <= set(EXPORTERS)
    constants = {t.name for t in model.graph.initializer}
    inputs = [i.name for i in model.graph.input if i.name not in constants]
    assert [p.name for p in mod["main"].params] == [name.replace("/", "_") for name in inputs]


@pytest.mark.parametrize("name", ["demo", "light_squeezenet", "light_shufflenet"])
def test_models_without_torch_compute_what_onnxruntime_computes(name: str, assert_imports_right) -> None:
    assert_imports_right(zoo.load(name))


@pytest.mark.parametrize("name", ["bert-tiny", "squeezenet-tiny"])
def test_torch_models_compute_what_onnxruntime_computes(name: str, assert_imports_right, operators) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    mod = assert_imports_right(zoo.load(name))
    _assert_common_form(mod, inputs=3 if name == "bert-tiny" else 1)
    assert not _NEVER_LEFT & set(operators(mod))


def test_bert_keeps_its_heads_and_norms(operators) -> None:
    pytest.importorskip("transformers")
    names = operators(from_onnx(zoo.path("bert-tiny")))
    assert names.count("nn.layer_norm") == 5  # embeddings, and two in each of two layers
    assert names.count("nn.softmax") == 2
    assert names.count("matmul") == 16  # query, key, value, output, two of attention, two dense; twice
    assert names.count("take") == 2


def test_batch_norms_of_a_resnet_vanish_into_its_convolutions(operators) -> None:
    pytest.importorskip("torch")
    model = zoo.load("resnet18")
    assert sum(n.op_type == "BatchNormalization" for n in model.graph.node) == 20
    names = operators(from_onnx(model))
    assert names.count("nn.conv2d") == 20
    assert names.count("add") == 20 + 8 + 1  # a bias each, eight residual additions, the dense layer's bias
    assert not {"multiply", "sqrt", *_NEVER_LEFT} & set(names)


_SMALL = {
    "dalle": zoo._Sequence("Dalle", 14, config=(("width", 32), ("layers", 2), ("heads", 4), ("text", 5))),
    "transducer": zoo._Sequence(
        "TransducerEncoder", 12, 32, (("width", 32), ("layers", 2), ("heads", 4), ("before", 3), ("after", 1))
    ),
    "resnext": zoo._Image("resnet", 32, ((1, 1), True, 32)),
    "segformer": zoo._Pixels(
        "segformer",
        32,
        (
            ("depths", (1,) * 4),
            ("hidden_sizes", (8, 8, 16, 16)),
            ("num_attention_heads", (1, 1, 2, 2)),
            ("decoder_hidden_size", 16),
            ("num_labels", 5),
        ),
    ),
}


@pytest.mark.parametrize("name", _SMALL)
def test_small_versions_compute_what_onnxruntime_computes(name, assert_imports_right, operators, monkeypatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setitem(zoo.TORCH_MODELS, "small", _SMALL[name])
    mod = assert_imports_right(zoo._export(*zoo.torch_module("small")))
    _assert_common_form(mod, inputs=1)
    found = operators(mod)
    if name == "resnext":
        groups = [int(b.value.attrs.groups) for b in ir.single_block(mod["main"]) if "conv2d" in str(b.value.op)]
        assert groups.count(32) == 2
    elif name == "segformer":
        assert found.count("nn.softmax") == 4
        assert found.count("image.resize2d") == 4
        assert found.count("concat") == 1
    else:
        assert found.count("nn.softmax") == 2
        assert found.count("nn.layer_norm") == 5


def test_scores_by_distance_become_scores_by_place() -> None:
    torch = pytest.importorskip("torch")
    from rlflow_tvm.frontend.zoo_attention import by_place

    far = torch.arange(2 * 3 * 5 * 9.0).reshape(2, 3, 5, 9)
    moved = by_place(far)
    for i in range(5):
        for j in range(5):
            assert torch.equal(moved[..., i, j], far[..., i, j - i + 4])


def test_a_decoder_sees_what_came_before_and_an_encoder_its_surroundings(monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    for name in ("dalle", "transducer"):
        monkeypatch.setitem(zoo.TORCH_MODELS, "small", _SMALL[name])
        model, example = zoo.torch_module("small")
        (given,) = example.values()
        changed = given.clone()
        changed[:, 6] += 3
        with torch.no_grad():
            moved = (model(changed) - model(given)).abs().amax((0, 2)) > 1e-6
        if name == "dalle":
            assert not moved[:6].any()
            assert moved[6:].all()
        else:  # two layers of three places back and one ahead: what changes at 6 is felt from 4 on
            assert moved.nonzero().flatten().tolist() == list(range(4, 12))
