"""The package as `pip install` leaves it: a wheel's files alone, from a folder that is not the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel, built of a copy of the sources, is installed into."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "rlflow_tvm", source / "rlflow_tvm", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for command in (
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)],
        [
            *pip,
            "install",
            "--no-deps",
            "--no-index",
            "--find-links",
            str(wheels),
            "--target",
            str(target),
            "rlflow_tvm",
        ],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=wheels)
    return target


def python(installed: Path, folder: Path, *arguments: str) -> str:
    """What Python prints that finds the installed package before any other."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_what_is_not_python(installed):
    """Proofs, the sources compiled where kernels are measured, the pages' parts, the mark that it is typed."""

    def beside(folder: Path) -> set[str]:
        files = (path for path in (folder / "rlflow_tvm").rglob("*") if path.is_file())
        return {str(path.relative_to(folder)) for path in files if path.suffix not in (".py", ".pyc")}

    assert beside(installed) == beside(REPOSITORY)
    assert {"rlflow_tvm/py.typed", "rlflow_tvm/passes/proofs.json"} <= beside(installed)


def test_it_optimises_and_tells_of_it(installed, network, tmp_path):
    where = python(installed, tmp_path, "-c", "import rlflow_tvm; print(rlflow_tvm.__file__)")
    assert Path(where.strip()) == installed / "rlflow_tvm" / "__init__.py"
    script = installed / "bin" / "rlflow-tvm"
    plan, figures, page = (tmp_path / name for name in ("plan.json", "figures.json", "page.html"))
    options = ["--search", "greedy", "--budget", "3", "--plan", str(plan), "--json", str(figures)]
    python(installed, tmp_path, "-m", "rlflow_tvm.optimize", str(network), *options)
    assert json.loads(figures.read_text())["env_steps"] == 3
    python(installed, tmp_path, "-m", "rlflow_tvm.report", str(network), "--plan", str(plan), "--out", str(page))
    assert "<html" in page.read_text()
    assert "Usage: rlflow-tvm rules list" in python(installed, tmp_path, str(script), "rules", "list", "--help")
    assert "matmul_associate" in python(installed, tmp_path, "-m", "rlflow_tvm", "rules", "list")
