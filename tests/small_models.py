"""Small graphs for the tests of passes, envs and search, written with Relax's own builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.cost import link_library, scratch_folder
from rlflow_tvm.ir import Detached
from rlflow_tvm.passes import CATALOGUE, GraphState, RuleSet

Shape = tuple[int, ...]
Body = Callable[..., relax.Expr | tuple[relax.Expr, ...]]

LANES = 4
"""Vector lanes of the rule sets in these tests: small enough for small channel counts to be blocked."""

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2, "opt-level": 0})
"""A CPU for which LLVM optimises nothing: these tests compile much and run little."""


def machine_of(mod: tvm.IRModule) -> relax.VirtualMachine:
    """`mod` compiled for `TARGET` and linked: what is compiled in place LLVM optimises whatever the target says, which
    takes four times as long."""
    with scratch_folder() as folder:
        path = Path(folder) / "small.so"
        link_library(tvm.compile(mod, TARGET), path)
        return relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())


def module(
    inputs: Mapping[str, Shape], weights: Mapping[str, Shape], body: Body, dtype: str = "float32"
) -> tvm.IRModule:
    """A module in the working form; `body(emit, **variables)` gives the outputs, `emit(call)` a call's variable."""
    params = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in {**inputs, **weights}.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            results = body(builder.emit, **{param.name: param for param in params})
            results = results if isinstance(results, tuple) else (results,)
            outputs = [builder.emit_output(result) for result in results]
        builder.emit_func_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
    mod = builder.get()
    mod["main"] = mod["main"].with_attr("num_input", len(inputs))
    return mod


def matched(mod: tvm.IRModule, *names: str) -> set[str]:
    """Those of the named rules that have a site in `mod`."""
    rules = {rule.name: rule for rule in CATALOGUE}
    state = GraphState.from_module(mod, RuleSet(tuple(rules[name] for name in names), LANES))
    return {name for name in names if state.sites[name]}


def bound(mod: tvm.IRModule, seed: int = 0) -> tvm.IRModule:
    """`mod` with random weights as constants."""
    func = mod["main"]
    rng = np.random.default_rng(seed)
    weights = {
        p.name: tvm.runtime.tensor(rng.standard_normal([int(e) for e in p.ty.shape.values]).astype(str(p.ty.dtype)))
        for p in func.params[int(func.attrs["num_input"]) :]
    }
    return Detached(mod, weights).bind()


def conv_chain() -> tvm.IRModule:
    """conv + bias + relu + conv, all 8 channels."""

    def body(emit, x, w, b, v):
        y = emit(rx.nn.relu(emit(rx.add(emit(rx.nn.conv2d(x, w, padding=1)), b))))
        return rx.nn.conv2d(y, v, padding=1)

    shapes = {"w": (8, 8, 3, 3), "b": (1, 8, 1, 1), "v": (8, 8, 3, 3)}
    return module({"x": (1, 8, 6, 6)}, shapes, body)


def conv_net() -> tvm.IRModule:
    """An image classifier: stem, two parallel convolutions joined, residual block, depthwise layer, pools, dense."""

    def body(emit, image, stem, bias, squeeze, one, three, body1, body2, scale, depth, head, shift):
        def relu(x):
            return emit(rx.nn.relu(x))

        def conv(x, w, **attributes):
            return emit(rx.nn.conv2d(x, w, **attributes))

        x = relu(emit(rx.add(conv(image, stem, padding=1), bias)))
        x = emit(rx.nn.max_pool2d(x, (2, 2), (2, 2)))
        x = relu(conv(x, squeeze))
        x = emit(rx.concat([relu(conv(x, one)), relu(conv(x, three, padding=1))], 1))
        y = conv(relu(emit(rx.multiply(conv(x, body1, padding=1), scale))), body2, padding=1)
        x = relu(emit(rx.add(y, x)))
        x = emit(rx.sigmoid(conv(x, depth, padding=1, groups=16, strides=2)))
        x = emit(rx.nn.avg_pool2d(x, (2, 2), (1, 1)))
        x = emit(rx.reshape(emit(rx.nn.adaptive_avg_pool2d(x, (1, 1))), (1, 16)))
        return rx.add(emit(rx.matmul(x, head)), shift)

    weights = {
        "stem": (8, 3, 3, 3), "bias": (1, 8, 1, 1), "squeeze": (4, 8, 1, 1), "one": (8, 4, 1, 1),
        "three": (8, 4, 3, 3), "body1": (16, 16, 3, 3), "body2": (16, 16, 3, 3), "scale": (1, 16, 1, 1),
        "depth": (16, 1, 3, 3), "head": (16, 10), "shift": (10,),
    }  # fmt: skip
    return module({"image": (1, 3, 12, 12)}, weights, body)


def transformer_block(tokens: int = 6, width: int = 8, heads: int = 2) -> tvm.IRModule:
    """Layer-norm (decomposed), attention with separate q, k and v, GELU (by erf) and two residual sums."""
    per_head = width // heads

    def body(emit, x, **w):
        def norm(y, scale, shift):
            centred = emit(rx.subtract(y, emit(rx.mean(y, [-1], keepdims=True))))
            variance = emit(rx.mean(emit(rx.multiply(centred, centred)), [-1], keepdims=True))
            deviation = emit(rx.sqrt(emit(rx.add(variance, relax.const(1e-5, "float32")))))
            return emit(rx.add(emit(rx.multiply(emit(rx.divide(centred, deviation)), scale)), shift))

        def split_heads(y, axes):
            return emit(rx.permute_dims(emit(rx.reshape(y, (1, tokens, heads, per_head))), axes))

        def dense(y, matrix, shift):
            return emit(rx.add(emit(rx.matmul(y, matrix)), shift))

        y = norm(x, w["s1"], w["t1"])
        q, k, v = (dense(y, w[f"w{n}"], w[f"b{n}"]) for n in "qkv")
        scores = emit(rx.matmul(split_heads(q, (0, 2, 1, 3)), split_heads(k, (0, 2, 3, 1))))
        scores = emit(rx.nn.softmax(emit(rx.divide(scores, w["root"]))))
        mixed = emit(rx.permute_dims(emit(rx.matmul(scores, split_heads(v, (0, 2, 1, 3)))), (0, 2, 1, 3)))
        x = emit(rx.add(dense(emit(rx.reshape(mixed, (1, tokens, width))), w["wo"], w["bo"]), x))
        y = dense(norm(x, w["s2"], w["t2"]), w["w1"], w["b1"])
        gate = emit(rx.add(emit(rx.erf(emit(rx.divide(y, relax.const(2**0.5, "float32"))))), relax.const(1.0)))
        y = emit(rx.multiply(emit(rx.multiply(y, gate)), relax.const(0.5)))
        return rx.add(dense(y, w["w2"], w["b2"]), x)

    square, vector = (width, width), (width,)
    weights = {
        **{f"w{n}": square for n in "qkvo"}, **{f"b{n}": vector for n in "qkvo"}, "root": (1,),
        "s1": vector, "t1": vector, "s2": vector, "t2": vector,
        "w1": (width, 2 * width), "b1": (2 * width,), "w2": (2 * width, width), "b2": vector,
    }  # fmt: skip
    return module({"x": (1, tokens, width)}, weights, body)


def algebra() -> tvm.IRModule:
    """Products, sums, transposes, reshapes, concatenations and splits, with two outputs and a shared subgraph."""

    def body(emit, x, y, a, b, c, s):
        left = emit(rx.matmul(emit(rx.add(x, y)), a))
        right = emit(rx.add(emit(rx.matmul(x, b)), emit(rx.matmul(y, b))))
        both = emit(rx.concat([emit(rx.nn.relu(left)), emit(rx.nn.relu(right))], 1))
        halves = emit(rx.split(both, [3], 1))
        first, second = emit(halves[0]), emit(halves[1])
        turned = emit(rx.permute_dims(emit(rx.tanh(emit(rx.permute_dims(first, (0, 2, 1))))), (0, 2, 1)))
        chain = emit(rx.multiply(emit(rx.matmul(emit(rx.matmul(second, c)), a)), s))
        flat = emit(rx.reshape(emit(rx.reshape(chain, (6, 8))), (2, 3, 8)))
        return rx.subtract(emit(rx.add(turned, flat)), s), rx.permute_dims(emit(rx.matmul(x, a)), (0, 2, 1))

    weights = {"a": (8, 8), "b": (8, 8), "c": (8, 8), "s": (8,)}
    return module({"x": (2, 3, 8), "y": (2, 3, 8)}, weights, body)


MODELS: dict[str, Callable[[], tvm.IRModule]] = {
    "conv_chain": conv_chain,
    "conv_net": conv_net,
    "transformer_block": transformer_block,
    "algebra": algebra,
}


def wasteful(width: int = 8) -> tvm.IRModule:
    """Six operations where two would do: a transposition undone, a product twice, a result that nothing reads."""

    def body(emit, x, w):
        y = emit(rx.permute_dims(emit(rx.permute_dims(x))))
        a, b = emit(rx.matmul(y, w)), emit(rx.matmul(y, w))
        emit(rx.exp(a))
        return rx.add(a, b)

    return module({"x": (4, 6)}, {"w": (6, width)}, body)
