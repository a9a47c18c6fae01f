"""From an ONNX file to a faster TVM module chosen by a trained agent: what `make demo` runs.

Trains a PPO agent on SqueezeNet 1.0 (the file that the `onnx` package carries for its tests), replays the plan it
found with the `ApplyPlan` pass, and compares the compiled result with TVM's default build and ONNX Runtime. Each
step is a command as a user would type it.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rlflow_tvm.frontend import zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for all results")
    parser.add_argument("--steps", type=int, default=3000, help="environment steps of the training")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists():
        sys.exit(f"error: {out} exists: move it away, or give another folder with --out")
    out.mkdir(parents=True)
    model = out / "squeezenet.onnx"
    shutil.copy(zoo.path("light_squeezenet"), model)
    run("train", model, "--agent", "ppo", "--steps", arguments.steps, "--seed", 0, "--out", out / "agent")
    plan = out / "agent" / "best.plan.json"
    run("compare", model, "--plan", plan, "--against", "tvm-default", "onnxruntime", "--json", out / "compare.json")
    print(f"\nEverything is in {out}; `tensorboard --logdir {out}` shows the training.")


def run(command: str, *arguments: object) -> None:
    """Run a command of the package, showing it first; end with its exit code if it fails."""
    words = ["-m", f"rlflow_tvm.{command}", *map(str, arguments)]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    code = subprocess.run([sys.executable, *words], check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
