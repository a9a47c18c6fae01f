"""What a plan did to a model, for people: a page to look at in a browser, or plots."""

from __future__ import annotations

from rlflow_tvm.reporting.contents import Contents, Training, contents, outline
from rlflow_tvm.reporting.page import page
from rlflow_tvm.reporting.plots import FIGURES, plots, require_matplotlib
from rlflow_tvm.reporting.steps import Along, price_along

__all__ = [
    "FIGURES",
    "Along",
    "Contents",
    "Training",
    "contents",
    "outline",
    "page",
    "plots",
    "price_along",
    "require_matplotlib",
]
