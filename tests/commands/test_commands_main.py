"""The package's own command: which commands there are, and running one by its name."""

from __future__ import annotations

import os
import subprocess

import pytest

import rlflow_tvm
from rlflow_tvm.__main__ import COMMANDS
from tests.command_process import run_command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("rlflow_tvm", arguments, {**os.environ, "COLUMNS": "200"}, 300.0)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_commands_are_listed(arguments):
    done = run(*arguments)
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


def test_the_version_is_told():
    assert run("--version").stdout == f"rlflow_tvm {rlflow_tvm.__version__}\n"


def test_a_command_is_run_with_its_arguments():
    done = run("rules", "list", "--help")
    assert done.returncode == 0
    assert "Usage: python -m rlflow_tvm.rules list" in done.stdout
    assert "Usage: python -m rlflow_tvm.optimize [OPTIONS] {model}" in run("optimize", "--help").stdout
    wrong = run("optimize", "no.onnx")
    assert wrong.returncode == 1
    assert "error: no.onnx" in wrong.stderr


def test_an_unknown_command_is_one_line():
    done = run("optimise")
    assert done.returncode == 2
    assert done.stderr == f"error: there is no command 'optimise': there are {', '.join(COMMANDS)}\n"
