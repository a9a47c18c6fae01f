"""What `compare` does where outputs are wrong: the table and the figures all the same, then an error."""

from __future__ import annotations

import json
import math

import numpy as np
import onnx
import pytest
import typer
from onnx import TensorProto, helper
from tvm import relax

from rlflow_tvm import compare, comparison, from_onnx
from rlflow_tvm.comparison import ONNXRUNTIME, SEARCHED, TUNED, UNSEARCHED, Comparison, Row
from rlflow_tvm.cost import EndToEnd
from rlflow_tvm.errors import RewriteError
from rlflow_tvm.kernels import Choices, default_target
from rlflow_tvm.kernels.tuned import marked


def _comparison(error: float) -> Comparison:
    quartiles = (1e-3, 1e-3)
    rows = (
        Row(SEARCHED, 1e-3, quartiles, error),
        Row(UNSEARCHED, 1e-3, quartiles, 1e-6),
        Row(ONNXRUNTIME, 1e-3, quartiles, None),
    )
    return Comparison(rows, UNSEARCHED, 1.0, None, None, 1.0, ONNXRUNTIME)


@pytest.mark.parametrize("error", [0.5, math.inf, math.nan])
def test_wrong_outputs_are_an_error(error: float) -> None:
    with pytest.raises(RewriteError, match=r"searched by .*report the model"):
        _comparison(error).check()
    rows = json.loads(json.dumps(_comparison(error).to_json(), allow_nan=False))["rows"]
    assert [row["outputs_match"] for row in rows] == [False, True, True]
    assert rows[0]["error"] == (0.5 if error == 0.5 else None)


def test_rounding_is_none() -> None:
    _comparison(1e-5).check()


def test_the_command_shows_the_table_first(tmp_path, monkeypatch, capsys) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    path, figures = tmp_path / "relu.onnx", tmp_path / "figures.json"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    monkeypatch.setattr(comparison, "compare", lambda *_, **__: _comparison(np.inf))
    with pytest.raises(typer.Exit) as caught:
        compare.main(str(path), json=figures)
    assert caught.value.exit_code == 1
    printed = capsys.readouterr()
    assert "inf of range" in printed.out
    assert "error: outputs differ" in printed.err
    assert json.loads(figures.read_text())["rows"][0]["error"] is None


def test_tuned_kernels_have_a_row_of_their_own(tmp_path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [24, 24]) for name in "xyz"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "y"], ["z"])], "g", values[:2], values[2:])
    path = tmp_path / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    mod, target = from_onnx(path), default_target()
    asked = []

    def schedule(func):
        asked.append(func)
        return marked(func)  # plain loops: correct, and slow

    result = comparison.compare(mod, mod, path, target, [ONNXRUNTIME], choices=Choices(schedule=schedule), rounds=2)
    result.check()
    assert {row.name for row in result.rows} == {SEARCHED, UNSEARCHED, TUNED, ONNXRUNTIME}
    assert len(asked) == 2  # to see whether there is one, and for its own row: the others have none
    assert result.tuning_gain is not None
    untuned = comparison.compare(mod, mod, path, target, [], rounds=2)
    assert untuned.tuning_gain is None
    assert {row.name for row in untuned.rows} == {SEARCHED, UNSEARCHED}


def test_a_model_that_tvm_cannot_convert_is_compared_without(caplog) -> None:
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in
            (("x", (1, 16, 8, 1)), ("w", (16, 16, 1, 1))))  # fmt: skip
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.squeeze(builder.emit(relax.op.nn.conv2d(x, w)), [-1]))
        builder.emit_func_output(output)
    assert set(comparison.unsearched(builder.get(), 16)) == {UNSEARCHED}
    assert "ConvertLayout fails on this model" in caplog.text


def test_constant_outputs_are_told() -> None:
    def measured(*outputs: np.ndarray) -> dict[str, EndToEnd]:
        return {name: EndToEnd(((1e-3,),), outputs) for name in (SEARCHED, UNSEARCHED)}

    constant, varied = np.full((1, 8), 0.125, "float32"), np.arange(3, dtype="int64")
    assert comparison.summary(measured(constant)).constant_outputs
    assert not comparison.summary(measured(constant, varied)).constant_outputs
    assert not comparison.summary(measured(np.float32(1.0).reshape(()))).constant_outputs
