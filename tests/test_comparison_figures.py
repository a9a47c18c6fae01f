"""What times and outputs of candidates come to."""

from __future__ import annotations

import numpy as np

from rlflow_tvm.comparison_figures import ONNXRUNTIME, UNSEARCHED, searched_name, summary
from rlflow_tvm.cost import Candidate, EndToEnd


def test_outputs_are_held_against_those_of_the_graph_as_it_is() -> None:
    """Not against what ONNX Runtime makes of it to be fast, which rounds a quantised one otherwise."""
    exact = np.linspace(0, 1, 9, dtype="float32")
    searched = searched_name("searched")
    outputs = {searched: exact, UNSEARCHED: exact, ONNXRUNTIME: 1.02 * exact}
    measured = {name: EndToEnd(((1e-3,),), (each,)) for name, each in outputs.items()}
    candidates = {name: Candidate("tvm", name) for name in outputs}
    told = summary(measured, candidates, ["searched"], [exact], lambda inputs: [exact])
    assert [row.error for row in told.rows] == [0.0, 0.0, None]
