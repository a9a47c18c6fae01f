"""What Relax takes apart is one operator again in the export, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import tvm
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.differences import range_error
from rlflow_tvm.frontend import from_onnx, onnxruntime_outputs, to_onnx
from rlflow_tvm.kernels import as_target
from rlflow_tvm.verify import run_module

Make = Callable[[relax.Var], relax.Expr | tuple[relax.Expr, ...]]
IMAGE = (2, 8, 5, 5)
_RNG = np.random.default_rng(0)


def _number(value: float) -> relax.Constant:
    return relax.const(np.array(value, "float32"))


def _channels(extent: int = 8, offset: float = 0.0) -> relax.Constant:
    return relax.const((_RNG.standard_normal((extent, 1, 1)) + offset).astype("float32"))


def _module(make: Make) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(IMAGE, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = make(x)
            out = builder.emit_output(relax.Tuple(list(made)) if isinstance(made, tuple) else made)
        builder.emit_func_output(out)
    return relax.transform.Normalize()(builder.get())


def _exported(make: Make) -> onnx.ModelProto:
    """The export: by ONNX Runtime, and imported again, it computes what the module does."""
    mod = _module(make)
    model = to_onnx(mod)
    image = 3 * _RNG.standard_normal(IMAGE).astype("float32")
    wanted = run_module(mod, as_target("llvm"), [image])
    for found in (onnxruntime_outputs(model, {"x": image}), run_module(from_onnx(model), as_target("llvm"), [image])):
        assert range_error(found, wanted) < 1e-5
    return model


def _operators(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def _clip(x: relax.Expr, high: float = 6) -> relax.Expr:
    return rx.clip(x, 0, high)


def _averaged(x: relax.Expr, size: int, **attrs) -> relax.Expr:
    square = rx.expand_dims(rx.multiply(x, x), 1)
    attrs = {"padding": [size // 2, 0, 0] * 2, "count_include_pad": True, **attrs}
    pool = rx.nn.avg_pool3d(square, (size, 1, 1), **attrs)
    return rx.squeeze(pool, 1)


def _response(x: relax.Expr, mean: relax.Expr) -> relax.Expr:
    return rx.divide(x, rx.power(rx.add(rx.multiply(mean, _number(0.1)), _number(2)), _number(0.75)))


def _scaled(x: relax.Expr) -> relax.Expr:
    return rx.add(rx.multiply(x, _channels(offset=2)), _channels())


def _conv(x: relax.Expr, kernel: relax.Expr) -> relax.Expr:
    return rx.nn.conv2d(x, kernel, padding=1)


KERNEL = relax.const(_RNG.standard_normal((8, 8, 3, 3)).astype("float32"))


@pytest.mark.parametrize(
    ("make", "operators"),
    [
        (lambda x: _clip(rx.add(rx.multiply(x, _number(0.2)), _number(0.5)), 1), ["HardSigmoid"]),
        (lambda x: rx.divide(_clip(rx.add(_number(3), x)), _number(6)), ["HardSigmoid"]),
        (lambda x: rx.multiply(x, rx.divide(_clip(rx.add(x, _number(3))), _number(6))), ["HardSwish"]),
        (lambda x: rx.divide(rx.multiply(_clip(rx.add(x, _number(3))), x), _number(6)), ["HardSwish"]),
        (lambda x: rx.multiply(rx.multiply(x, _number(1 / 6)), _clip(rx.add(x, _number(3)))), ["HardSwish"]),
        (lambda x: _response(x, _averaged(x, 3)), ["LRN"]),
        (lambda x: rx.mean(x, [2, 3], keepdims=True), ["GlobalAveragePool"]),
        (lambda x: rx.mean(x, [-1, 2]), ["GlobalAveragePool", "Reshape"]),
        (lambda x: _scaled(rx.nn.relu(x)), ["Relu", "BatchNormalization"]),
        (lambda x: rx.add(_conv(x, KERNEL), _channels()), ["Conv"]),
        (lambda x: _scaled(_scaled(_conv(x, KERNEL))), ["Conv"]),
        (lambda x: _clip(x), ["Clip"]),
        (lambda x: rx.minimum(rx.nn.relu(x), _number(6)), ["Clip"]),
        (lambda x: rx.maximum(_number(-1), rx.minimum(x, _number(0.5))), ["Clip"]),
        (lambda x: rx.multiply(x, _channels()), ["Mul"]),
        (lambda x: rx.minimum(rx.maximum(x, _number(1)), _number(0.5)), ["Max", "Min"]),
        (lambda x: rx.minimum(rx.nn.relu(x), x), ["Relu", "Min"]),
        (lambda x: rx.add(rx.multiply(x, _number(2)), _number(3)), ["Mul", "Add"]),
        (lambda x: _clip(rx.add(x, _number(3)), 5.5), ["Add", "Clip"]),
        (lambda x: rx.multiply(x, rx.divide(_clip(rx.add(x, _number(2))), _number(6))), ["HardSigmoid", "Mul"]),
        (lambda x: rx.divide(_clip(rx.add(x, _number(3))), _number(-6)), ["Add", "Clip", "Div"]),
        (lambda x: rx.mean(x, [1, 2], keepdims=True), ["ReduceMean"]),
        (lambda x: rx.mean(x, [3]), ["ReduceMean"]),
    ],
)
def test_which_operators_stand_for_it(make: Make, operators: list[str]) -> None:
    assert _operators(_exported(make)) == operators


@pytest.mark.parametrize(
    "make",
    [
        lambda x: _response(x, _averaged(x, 3, strides=(1, 5, 5))),
        lambda x: _response(rx.nn.relu(x), _averaged(rx.tanh(x), 3)),
        lambda x: _response(x, _averaged(x, 3, count_include_pad=False)),
        lambda x: _response(_conv(x, KERNEL), _averaged(rx.nn.relu(x), 5)),
    ],
)
def test_what_resembles_a_response_norm_is_none(make: Make) -> None:
    assert "LRN" not in _operators(_exported(make))


def test_rows_have_no_response_norm() -> None:
    """Runtimes have it for batches of images only."""

    def make(x: relax.Var) -> relax.Expr:
        rows = rx.reshape(x, (2, 8, 25))
        square = rx.expand_dims(rx.multiply(rows, rows), 1)
        pool = rx.nn.avg_pool2d(square, (3, 1), padding=[1, 0] * 2, count_include_pad=True)
        return _response(rows, rx.squeeze(pool, 1))

    assert "LRN" not in _operators(_exported(make))


def test_parts_that_are_read_stay() -> None:
    def make(x: relax.Var) -> tuple[relax.Expr, ...]:
        gate = rx.divide(_clip(rx.add(x, _number(3))), _number(6))
        return rx.multiply(x, gate), gate

    assert sorted(_operators(_exported(make))) == ["HardSigmoid", "HardSwish"]


def test_kernels_that_convolutions_share_are_kept_once() -> None:
    def make(x: relax.Var) -> relax.Expr:
        return rx.nn.relu(rx.add(_conv(rx.nn.relu(rx.add(_conv(x, KERNEL), _channels())), KERNEL), _channels()))

    model = _exported(make)
    assert _operators(model) == ["Conv", "Relu"] * 2
    assert len([w for w in model.graph.initializer if len(w.dims) == 4]) == 1


def test_a_convolution_that_others_read_keeps_its_value() -> None:
    def make(x: relax.Var) -> relax.Expr:
        conv = _conv(x, KERNEL)
        return rx.multiply(rx.add(conv, _channels()), rx.tanh(conv))

    assert sorted(_operators(_exported(make))) == ["Add", "Conv", "Mul", "Tanh"]


def test_other_types_stay_in_parts() -> None:
    def make(x: relax.Var) -> relax.Expr:
        wide = rx.astype(x, "float64")
        three, six = (relax.const(np.array(value, "float64"), "float64") for value in (3, 6))
        return rx.multiply(wide, rx.divide(_clip(rx.add(wide, three)), six))

    assert _operators(_exported(make)) == ["Cast", "Add", "Clip", "Div", "Mul"]
