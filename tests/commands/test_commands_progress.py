"""Progress of long work: a bar on a terminal, lines where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlflow_tvm import cli


@pytest.mark.parametrize(("every", "lines"), [(0.0, 3), (60.0, 0)])
def test_where_there_is_no_terminal_a_line_now_and_then_tells_how_far_the_work_is(every, lines, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=out, width=120))
    monkeypatch.setattr(cli, "_TOLD_EVERY_SECS", every)
    with cli.progress_bar("measuring") as bar:
        for done in range(3):
            bar(done, 3, "so many kernels")
    told = [line.strip() for line in out.getvalue().splitlines()]
    assert told == [f"measuring: {done} of 3 so many kernels" for done in range(lines)]


def test_what_goes_on_meanwhile_is_told_beside_how_far_the_work_is(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=out, width=120))
    monkeypatch.setattr(cli, "_TOLD_EVERY_SECS", 0.0)
    with cli.progress_bar("searching") as bar:
        cli.kernels_told(bar)(1, 9)
        bar(2, 100, "0.3 ms")
        cli.kernels_told(bar)(1, 1)
        bar(3, 100, "0.2 ms")
    told = [line.strip() for line in out.getvalue().splitlines()]
    assert told == [
        "searching: (kernel 1 of 9)",
        "searching: 2 of 100 0.3 ms",
        "searching: 2 of 100 0.3 ms  (kernel 1 of 1)",
        "searching: 3 of 100 0.2 ms",
    ]


def test_on_a_terminal_there_are_no_such_lines(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(cli, "console", Console(file=out, width=120, force_terminal=True))
    monkeypatch.setattr(cli, "_TOLD_EVERY_SECS", 0.0)
    with cli.progress_bar("measuring") as bar:
        bar(1, 3, "so many kernels")
    assert "measuring: 1 of 3" not in out.getvalue()
    assert "1/3" in out.getvalue()
