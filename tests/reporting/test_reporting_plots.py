"""Plots: the files there are, that they are pictures, and one clear line without matplotlib."""

from __future__ import annotations

import sys

import pytest
from report_parts import along_of, planned, trained

from rlflow_tvm.errors import UsageError
from rlflow_tvm.reporting import outline, plots, require_matplotlib


def test_plots_of_a_training():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: it is in the extra plots")
    state = planned()
    told = outline("a$b", along_of(state), "llvm", trained(state))
    drawn = plots(told)
    assert set(drawn) == {"cost.png", "rules.png", "training.png"}
    assert all(data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5000 for data in drawn.values())
    unlike = plots({**told, "start": {**told["start"], "secs": 2 * told["start"]["secs"]}})
    assert unlike["cost.png"] != drawn["cost.png"]


def test_plots_of_an_empty_plan():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: it is in the extra plots")
    assert set(plots(outline("m", along_of(planned(count=0)), "llvm"))) == {"cost.png"}


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"matplotlib.*pip install 'rlflow_tvm\[plots\]'"):
        require_matplotlib()
