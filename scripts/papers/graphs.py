"""RLFlow's table 1: what the models' graphs are, and how much there is to rewrite. Of `scripts/graph_properties.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from papers.page import Page, markdown, one, rows_in, scaled, short

NAMES = (
    *("model", "operators", "kinds", "weights", "flops", "kernels", "bytes_moved", "peak_bytes"),
    *("rules", "sites", "rewrites_away"),
)


def table1(paths: Sequence[Path]) -> Page:
    """A line for each model."""
    columns = (
        *("graph", "operators", "different ones", "weights, million", "FLOPs, million", "kernels", "moved, MB"),
        *("peak memory, MB", "rules with a site", "sites", "graphs one rewrite away"),
    )
    cells = []
    for row in rows_in(one(paths), NAMES, "graph_properties.py"):
        cells.append(
            [
                short(row["model"]), str(row["operators"]), str(row["kinds"]), scaled(row["weights"], 1e6),
                scaled(row["flops"], 1e6, 1), str(row["kernels"]), scaled(row["bytes_moved"], 1e6, 2),
                scaled(row["peak_bytes"], 1e6, 2), str(row["rules"]), str(row["sites"]), str(row["rewrites_away"]),
            ]
        )  # fmt: skip
    lines = [
        *markdown(columns, cells),
        "",
        "Operators of the imported graph (constants folded, batch normalisations in their convolutions), work on "
        "weights left out; kernels, operations, bytes moved and the peak of inputs, outputs and intermediates of what "
        "is built of it, implementations chosen by shapes (a convolution by Winograd's counts fewer operations). Equal "
        "graphs one rewrite away count once.",
    ]
    return Page(lines)
