"""`python -m rlflow_tvm COMMAND ...`, or `rlflow-tvm COMMAND ...`: the package's commands by name."""

from __future__ import annotations

import runpy
import sys

COMMANDS = {
    "optimize": "search for a faster equal graph; write it as a plan, an ONNX model or a compiled library",
    "train": "train an agent that chooses which substitution to apply where",
    "compare": "time what searches, agents and plans leave of a model against other ways to run it",
    "report": "a page of what a plan does, or of a training",
    "rules": "the rules, their proofs, and finding new ones",
    "cost": "the database of measured kernels",
}
"""Each is `python -m rlflow_tvm.COMMAND` too."""


def main() -> None:
    """Run the command that the first argument names, as `python -m rlflow_tvm.COMMAND` does."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        from rlflow_tvm import __version__

        print(f"rlflow_tvm {__version__}")
    elif name in ("--help", "-h"):
        print(
            "A superoptimiser for Apache TVM.\n\nUsage: rlflow-tvm COMMAND ...  (or python -m rlflow_tvm.COMMAND ...)\n"
        )
        for command, told in COMMANDS.items():
            print(f"  {command:10}{told}")
        print("\n--help behind a command tells its options; --version, of the package, which version this is.")
    elif name in COMMANDS:
        # what usage lines begin with: behind "python -m rlflow_tvm." where this was run as a module
        as_module = sys.modules["__main__"].__package__
        sys.argv = [name if as_module else f"rlflow-tvm {name}", *sys.argv[2:]]
        runpy.run_module(f"rlflow_tvm.{name}", run_name="__main__", alter_sys=False)
    else:
        print(f"error: there is no command {name!r}: there are {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
