"""What `compare` does where outputs are wrong: the table and the figures all the same, then an error."""

from __future__ import annotations

import json
import math

import numpy as np
import onnx
import pytest
import typer
from onnx import TensorProto, helper

from rlflow_tvm import compare, comparison
from rlflow_tvm.comparison import ONNXRUNTIME, SEARCHED, UNSEARCHED, Comparison, Row
from rlflow_tvm.errors import RewriteError


def _comparison(error: float) -> Comparison:
    quartiles = (1e-3, 1e-3)
    rows = (
        Row(SEARCHED, 1e-3, quartiles, error),
        Row(UNSEARCHED, 1e-3, quartiles, 1e-6),
        Row(ONNXRUNTIME, 1e-3, quartiles, None),
    )
    return Comparison(rows, UNSEARCHED, 1.0, None, 1.0, ONNXRUNTIME)


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
