"""Calls of every Relax operator that has an exporter, at the attribute values where ONNX and Relax may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op as rx

_RNG = np.random.default_rng(0)
SIGNED = np.array([-7, -6, -1, 0, 1, 5, 6, 7], np.int32)
DIVISORS = np.array([2, -4, 3, 5, -3, -2, 4, 3], np.int32)
HALVES = np.array([-2.5, -1.5, -0.5, -0.2, 0.5, 1.5, 2.5, 3.2], np.float32)
POSITIVE = np.linspace(0.3, 3, 24, dtype=np.float32).reshape(2, 3, 4)
UNIT = np.linspace(-0.9, 0.9, 24, dtype=np.float32).reshape(2, 3, 4)
ODD = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0], np.float32)
BITS = np.array([1, 5, 12, 255], np.uint8)
FLAGS = np.array([True, False, True, False])


def floats(*shape: int, dtype: str = "float32") -> np.ndarray:
    return _RNG.standard_normal(shape).astype(dtype)


def const(value: object, dtype: str = "float32") -> relax.Expr:
    return relax.const(np.asarray(value, dtype), dtype)


@dataclass(frozen=True)
class Case:
    """A function of some arrays. `name` is the operator's, with what is special behind a colon."""

    name: str
    arrays: tuple[np.ndarray, ...]
    body: Callable[..., relax.Expr]

    @property
    def operator(self) -> str:
        return f"relax.{self.name.partition(':')[0]}"

    def module(self) -> tvm.IRModule:
        params = [
            relax.Var(f"x{i}", relax.TensorType(array.shape, str(array.dtype))) for i, array in enumerate(self.arrays)
        ]
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            with builder.dataflow():
                output = builder.emit_output(self.body(*params))
            builder.emit_func_output(output)
        return builder.get()


def _unary() -> list[Case]:
    found = [Case(name, (POSITIVE,), getattr(rx, name)) for name in ("log", "rsqrt", "sqrt")]
    found += [Case(name, (UNIT,), getattr(rx, name)) for name in ("acos", "asin", "atanh")]
    found.append(Case("acosh", (POSITIVE + 1,), rx.acosh))
    found += [
        Case(name, (floats(2, 3, 4),), getattr(rx, name))
        for name in (
            "abs", "asinh", "atan", "cos", "erf", "exp", "negative", "sigmoid", "sin", "square", "tan", "tanh",
        )
    ]  # fmt: skip
    # LLVM has no sinh and cosh: the importer writes them otherwise, and nothing else makes them
    found += [
        Case(f"nn.{name}", (3 * floats(2, 3, 4),), getattr(rx.nn, name))
        for name in ("relu", "gelu", "gelu_tanh", "silu", "selu")
    ]
    found += [Case(name, (HALVES,), getattr(rx, name)) for name in ("ceil", "floor", "round", "sign", "trunc")]
    found += [Case(name, (ODD,), getattr(rx, name)) for name in ("isfinite", "isinf", "isnan")]
    return found


def _binary() -> list[Case]:
    floating = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "floor_divide", "floor_mod", "mod")
    compared = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    found = [Case(name, (floats(2, 3), floats(3)), getattr(rx, name)) for name in floating]
    found += [Case(f"{name}:int", (SIGNED, DIVISORS), getattr(rx, name)) for name in floating]
    found += [Case(name, (SIGNED, DIVISORS), getattr(rx, name)) for name in compared]
    found.append(Case("power", (POSITIVE, UNIT), rx.power))
    found += [
        Case(f"logical_{n}", (FLAGS, FLAGS[::-1].copy()), getattr(rx, f"logical_{n}")) for n in ("and", "or", "xor")
    ]
    found += [
        Case(f"bitwise_{n}", (BITS, BITS[::-1].copy()), getattr(rx, f"bitwise_{n}")) for n in ("and", "or", "xor")
    ]
    found += [Case(f"{n}_shift", (BITS, BITS % 4), getattr(rx, f"{n}_shift")) for n in ("left", "right")]
    return found


def _elementwise() -> list[Case]:
    x = floats(2, 3, 4)
    return [
        Case("logical_not", (FLAGS,), rx.logical_not),
        Case("bitwise_not", (BITS,), rx.bitwise_not),
        Case("where", (FLAGS, floats(3, 4), floats(4)), rx.where),
        Case("astype:truncated", (HALVES,), lambda x: rx.astype(x, "int32")),
        Case("astype:bool", (HALVES,), lambda x: rx.astype(x, "bool")),
        Case("astype:half", (x,), lambda x: rx.astype(x, "float16")),
        Case("astype:double", (x,), lambda x: rx.astype(x, "float64")),
        Case(
            "quantize",
            (HALVES, np.array(0.5, np.float32), np.array(3, np.uint8)),
            lambda x, s, z: rx.quantize(x, s, z, 0, "uint8"),
        ),
        Case(
            "quantize:halves",
            (HALVES, np.ones(1, np.float32), np.array(-3, np.int8)),
            lambda x, s, z: rx.quantize(x, s, z, 0, "int8"),
        ),
        Case(
            "quantize:by_channel",
            (x, np.array([0.1, 0.01, 1e-3], np.float32), np.array([-3, 0, 5], np.int8)),
            lambda x, s, z: rx.quantize(x, s, z, 1, "int8"),
        ),
        Case(
            "dequantize",
            (SIGNED.astype(np.int8), np.array(0.5, np.float32), np.array(3, np.int8)),
            lambda x, s, z: rx.dequantize(x, s, z, 0, "float32"),
        ),
        Case(
            "dequantize:by_channel",
            (BITS.astype(np.uint8), 1 + floats(BITS.shape[-1]), np.array(3, np.uint8)),
            lambda x, s, z: rx.dequantize(x, s, z, -1, "float32"),
        ),
        Case("clip", (HALVES,), lambda x: rx.clip(x, -1.0, 2.0)),
        Case("clip:int", (SIGNED,), lambda x: rx.clip(x, -2, 5)),
        Case("clip:below", (HALVES,), lambda x: rx.clip(x, -np.inf, 2.0)),
        Case("clip:above", (HALVES,), lambda x: rx.clip(x, -1.0, np.inf)),
        Case("clip:to_infinity", (HALVES,), lambda x: rx.clip(x, np.inf, np.inf)),
        Case("clip:to_minus_infinity", (HALVES,), lambda x: rx.clip(x, -np.inf, -np.inf)),
        Case("nn.leakyrelu", (x,), lambda x: rx.nn.leakyrelu(x, 0.2)),
        Case("nn.prelu", (x, floats(3)), lambda x, s: rx.nn.prelu(x, s, 1)),
        Case("nn.prelu:last", (x, floats(4)), lambda x, s: rx.nn.prelu(x, s, -1)),
        Case("nn.softplus", (30 * x,), rx.nn.softplus),
        Case("nn.softplus:beta", (30 * x,), lambda x: rx.nn.softplus(x, 2.0, 20.0)),
        Case("nn.softplus:low", (3 * x,), lambda x: rx.nn.softplus(x, 1.0, 1.0)),
        Case("nn.softplus:low_beta", (3 * x,), lambda x: rx.nn.softplus(x, 0.5, -0.5)),
        Case("nn.dropout", (x,), rx.nn.dropout),
    ]


def _shapes() -> list[Case]:
    x, images = floats(2, 3, 4), floats(1, 8, 3, 5)
    places = np.array([2, 0, 3], np.int64)
    return [
        Case("reshape", (x,), lambda x: rx.reshape(x, (4, 6))),
        Case("flatten", (x,), rx.flatten),
        Case("nn.batch_flatten", (x,), rx.nn.batch_flatten),
        Case("permute_dims", (x,), rx.permute_dims),
        Case("permute_dims:negative", (x,), lambda x: rx.permute_dims(x, (-1, 0, 1))),
        Case("expand_dims", (x,), lambda x: rx.expand_dims(x, (0, -2))),
        Case("squeeze", (floats(1, 3, 1, 2),), rx.squeeze),
        Case("squeeze:axis", (floats(1, 3, 1, 2),), lambda x: rx.squeeze(x, -2)),
        Case("broadcast_to", (floats(3, 1),), lambda x: rx.broadcast_to(x, (2, 3, 4))),
        Case("concat", (x, floats(2, 1, 4)), lambda a, b: rx.concat([a, b], -2)),
        Case("stack", (x, x + 1), lambda a, b: rx.stack([a, b], -1)),
        Case("split", (x,), lambda x: rx.split(x, [1, 3], -1)),
        Case("split:sections", (floats(2, 7),), lambda x: rx.split(x, 3, 1)),
        Case("tile", (x,), lambda x: rx.tile(x, (2, 1, 1, 3))),
        Case("tile:last", (x,), lambda x: rx.tile(x, (2,))),
        Case("repeat", (x,), lambda x: rx.repeat(x, 2, 1)),
        Case("repeat:flat", (x,), lambda x: rx.repeat(x, 2)),
        Case("flip", (x,), lambda x: rx.flip(x, -1)),
        Case("strided_slice", (x,), lambda x: rx.strided_slice(x, [1, 2], [1, 0], [3, 3], [1, 2])),
        Case("strided_slice:backwards", (x,), lambda x: rx.strided_slice(x, [2], [3], [-5], [-1])),
        Case("strided_slice:from_end", (x,), lambda x: rx.strided_slice(x, [2, 0], [-3, 0], [-1, 99])),
        Case("take:wrap", (x, np.array([[-1, 0], [3, -4]], np.int64)), lambda x, i: rx.take(x, i, 2, mode="wrap")),
        Case("take:clip", (x, np.array([-9, 1, 9], np.int32)), lambda x, i: rx.take(x, i, 1, mode="clip")),
        Case("take:flat", (floats(6), np.array(4, np.int64)), lambda x, i: rx.take(x, i)),
        Case("gather_elements", (x, np.zeros((2, 2, 4), np.int64) + 1), lambda x, i: rx.gather_elements(x, i, 1)),
        Case("gather_nd", (x, np.array([[0, 2], [1, 1]], np.int64)), rx.gather_nd),
        Case("gather_nd:batch", (x, np.array([[2, 1], [0, 3]], np.int64)), lambda x, i: rx.gather_nd(x, i, 1)),
        *(
            Case(
                f"scatter_elements:{how}",
                (floats(5), places, floats(3)),
                lambda x, i, u, how=how: rx.scatter_elements(x, i, u, 0, how),
            )
            for how in ("update", "add", "mul", "min", "max")
        ),
        Case("scatter_nd", (x, np.array([[1], [0]], np.int64), floats(2, 3, 4)), rx.scatter_nd),
        Case("scatter_nd:add", (x, np.array([[1], [1]], np.int64), floats(2, 3, 4)),
             lambda x, i, u: rx.scatter_nd(x, i, u, "add")),
        Case("one_hot", (np.array([[1, 9], [-1, 2]], np.int64),),
             lambda i: rx.one_hot(i, tvm.tirx.const(2.0, "float32"), tvm.tirx.const(-1.0, "float32"), 3, 1)),
        Case("one_hot:narrow", (np.array([0, -100, 5], np.int8),),
             lambda i: rx.one_hot(i, tvm.tirx.const(2.0, "float32"), tvm.tirx.const(-1.0, "float32"), 300, 0)),
        Case("add:number", (floats(3, 4),), lambda x: rx.add(x, tvm.tirx.const(0.5, "float32"))),
        Case("nn.pad", (x,), lambda x: rx.nn.pad(x, (0, 1, 2, 0, 0, 3), pad_value=1.5)),
        Case("nn.pad:reflect", (images,), lambda x: rx.nn.pad(x, (0, 0, 0, 0, 1, 2, 2, 1), "reflect")),
        Case("nn.pad:edge", (images,), lambda x: rx.nn.pad(x, (0, 0, 0, 0, 1, 2, 2, 1), "replicate")),
        Case("layout_transform", (images,),
             lambda x: rx.layout_transform(x, lambda n, c, h, w: (n, c // 4, h, w, c % 4))),
        Case("layout_transform:back", (floats(1, 2, 3, 5, 4),),
             lambda x: rx.layout_transform(x, lambda n, c, h, w, b: (n, c * 4 + b, h, w))),
        Case("layout_transform:sixteen", (floats(16, 2, 3, 1),),
             lambda x: rx.layout_transform(x, lambda o, i, h, w: (o // 16, i, h, w, o % 16))),
        Case("layout_transform:one", (images,),
             lambda x: rx.layout_transform(x, lambda n, c, h, w: (n, c // 1, h, w, c % 1))),
        Case("layout_transform:one_back", (floats(1, 2, 3, 5, 1),),
             lambda x: rx.layout_transform(x, lambda n, c, h, w, b: (n, c * 1 + b, h, w))),
        Case("layout_transform:last", (images,), lambda x: rx.layout_transform(x, lambda n, c, h, w: (n, h, w, c))),
        Case("full", (floats(1),), lambda x: rx.add(x, rx.full((2, 3), const(2.5), "float32"))),
        Case("full:cast", (floats(1),), lambda x: rx.add(x, rx.full((2, 3), const(2, "int32"), "float32"))),
        Case("full_like", (x,), lambda x: rx.full_like(x, const(3.0))),
        Case("zeros", (floats(1),), lambda x: rx.add(x, rx.zeros((2, 3), "float32"))),
        Case("ones", (floats(1),), lambda x: rx.add(x, rx.ones((2, 3), "float32"))),
        Case("zeros_like", (x,), rx.zeros_like),
        Case("ones_like", (x,), lambda x: rx.ones_like(x, "int64")),
        Case("arange", (floats(1),), lambda x: rx.add(x, rx.arange(1, 8, 2, "float32"))),
        Case("eye", (floats(1),), lambda x: rx.add(x, rx.eye(3, 4, 1, "float32"))),
        Case("eye_like", (floats(3, 4),), lambda x: rx.eye_like(x, -1)),
        Case("tril", (x,), lambda x: rx.tril(x, 1)),
        Case("triu", (x,), lambda x: rx.triu(x, -1)),
        Case("reverse_sequence", (floats(4, 3), np.array([1, 4, 2], np.int64)),
             lambda x, n: rx.reverse_sequence(x, n, 0, 1)),
    ]  # fmt: skip


def _across() -> list[Case]:
    x, image = floats(2, 3, 4), floats(2, 6, 3, 3)
    reduced = ("sum", "mean", "max", "min", "prod", "variance", "std")
    tied = np.array([[1, 3, 3, 0], [2, 2, -1, 2]], np.float32)
    vector = floats(6)
    return [
        *(Case(name, (x,), lambda x, name=name: getattr(rx, name)(x, [0, -1])) for name in reduced),
        *(Case(f"{name}:all", (x,), lambda x, name=name: getattr(rx, name)(x, keepdims=True)) for name in reduced),
        *(Case(f"{name}:int", (SIGNED.reshape(2, 4),), lambda x, name=name: getattr(rx, name)(x, 1))
          for name in ("sum", "max", "min", "prod")),
        *(Case(name, (tied,), lambda x, name=name: getattr(rx, name)(x, 1)) for name in ("argmax", "argmin")),
        *(Case(f"{name}:all", (tied,), lambda x, name=name: getattr(rx, name)(x, keepdims=True))
          for name in ("argmax", "argmin")),
        Case("cumsum", (x,), lambda x: rx.cumsum(x, -2)),
        Case("cumsum:flat", (x,), rx.cumsum),
        Case("cumsum:exclusive", (SIGNED,), lambda x: rx.cumsum(x, 0, "int64", exclusive=True)),
        Case("matmul", (floats(2, 3, 4), floats(4, 5)), rx.matmul),
        Case("matmul:vector", (floats(4), floats(2, 4, 3)), rx.matmul),
        Case("matmul:int", (SIGNED.reshape(2, 4), DIVISORS.reshape(4, 2)), rx.matmul),
        Case("matmul:narrow", (BITS.astype("int8").reshape(2, 2), BITS.astype("int8").reshape(2, 2)), rx.matmul),
        Case("matmul:wide", (BITS.astype("int8").reshape(2, 2), BITS.astype("int8").reshape(2, 2)),
             lambda a, b: rx.matmul(a, b, "int32")),
        Case("matmul:half", (floats(2, 4, dtype="float16"), floats(4, 2, dtype="float16")),
             lambda a, b: rx.matmul(a, b, "float32")),
        Case("einsum", (floats(2, 3, 4), floats(5, 4)), lambda a, b: rx.einsum([a, b], "nij,kj->nki")),
        Case("nn.softmax", (x,), lambda x: rx.nn.softmax(x, 1)),
        Case("nn.log_softmax", (x,), lambda x: rx.nn.log_softmax(x, -1)),
        Case("nn.layer_norm", (image, floats(3, 3), floats(3, 3)),
             lambda x, g, b: rx.nn.layer_norm(x, g, b, [-2, -1], 0.1)),
        Case("nn.layer_norm:inner", (x, floats(3), floats(3)), lambda x, g, b: rx.nn.layer_norm(x, g, b, 1)),
        Case("nn.layer_norm:no_scale", (x, floats(4), floats(4)),
             lambda x, g, b: rx.nn.layer_norm(x, g, b, -1, center=False, scale=False)),
        Case("nn.rms_norm", (x, floats(4)), lambda x, g: rx.nn.rms_norm(x, g, -1, 0.1)),
        Case("nn.group_norm", (image, vector, vector + 1),
             lambda x, g, b: rx.nn.group_norm(x, g, b, 3, 1, [2, 3], 0.1)),
        Case("nn.group_norm:no_scale", (image, vector, vector + 1),
             lambda x, g, b: rx.nn.group_norm(x, g, b, 3, 1, [2, 3], 0.1, center=False, scale=False)),
        Case("nn.instance_norm", (image, vector, vector + 1),
             lambda x, g, b: rx.nn.instance_norm(x, g, b, 1, [2, 3], 0.1)),
        Case("nn.batch_norm", (image, vector, vector + 1, vector - 1, abs(vector) + 1),
             lambda *args: rx.nn.batch_norm(*args, axis=1, training=False)),
        Case("nn.batch_norm:last", (np.moveaxis(image, 1, -1).copy(), vector, vector + 1, vector - 1, abs(vector) + 1),
             lambda *args: rx.nn.batch_norm(*args, axis=-1, epsilon=0.1, training=False)),
        Case("topk", (x,), lambda x: rx.topk(x, 2, 1)),
        Case("topk:all", (x,), lambda x: rx.topk(x, 0, 1)),
        Case("topk:least", (x,), lambda x: rx.topk(x, 3, -1, "indices", largest=False, dtype="int64")),
        Case("sort", (x,), lambda x: rx.sort(x, -1)),
        Case("argsort", (x,), lambda x: rx.argsort(x, 1, descending=True)),
    ]  # fmt: skip


def _windows() -> list[Case]:
    image, nhwc, blocked = floats(1, 8, 7, 6), floats(1, 7, 6, 8), floats(1, 2, 7, 6, 4)
    row, cube, halved = floats(1, 4, 9), floats(1, 2, 4, 5, 6), floats(1, 2, 4, 6)
    pool = dict(strides=(2, 2), padding=(1, 1, 1, 1))
    conv, maxima, means = rx.nn.conv2d, rx.nn.max_pool2d, rx.nn.avg_pool2d
    return [
        Case("nn.conv2d", (image, floats(6, 4, 3, 2)),
             lambda x, w: conv(x, w, (2, 1), (1, 0, 2, 1), (1, 2), 2)),
        Case("nn.conv2d:depthwise", (image, floats(8, 1, 3, 3)), lambda x, w: conv(x, w, padding=1, groups=8)),
        Case("nn.conv2d:nhwc", (nhwc, floats(3, 3, 8, 4)),
             lambda x, w: conv(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO")),
        Case("nn.conv2d:blocked", (blocked, floats(2, 8, 3, 3, 8)),
             lambda x, w: conv(x, w, padding=1, data_layout="NCHW4c", kernel_layout="OIHW8o", out_layout="NCHW8c")),
        Case("nn.conv2d:half", (image.astype("float16"), floats(3, 8, 1, 1, dtype="float16")),
             lambda x, w: conv(x, w, out_dtype="float32")),
        Case("nn.conv1d", (row, floats(3, 4, 3)), lambda x, w: rx.nn.conv1d(x, w, 2, (1, 0))),
        Case("nn.conv3d", (cube, floats(3, 2, 2, 3, 2)), lambda x, w: rx.nn.conv3d(x, w, padding=(1, 0, 1, 0, 1, 0))),
        Case("nn.conv1d_transpose", (row, floats(4, 3, 3)), lambda x, w: rx.nn.conv1d_transpose(x, w, 2, 1, 1)),
        Case("nn.conv2d_transpose", (image, floats(8, 2, 3, 3)),
             lambda x, w: rx.nn.conv2d_transpose(x, w, (2, 2), (1, 0, 1, 1), (1, 0), groups=2)),
        Case("nn.conv3d_transpose", (cube, floats(2, 3, 2, 2, 3)), lambda x, w: rx.nn.conv3d_transpose(x, w, 2)),
        Case("nn.max_pool2d", (image,), lambda x: maxima(x, (3, 2), dilation=(2, 1), **pool)),
        Case("nn.max_pool2d:ceil", (image - 9,), lambda x: maxima(x, (2, 3), (3, 2), ceil_mode=True)),
        Case("nn.max_pool2d:wide", (image - 9,), lambda x: maxima(x, (2, 2), (2, 2), padding=(2, 2, 1, 1))),
        Case("nn.max_pool2d:blocked", (blocked,), lambda x: maxima(x, (2, 2), layout="NCHW4c", out_layout="NCHW4c")),
        Case("nn.max_pool2d:nhwc", (nhwc,), lambda x: maxima(x, (2, 2), layout="NHWC")),
        Case("nn.avg_pool2d", (image,), lambda x: means(x, (3, 3), **pool)),
        Case("nn.avg_pool2d:ceil", (image,), lambda x: means(x, (3, 3), ceil_mode=True, **pool)),
        Case("nn.avg_pool2d:padding", (image,), lambda x: means(x, (3, 2), count_include_pad=True, **pool)),
        Case("nn.avg_pool2d:padding_ceil", (image,),
             lambda x: means(x, (3, 3), (3, 3), padding=(1, 1, 0, 0), ceil_mode=True, count_include_pad=True)),
        Case("nn.avg_pool2d:wide", (image,), lambda x: means(x, (2, 2), padding=(2, 1, 2, 1), count_include_pad=True)),
        Case("nn.avg_pool2d:dilated", (image,), lambda x: means(x, (2, 3), dilation=(2, 1), **pool)),
        Case("nn.max_pool1d", (row,), lambda x: rx.nn.max_pool1d(x, 3, 2, 1)),
        Case("nn.max_pool3d", (cube,), lambda x: rx.nn.max_pool3d(x, 2, 2, padding=1)),
        Case("nn.avg_pool1d", (row,), lambda x: rx.nn.avg_pool1d(x, 3, 2, 1)),
        Case("nn.avg_pool3d", (cube,), lambda x: rx.nn.avg_pool3d(x, 2, 2, padding=1)),
        Case("nn.adaptive_avg_pool2d", (image,), lambda x: rx.nn.adaptive_avg_pool2d(x, (1, 1))),
        Case("nn.adaptive_avg_pool2d:uneven", (image,), lambda x: rx.nn.adaptive_avg_pool2d(x, (3, 4))),
        Case("nn.adaptive_avg_pool2d:blocked", (blocked,),
             lambda x: rx.nn.adaptive_avg_pool2d(x, (2, 6), "NCHW4c")),
        Case("nn.adaptive_avg_pool1d", (row,), lambda x: rx.nn.adaptive_avg_pool1d(x, 4)),
        Case("nn.adaptive_avg_pool3d", (cube,), lambda x: rx.nn.adaptive_avg_pool3d(x, (2, 3, 1))),
        *(
            Case(f"image.resize2d:{method}:{coordinates}", (image,),
                 lambda x, m=method, c=coordinates: rx.image.resize2d(
                     x, (9, 13), method=m, coordinate_transformation_mode=c, rounding_method="round_prefer_floor",
                     cubic_alpha=-0.75))
            for method in ("nearest_neighbor", "linear", "cubic")
            for coordinates in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
        ),
        *(
            Case(f"image.resize2d:{rounding}", (image,),
                 lambda x, r=rounding: rx.image.resize2d(
                     x, (14, 4), method="nearest_neighbor", coordinate_transformation_mode="half_pixel",
                     rounding_method=r))
            for rounding in ("round", "floor", "ceil", "round_prefer_ceil")
        ),
        *(
            Case(f"image.resize2d:halves:{coordinates}:{rounding}:{'x'.join(map(str, size))}", (halved,),
                 lambda x, s=size, c=coordinates, r=rounding: rx.image.resize2d(
                     x, s, method="nearest_neighbor", coordinate_transformation_mode=c, rounding_method=r))
            for size, coordinates, rounding in (
                ((2, 3), "half_pixel", "round"), ((6, 9), "half_pixel", "round"), ((4, 1), "half_pixel", "round"),
                ((8, 12), "asymmetric", "round"), ((12, 18), "asymmetric", ""), ((7, 11), "align_corners", ""),
                ((8, 1), "pytorch_half_pixel", "round"), ((5, 7), "half_pixel", "round"),
            )
        ),
        Case("image.resize3d:halves", (cube,),
             lambda x: rx.image.resize3d(x, (8, 10, 3), layout="NCDHW", method="nearest_neighbor",
                                         coordinate_transformation_mode="asymmetric")),
        Case("image.resize2d:nhwc", (nhwc,), lambda x: rx.image.resize2d(x, (3, 9), layout="NHWC")),
        Case("image.resize2d:blocked", (blocked,), lambda x: rx.image.resize2d(x, (3, 9), layout="NCHW4c")),
        Case("image.resize3d", (cube,), lambda x: rx.image.resize3d(x, (6, 7, 3), layout="NCDHW")),
        Case("image.grid_sample", (image, floats(1, 2, 3, 4)), rx.image.grid_sample),
        Case("image.grid_sample:nearest", (image, floats(1, 2, 3, 4)),
             lambda x, g: rx.image.grid_sample(x, g, "nearest", padding_mode="border", align_corners=True)),
        Case("image.affine_grid", (floats(2, 2, 3),), lambda x: rx.image.affine_grid(x, (3, 4))),
        Case("image.affine_grid:edges", (floats(2, 2, 3),), lambda x: rx.image.affine_grid(x, (3, 4), False)),
        *(
            Case(f"vision.roi_align:{aligned}", (image, np.array([[0, 0.5, 1, 4, 5.5], [0, 1, 0, 5, 3]], np.float32)),
                 lambda x, r, a=aligned: rx.vision.roi_align(x, r, (2, 3), 0.8, 2, aligned=a))
            for aligned in (True, False)
        ),
        Case("vision.roi_pool", (image, np.array([[0, 0, 1, 4, 5], [0, 1, 0, 5, 3]], np.float32)),
             lambda x, r: rx.vision.roi_pool(x, r, (2, 2), 1.0)),
    ]  # fmt: skip


CASES = [*_unary(), *_binary(), *_elementwise(), *_shapes(), *_across(), *_windows()]
