"""What a kernel's measured time is taken to depend on."""

from __future__ import annotations

import ast
from pathlib import Path

from rlflow_tvm import kernels
from rlflow_tvm.kernels import version

FOLDER = Path(kernels.__file__).parent


def imports(path: Path) -> set[str]:
    """Files of the room that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            module = folder.joinpath(*(node.module or "").split("."))
            names = [module.with_suffix(".py"), *(module / f"{alias.name}.py" for alias in node.names)]
            found |= {name.relative_to(FOLDER).as_posix() for name in names if name.exists()}
    return found


def test_nothing_that_makes_code_of_a_kernel_is_left_out():
    """Files left out are there, and are imported by none that a schedule is made by."""
    assert all((FOLDER / name).exists() for name in version._BEFORE_THE_KERNEL)
    pending, seen = ["schedule.py", "build.py"], set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imports(FOLDER / name)
    assert {"llvm/rules.py", "llvm/matmul.py"} <= seen
    assert not seen & version._BEFORE_THE_KERNEL


def test_every_edit_of_the_others_is_another_version(tmp_path, monkeypatch):
    before = version.source_version()
    for path in FOLDER.rglob("*.py"):
        copy = tmp_path / path.relative_to(FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(version, "__file__", str(tmp_path / "version.py"))
    assert version.source_version() == before
    (tmp_path / "fuse.py").write_text("")
    assert version.source_version() == before
    with (tmp_path / "llvm" / "matmul.py").open("a") as stream:
        stream.write("\n")
    assert version.source_version() != before
