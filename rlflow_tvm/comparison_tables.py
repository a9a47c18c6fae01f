"""A comparison to read: two tables for the terminal, one for Markdown, and a line for each gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from rlflow_tvm.comparison_figures import Comparison, Gains, Row
from rlflow_tvm.cost import LEAST_ROUNDS, Ratio
from rlflow_tvm.verify import ENOUGH_FINITE

_NAME = "candidate"
_COSTS = ("compile, s", "peak memory, MiB", "kernels")
_MIB = 1 << 20
NOTES = (
    "compile: building and linking; of ONNX Runtime making the session; of torch.compile loading and the first call",
    "peak memory: of the process that runs it, over what it held before it loaded the model",
)
"""What the columns of costs mean."""


def tables(title: str, result: Comparison) -> list[Table]:
    """What the candidates take a run, and what it takes to have them run."""
    return [
        _table(title, _time_columns(result), {row.name: _times(row) for row in result.rows}),
        _table("", _COSTS, {row.name: _costs(row) for row in result.rows}),
    ]


def markdown(title: str, facts: Mapping[str, str], command: str, result: Comparison) -> str:
    """The same as a Markdown file: `facts` about the run, the command that it came of, one table, the gains."""
    columns = (_NAME, *(column.replace("\n", " ") for column in _time_columns(result)), *_COSTS)
    rows = [columns, ("---", *["---:"] * (len(columns) - 1))]
    rows += [(row.name, *_times(row), *_costs(row)) for row in result.rows]
    parts = [
        f"## {title}",
        f"```\n{command}\n```",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
        "\n".join(f"- {line}" for line in (*lines(result), *NOTES)),
    ]
    return "\n\n".join(parts) + "\n"


def lines(result: Comparison) -> list[str]:
    """The gains, each by itself, and what is to be known of them."""
    told = []
    if result.constant_outputs:
        told.append(f"every output of {result.reference} is one number repeated: that they are equal proves little")
    if result.finite_outputs < ENOUGH_FINITE:
        share = 100 * (1 - result.finite_outputs)
        told.append(f"{share:.0f} % of an output of {result.reference} is NaN or infinite: equal outputs prove little")
    if result.gains[0].graph.interval is None:
        told.append(f"no 95 % intervals: they need {LEAST_ROUNDS} rounds")
    if result.kernel_gain is not None:
        told.append(f"kernel gain (same graph, against tvm-default): {_ratio(result.kernel_gain, 'x')}")
    for gains in result.gains:
        told += _gain_lines(gains, "" if len(result.gains) == 1 else f"{gains.label}: ", result.baseline)
    return told


def _gain_lines(gains: Gains, who: str, baseline: str) -> list[str]:
    told = [f"{who}graph gain (same kernels, against {baseline}): {_ratio(gains.graph, 'x')}"]
    if gains.tuning is not None:
        told.append(f"{who}tuning gain (searched graph, tuned kernels): {_ratio(gains.tuning, 'x')}")
    if gains.export is not None:
        told.append(f"{who}graph gain with ONNX Runtime's kernels (exported graphs): {_ratio(gains.export, 'x')}")
    if gains.onnxruntime is not None:
        told.append(f"{who}ONNX Runtime's time over ours: {_ratio(gains.onnxruntime)}")
    if gains.torch is not None:
        told.append(f"{who}torch.compile's time over ours: {_ratio(gains.torch)}")
    return told


def _table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title=escape(title) or None)
    table.add_column(_NAME, overflow="fold")  # names differ at their ends
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in rows.items():
        table.add_row(escape(name), *cells)
    return table


def _time_columns(result: Comparison) -> tuple[str, ...]:
    """Broken into lines so that the names of candidates have room."""
    difference = f"difference from\n{result.reference},\nshare of range"
    return "median, ms", "quartiles, ms", "baseline's time\nover its (95 %)", difference


def _times(row: Row) -> tuple[str, ...]:
    low, high = row.quartiles
    return (
        f"{row.run_secs * 1e3:.3f}",
        f"{low * 1e3:.3f} - {high * 1e3:.3f}",
        "baseline" if row.against_baseline is None else _ratio(row.against_baseline),
        "-" if row.error is None else f"{row.error:.1e}",
    )


def _costs(row: Row) -> tuple[str, ...]:
    return (
        "-" if row.compile_secs is None else f"{row.compile_secs:.1f}",
        "-" if row.peak_bytes is None else f"{row.peak_bytes / _MIB:.0f}",
        "-" if row.kernels is None else str(row.kernels),
    )


def _ratio(ratio: Ratio, sign: str = "") -> str:
    """The median with `sign` behind it, and the interval."""
    interval = "" if ratio.interval is None else f" ({' - '.join(map(_number, ratio.interval))})"
    return f"{_number(ratio.median)}{sign}{interval}"


def _number(value: float) -> str:
    """Two decimals, or where that says too little or too much, two digits or one decimal."""
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
