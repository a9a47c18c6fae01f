"""GRU, LSTM and RNN, unrolled: the outputs that ONNX Runtime gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper
from small_weights import drawn
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
INPUTS, HIDDEN = 5, 4


@pytest.fixture
def model(make_model: Callable[..., onnx.ModelProto]) -> Callable[..., onnx.ModelProto]:
    """A network of one such node: all of its outputs, or those named."""

    def made(
        operator: str,
        direction: str = "forward",
        steps: int = 3,
        batch: int = 2,
        given: str = "B h c",
        outputs: str | None = None,
        lengths: list[int] | None = None,
        **attrs: object,
    ) -> onnx.ModelProto:
        ways, width = 1 + (direction == "bidirectional"), GATES[operator] * HIDDEN
        weights = {"W": drawn(ways, width, INPUTS), "R": drawn(ways, width, HIDDEN, seed=1)}
        weights |= {"B": drawn(ways, 2 * width, seed=2), "P": drawn(ways, 3 * HIDDEN, seed=3)}
        weights["lengths"] = np.array(lengths or [], np.int32)
        states = [name for name in ("h", "c")[: 1 + (operator == "LSTM")] if name in given]
        optional = ["B", "lengths", "h", *(["c", "P"] if operator == "LSTM" else [])]
        told = {*states, *given.split(), *(["lengths"] if lengths else [])}
        names = ["x", "W", "R", *(name if name in told else "" for name in optional)]
        made = (outputs or ("y last cell" if operator == "LSTM" else "y last")).split(" ")
        node = helper.make_node(operator, names, made, name="cells", hidden_size=HIDDEN, direction=direction, **attrs)
        shapes = {"x": (steps, batch, INPUTS)} | dict.fromkeys(states, (ways, batch, HIDDEN))
        return make_model(
            [node], shapes, [name for name in made if name], {n: weights[n] for n in names if n in weights}
        )

    return made


CASES: dict[str, tuple[str, dict]] = {
    f"{operator}-{direction}": (operator, {"direction": direction})
    for operator in GATES
    for direction in ("forward", "reverse", "bidirectional")
} | {
    f"GRU-linear-{direction}": ("GRU", {"direction": direction, "linear_before_reset": 1})
    for direction in ("forward", "bidirectional")
} | {
    **{f"{operator}-bare": (operator, {"direction": "bidirectional", "given": ""}) for operator in GATES},
    "GRU-linear-bare": ("GRU", {"given": "", "linear_before_reset": 1}),
    "GRU-linear-from-zero": ("GRU", {"given": "B", "linear_before_reset": 1}),
    "RNN-one-step": ("RNN", {"steps": 1}),
    "RNN-relu": ("RNN", {"activations": ["Relu"]}),
    "GRU-hard": ("GRU", {"activations": ["HardSigmoid", "Relu"]}),
    "LSTM-hard": (
        "LSTM",
        {
            "direction": "bidirectional",
            "activations": ["HardSigmoid", "Tanh", "Relu"] * 2,
            "activation_alpha": [0.3, 0.25],
            "activation_beta": [0.4, 0.6],
        },
    ),
    "LSTM-peepholes": ("LSTM", {"given": "B h c P", "direction": "reverse"}),
    "LSTM-peepholes-from-zero": ("LSTM", {"given": "P"}),
    "LSTM-last-state": ("LSTM", {"outputs": " last"}),
    "LSTM-whole-lengths": ("LSTM", {"lengths": [3, 3]}),
    "RNN-long": ("RNN", {"steps": 70, "batch": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_right(name: str, model: Callable, assert_imports_right: Callable) -> None:
    operator, options = CASES[name]
    assert_imports_right(model(operator, **options))


def test_what_a_step_needs_no_state_for_is_one_product(model: Callable, operators: Callable) -> None:
    """Of the inputs of all steps; and none with a state of zeros."""
    steps = 6
    assert operators(from_onnx(model("LSTM", steps=steps, given="B"))).count("matmul") == 1 + steps - 1


def test_long_sequences_are_cut_apart_and_put_together_by_the_dozen(model: Callable) -> None:
    """One kernel of some hundred outputs takes half a minute to build."""
    for binding in ir.single_block(from_onnx(model("GRU", steps=200, batch=1))["main"]):
        given = binding.value.args[0] if isinstance(binding.value, relax.Call) else None
        assert not isinstance(given, relax.Tuple) or len(given) <= 32
        assert not isinstance(binding.var.ty, relax.TupleType) or len(binding.var.ty.fields) <= 32


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lengths": [3, 2]}, r"\(operator LSTM\): its input 'sequence_lens' may shorten sequences"),
        ({"activations": ["Softsign", "Tanh", "Tanh"]}, r"\(operator LSTM\): its activation 'softsign' is not supp"),
        ({"clip": 1.0}, r"ignores attribute 'clip' of node 'cells'"),
        ({"input_forget": 1}, r"ignores attribute 'input_forget' of node 'cells'"),
    ],
)
def test_what_is_not_supported_is_told(options: dict, told: str, model: Callable) -> None:
    with pytest.raises(FrontendError, match=told):
        from_onnx(model("LSTM", **options))
