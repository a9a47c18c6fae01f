"""The bundled demonstration model: small, needs onnx alone, and holds what the rewriting rules look for."""

from __future__ import annotations

import onnx

from rlflow_tvm.frontend.net import Net


def demo_model(seed: int) -> onnx.ModelProto:
    """A convolutional classifier of 16 classes for one 32x32 image: input `image` (1, 3, 32, 32), output `logits`.

    A stem, a fire-like pair of parallel convolutions joined by a concatenation, a residual block, a pool between
    them and one dense layer; every convolution has a bias, and all channels but the image's are multiples of 16.
    """
    net = Net(seed)
    x = net.max_pool(net.conv_relu("image", 3, 32, 3))
    x = net.fire(x, 32, 16, 32)
    x = net.residual(x, 64)
    x = net.max_pool(x)
    x = net.fire(x, 64, 32, 32)
    x = net.residual(x, 64)
    net.dense(net.global_average(x), 64, 16, "logits")
    return net.model("demo", {"image": (onnx.TensorProto.FLOAT, (1, 3, 32, 32))}, {"logits": (1, 16)})
