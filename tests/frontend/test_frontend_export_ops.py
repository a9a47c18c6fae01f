"""Operators written as ONNX: each with its attributes, and each rule's right side, computes there what TVM computes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from export_cases import CASES, Case, floats
from small_models import TARGET, bound, module
from tvm import relax
from tvm.relax import op as rx
from tvm.relax.frontend.onnx import onnx_frontend

import rlflow_tvm.frontend
from rlflow_tvm import ir
from rlflow_tvm.errors import FrontendError
from rlflow_tvm.float_check import Pair, outputs, pairs
from rlflow_tvm.frontend import onnxruntime_outputs, to_onnx
from rlflow_tvm.frontend.export import EXPORTERS
from rlflow_tvm.kernels import default_target, vector_lanes
from rlflow_tvm.passes import CATALOGUE
from rlflow_tvm.passes.ops import CLASSES, OPERATORS
from rlflow_tvm.passes.term import Apply, Item, Term
from rlflow_tvm.verify import run_module

_BY_NAME = {case.name: case for case in CASES}
_NO_KERNEL = {"relax.sinh": np.sinh, "relax.cosh": np.cosh}
"""TVM compiles them to nothing on a CPU: held against numpy."""

_NEVER_LEFT = {
    # of data-dependent shape, which the import refuses
    "dynamic_strided_slice", "nonzero", "unique", "vision.all_class_non_max_suppression",
    # evaluated by the import, which knows all shapes
    "shape_of", "shape_to_tensor", "size", "tensor_to_shape",
    # Attention is inlined by the import
    "nn.attention",
}  # fmt: skip
"""Operators in the source of the importers that no imported module holds, or none that is optimised."""


def _same(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        )


@pytest.fixture(scope="module")
def computed() -> dict[str, list[np.ndarray]]:
    """What TVM makes of all cases, compiled as one module."""
    cases = [case for case in CASES if case.operator not in _NO_KERNEL]
    found = outputs([case.module()["main"] for case in cases], [case.arrays for case in cases], TARGET)
    return dict(zip((case.name for case in cases), found, strict=True))


def _run(model: onnx.ModelProto, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return onnxruntime_outputs(model, {f"x{i}": array for i, array in enumerate(arrays)})


@pytest.mark.parametrize("name", _BY_NAME)
def test_operator_computes_what_tvm_computes(name: str, computed) -> None:
    case = _BY_NAME[name]
    found = _run(to_onnx(case.module()), case.arrays)
    if name == "nn.max_pool2d:wide" and vector_lanes(default_target()) < 16:  # ONNX Runtime's maximum of nothing there
        found = [np.where(each == np.finfo("float32").min, -np.inf, each) for each in found]
    _same(found, computed[name])


_NEWER = sorted(
    name for name in _BY_NAME if re.search("gelu|norm|avg_pool2d|grid_sample|resize|sum|matmul|pad|astype", name)
)


@pytest.mark.parametrize("name", _NEWER)
def test_newest_operator_set_says_the_same(name: str, computed) -> None:
    case = _BY_NAME[name]
    model = to_onnx(case.module(), opset=23)
    assert model.opset_import[0].version == 23
    _same(_run(model, case.arrays), computed[name])


@pytest.mark.parametrize("name", _NO_KERNEL)
def test_operator_without_a_kernel(name: str) -> None:
    x = 3 * floats(2, 3)
    operator = getattr(rx, name.removeprefix("relax."))
    _same(_run(to_onnx(Case(name, (x,), operator).module()), [x]), [_NO_KERNEL[name](x)])


def test_every_exporter_is_tried() -> None:
    assert {case.operator for case in CASES} | set(_NO_KERNEL) == set(EXPORTERS)
    assert len(_BY_NAME) == len(CASES)


def _operators(term: Term) -> set[str]:
    if isinstance(term, Item):
        return _operators(term.term)
    if not isinstance(term, Apply):
        return set()
    here = CLASSES[term.head] if term.member is not None else (term.head,)
    return set(here).union(*map(_operators, term.args))


def test_every_operator_of_the_catalogue_has_an_exporter() -> None:
    terms = [term for rule in CATALOGUE for term in (*rule.equation.left, *rule.equation.right)]
    named = set().union(*map(_operators, terms))
    assert len(named) > 40
    assert {OPERATORS[name].relax_name for name in named} <= set(EXPORTERS)
    assert {operator.relax_name for operator in OPERATORS.values()} <= set(EXPORTERS)


def test_every_operator_that_the_import_makes_has_an_exporter() -> None:
    ours = Path(rlflow_tvm.frontend.__file__).parent.glob("*.py")
    text = inspect.getsource(onnx_frontend) + "".join(path.read_text() for path in ours)
    made = set(re.findall(r"relax\.op\.((?:nn\.|image\.|vision\.)?[a-z_0-9]+)", text)) - {"nn", "image", "vision"}
    known = {name for name in made if f"relax.{name}" in tvm.ir.Op.list_op_names()}
    assert len(known) > 100
    assert {f"relax.{name}" for name in known - _NEVER_LEFT} <= set(EXPORTERS)


@pytest.fixture(scope="module")
def rewritten() -> dict[str, tuple[Pair, list[np.ndarray], list[np.ndarray]]]:
    """Rule name -> a sample, arguments, and what TVM makes of it after the rewrite."""
    found = {rule.name: next(filter(_is_onnx, pairs(rule, 40))) for rule in CATALOGUE}
    rng = np.random.default_rng(0)
    arguments = [_within(pair, pair.arguments(rng)) for pair in found.values()]
    expected = outputs([pair.after for pair in found.values()], arguments, TARGET)
    return {name: (pair, *rest) for (name, pair), *rest in zip(found.items(), arguments, expected, strict=True)}


def _is_onnx(pair: Pair) -> bool:
    """Whether ONNX has the coordinates of its resizes; those that it has no more are refused, see `_REFUSED`."""
    return "tf_half_pixel_for_nn" not in str(pair.after)


def _within(pair: Pair, arguments: list[np.ndarray]) -> list[np.ndarray]:
    """Positions that wrap round, those beyond the end one turn back: ONNX counts from the end, and no further."""
    drawn, found = pair.sample.instance, list(arguments)
    for number, param in enumerate(pair.before.params):
        if param.name in drawn.indices and drawn.attributes["m"] == "wrap":
            extent = -drawn.indices[param.name][0]
            found[number] = np.where(found[number] >= extent, found[number] - extent, found[number])
    return found


@pytest.mark.parametrize("name", [rule.name for rule in CATALOGUE])
def test_what_a_rule_makes_computes_what_tvm_computes(name: str, rewritten) -> None:
    pair, arguments, expected = rewritten[name]
    func = pair.after
    given = dict(zip((param.name for param in func.params), arguments, strict=True))
    weights = {p.name: tvm.runtime.tensor(given[p.name]) for p in func.params[ir.num_inputs(func) :]}
    model = to_onnx(ir.Detached(tvm.IRModule({"main": func}), weights).bind())
    inputs = [i.name for i in model.graph.input]
    assert inputs == [param.name for param in func.params[: ir.num_inputs(func)]]
    _same(onnxruntime_outputs(model, {name: given[name] for name in inputs}), expected)


_X = floats(1, 8, 4, 4)
_REFUSED: dict[str, Case] = {
    "gv.take cannot be exported to ONNX: take in the mode 'nan'": Case(
        "take", (_X, np.array([0], np.int64)), lambda x, i: rx.take(x, i, 1, mode="nan")
    ),
    "gv.nn.conv2d cannot be exported to ONNX: it convolves int8 into int32": Case(
        "nn.conv2d", (_X.astype("int8"), floats(1, 8, 1, 1).astype("int8")),
        lambda x, w: rx.nn.conv2d(x, w, out_dtype="int32"),
    ),
    "gv.left_shift cannot be exported to ONNX: it shifts int32": Case(
        "left_shift", (np.array([1], np.int32), np.array([1], np.int32)), rx.left_shift
    ),
    "gv.nn.batch_norm cannot be exported to ONNX: it is in training mode": Case(
        "nn.batch_norm", (_X, *[floats(8)] * 4), lambda *a: rx.nn.batch_norm(*a, axis=1, training=True)
    ),
    "gv.layout_transform cannot be exported to ONNX: .* is no change": Case(
        "layout_transform", (_X,), lambda x: rx.layout_transform(x, lambda n, c, h, w: (n, c * 16 + h * 4 + w))
    ),
    "gv.image.resize2d cannot be exported to ONNX: .*'tf_half_pixel_for_nn'": Case(
        "image.resize2d", (_X,),
        lambda x: rx.image.resize2d(x, (5, 5), coordinate_transformation_mode="tf_half_pixel_for_nn"),
    ),
    "gv cannot be exported to ONNX: there is no exporter for median": Case("median", (_X,), lambda x: rx.median(x, 1)),
    "gv.nn.group_norm cannot be exported to ONNX: it does not norm all axes behind": Case(
        "nn.group_norm", (_X, floats(4), floats(4)), lambda x, g, b: rx.nn.group_norm(x, g, b, 2, -1, [1, 2])
    ),
    "cannot be exported to ONNX: .*gv.negative.Neg": Case("negative", (_X.astype("uint8"),), rx.negative),
}  # fmt: skip


@pytest.mark.parametrize("message", _REFUSED)
def test_what_onnx_cannot_say_is_refused(message: str) -> None:
    with pytest.raises(FrontendError, match=message):
        to_onnx(_REFUSED[message].module())


@pytest.mark.parametrize(("low", "high"), [(-1.5, 2), (np.inf, np.inf), (0, -np.inf)])
def test_bounds_that_a_type_does_not_have_are_refused(low: float, high: float) -> None:
    case = Case("clip", (np.array([3], np.int32),), lambda x: rx.clip(x, low, high))
    with pytest.raises(FrontendError, match=r"gv.clip .* its bounds \[.*\] are no numbers of int32"):
        to_onnx(case.module())


@pytest.mark.parametrize("value", [2.0**63, -129.0, np.inf])
def test_a_pad_value_that_a_type_does_not_have_is_refused(value: float) -> None:
    dtype = "int8" if value == -129 else "int64"
    case = Case("nn.pad", (np.array([3], dtype),), lambda x: rx.nn.pad(x, (1, 1), pad_value=value))
    with pytest.raises(
        FrontendError, match=rf"gv.nn.pad .* its pad_value {re.escape(str(value))} is no number of {dtype}"
    ):
        to_onnx(case.module())


def test_weights_alone_are_computed_now() -> None:
    """ONNX Runtime 1.32 would take the padding of the kernel for one of the image."""

    def enlarged(emit, x, w):
        return rx.nn.conv2d(x, emit(rx.nn.pad(w, (0, 0, 0, 0, 1, 1, 1, 1))), padding=1)

    shapes = {"x": _X.shape}, {"w": (3, 8, 1, 1)}
    model = to_onnx(bound(module(*shapes, enlarged)))
    plain = to_onnx(bound(module(*shapes, lambda emit, x, w: rx.nn.conv2d(x, w))))
    assert [node.op_type for node in model.graph.node] == ["Conv"]
    _same(onnxruntime_outputs(model, {"x": _X}), onnxruntime_outputs(plain, {"x": _X}))


def test_blocked_layouts_are_undone_where_they_meet() -> None:
    """Convolutions in NCHW4c, with what stands between them in blocks, are Convs and what stands between them."""
    block = dict(padding=1, data_layout="NCHW4c", kernel_layout="OIHW4o", out_layout="NCHW4c")

    def pack(x: relax.Expr) -> relax.Expr:
        return rx.layout_transform(x, lambda n, c, h, w: (n, c // 4, h, w, c % 4))

    def body(emit, x, a, b, bias, shift):
        x = emit(pack(x))
        y = emit(rx.nn.relu(emit(rx.add(emit(rx.nn.conv2d(x, a, **block)), emit(pack(bias))))))
        y = emit(rx.add(emit(rx.multiply(y, relax.const(0.5))), shift))
        y = emit(rx.concat([y, emit(rx.nn.max_pool2d(y, (3, 3), (1, 1), 1, layout="NCHW4c"))], 1))
        y = emit(rx.nn.conv2d(emit(rx.nn.silu(y)), b, **block))
        y = emit(rx.multiply(y, emit(rx.mean(y, [2, 3], keepdims=True))))
        return rx.layout_transform(y, lambda n, c, h, w, k: (n, c * 4 + k, h, w))

    weights = {"a": (2, 8, 3, 3, 4), "b": (2, 16, 3, 3, 4), "bias": (1, 8, 1, 1), "shift": (1, 2, 1, 1, 4)}
    mod = bound(module({"x": _X.shape}, weights, body))
    model = to_onnx(mod)
    assert [node.op_type for node in model.graph.node] == [
        "Conv", "Relu", "Mul", "Add", "MaxPool", "Concat", "Sigmoid", "Mul", "Conv", "GlobalAveragePool", "Mul",
    ]  # fmt: skip
    _same(onnxruntime_outputs(model, {"x": _X}), run_module(mod, TARGET, [_X]))


@pytest.mark.parametrize("end", ["softmax", "mean of channels", "concat in a block", "other blocks", "both"])
def test_blocks_that_cannot_be_undone_are_turned(end: str) -> None:
    def body(emit, x):
        x = emit(rx.layout_transform(x, lambda n, c, h, w: (n, c // 4, h, w, c % 4)))
        if end == "softmax":
            return rx.nn.softmax(x, 1)
        if end == "mean of channels":
            return rx.mean(x, [1], keepdims=True)
        if end == "concat in a block":
            return rx.concat([x, x], 4)
        if end == "other blocks":
            y = emit(rx.layout_transform(x, lambda n, c, h, w, k: (n, c * 4 + k, h, w)))
            y = emit(rx.layout_transform(y, lambda n, c, h, w: (n, c, h // 2, w, h % 2)))
            return rx.add(x, emit(rx.reshape(y, (1, 2, 4, 4, 4))))
        return emit(rx.nn.relu(x)), emit(rx.layout_transform(x, lambda n, c, h, w, k: (n, c * 4 + k, h, w)))

    mod = module({"x": _X.shape}, {}, body)
    _same(onnxruntime_outputs(to_onnx(mod), {"x": _X}), outputs([mod["main"]], [[_X]], TARGET)[0])
