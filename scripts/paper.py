"""One table or figure of the papers, made from what the other scripts have left.

    python scripts/paper.py rlflow-table2 runs/compared
    python scripts/paper.py rlflow-figure5 docs/compared/rewards --out figure5.md --plot figure5.png

Prints Markdown; --out writes it to a file, --plot draws the figure where there is one (extra [plots]). Which scripts
leave what a table is made of:

"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from papers import graphs, runs, shapes, times, world
from papers.page import Page

from rlflow_tvm.cli import check_writable, write_text
from rlflow_tvm.errors import RlflowError, UsageError


@dataclass(frozen=True)
class Table:
    """One of the papers' tables or figures. `reads`: the script whose files or folders it is made of."""

    title: str
    make: Callable[[Sequence[Path]], Page]
    reads: str


TABLES = {
    "rlflow-table1": Table("RLFlow, table 1: the models' graphs", graphs.table1, "graph_properties.py's file"),
    "rlflow-table2": Table("RLFlow, table 2: run time and memory", runs.table2, "agents.py's folders"),
    "rlflow-table3": Table("RLFlow, table 3: temperature of dreams", world.table3, "temperature.py's file"),
    "rlflow-figure5": Table("RLFlow, figure 5: reward functions", runs.figure5, "agents.py's folders"),
    "rlflow-figure6": Table("RLFlow, figure 6: run time against others", times.figure6, "bench_models.py's file"),
    "rlflow-figure7": Table("RLFlow, figure 7: optimisation time", runs.figure7, "agents.py's folders"),
    "rlflow-figure8": Table("RLFlow, figure 8: loss of the world model", world.figure8, "agents.py's folders"),
    "rlflow-figure9": Table("RLFlow, figure 9: predicted and real reward", world.figure9, "agents.py's folders"),
    "rlflow-figure10": Table("RLFlow, figure 10: rules of the best plans", runs.figure10, "agents.py's folders"),
    "rlflow-steps": Table("RLFlow, section 4.4: a step of a dream", world.step_time, "dream_time.py's file"),
    "xrlflow-cost": Table("X-RLflow: cost model against end to end", times.cost_model, "graph_cost.py's file"),
    "xrlflow-speedup": Table("X-RLflow: speed-up by model and method", runs.speed_up, "agents.py's folders"),
    "xrlflow-shapes": Table("X-RLflow: other shapes and models", shapes.shapes, "generalise.py's folder"),
}


def main() -> int:
    told = "\n".join(f"  {name:16} {table.title} ({table.reads})" for name, table in TABLES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}{told}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(TABLES), metavar="NAME", help="of the table or figure")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files or folders that it is made of")
    parser.add_argument("--out", type=Path, help="write the Markdown to this file")
    parser.add_argument("--plot", type=Path, help="draw the figure into this PNG file")
    options = parser.parse_args()
    table = TABLES[options.name]
    try:
        check_writable(options.out, options.plot, inputs=options.paths)
        page = table.make(options.paths)
        if options.plot is not None and page.draw is None:
            raise UsageError(f"{options.name} is a table and has no figure: leave --plot out")
        text = "\n".join([f"## {table.title}", "", *page.lines]) + "\n"
        print(text, end="")
        write_text(options.out, text)
        if options.plot is not None:
            page.draw(options.plot)
    except RlflowError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
