"""The times of exports: one row a model, made once."""

from __future__ import annotations

import json
from pathlib import Path

import export_time
import numpy as np
import pytest

from rlflow_tvm.cost import EndToEnd
from rlflow_tvm.frontend import from_onnx, to_onnx, zoo


def _run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr("sys.argv", ["export_time.py", *map(str, words)])
    export_time.main()


def test_a_model_is_exported_checked_and_timed_once(network: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "exported.json"
    words = ("--models", network, "--search", "none", "--rounds", 1, "--out", out)
    _run(monkeypatch, *words)
    (row,) = json.loads(out.read_text())
    assert row["model"] == str(network)
    assert row["imported_rewrites"] == 0
    assert row["imported_nodes"] == len(to_onnx(from_onnx(network)).graph.node)
    assert 0 <= row["imported_error"] < 1e-5
    assert 0 <= row["imported_again_error"] < 1e-5
    assert row["imported_gain"] == pytest.approx(row["original_secs"] / row["imported_secs"])
    assert row["imported_gain_interval"] is None  # of one round
    capsys.readouterr()
    _run(monkeypatch, *words)
    assert json.loads(out.read_text()) == [row]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split(" | ")[3:5] == ["-", "-"]  # nothing was searched


def test_every_evaluation_model_by_default(tmp_path: Path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(export_time, "bench", lambda model, *_: asked.append(model) or {"model": model, "search": "x"})
    monkeypatch.setattr(export_time, "table", lambda rows: ["", "", *(row["model"] for row in rows)])
    _run(monkeypatch, "--out", tmp_path / "exported.json")
    assert asked == [f"zoo:{name}" for name in zoo.names()]


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        _run(monkeypatch, "--models", tmp_path / "none.onnx", "--search", "none", "--out", tmp_path / "exported.json")
    assert ended.value.code == 2
    assert "none.onnx" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "exported.json").exists()


def test_results_of_other_options_are_not_taken(tmp_path: Path, monkeypatch, capsys) -> None:
    asked = []

    def bench(model: str, search: str, *_: object) -> dict[str, str]:
        asked.append(search)
        return {"model": model, "search": search}

    monkeypatch.setattr(export_time, "bench", bench)
    monkeypatch.setattr(export_time, "table", lambda rows: ["", "", *(row["model"] for row in rows)])
    words = ("--models", "one", "--out", tmp_path / "exported.json")
    for more in ((), (), ("--search", "none", "--rounds", 3)):  # nothing to those of another search
        _run(monkeypatch, *words, *more)
    for more, told in (
        (("--rounds", 3), "rounds was 10, is 3; give that, or another --out"),
        (("--budget", "30s"), "budget was None, is 30s"),
    ):
        with pytest.raises(SystemExit) as ended:
            _run(monkeypatch, *words, *more)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err.splitlines()[-1]
    assert asked == [export_time.DEFAULT_SEARCH, "none"]


def test_outputs_that_are_wrong_without_end_are_kept_and_shown() -> None:
    """JSON has no word for infinity."""
    theirs, ours = (EndToEnd(((1e-3,),), (np.array([value]),)) for value in (1.0, np.nan))
    row = {"model": "zoo:one", "original_secs": 1e-3, "imported_again_error": 0.0}
    row |= json.loads(json.dumps(export_time.compared("imported", theirs, ours), allow_nan=False))
    assert row["imported_error"] is None
    assert export_time.table([row])[-1].endswith("| inf | 0.0e+00 |")
