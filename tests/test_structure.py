"""The package's structure: who imports whom, what is public, what a deployed build loads, how long files are."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rlflow_tvm

PACKAGE = Path(rlflow_tvm.__file__).parent
REPOSITORY = PACKAGE.parent
NAME = PACKAGE.name

EVERYONES = {
    *("dataflow", "errors", "hashing", "home", "ir", "jsonl", "lifting", "processors", "rows", "transposed", "volumes"),
}
"""Whoever may import them: they import each other alone."""

ROOMS: dict[str, set[str]] = {
    "frontend": set(),
    "passes": set(),
    "kernels": set(),
    "cost": {"kernels"},
    "envs": {"passes", "cost"},
    "search": {"envs"},
    "reporting": {"cost", "passes"},
    "agents": set(),
}
"""Room -> the rooms it is built on. It may import those, and the ones that they are built on."""

COMMANDS = {"train", "optimize", "compare", "report", "rules"}
AGENT_LIBRARIES = {
    *("torch", "dgl", "gymnasium", "numpy", "safetensors", "tensorboard", "ray"),
    *("stable_baselines3", "sb3_contrib"),
}
EXTRAS = {
    "torch",
    "dgl",
    "ray",
    "transformers",
    "onnxscript",
    "onnxruntime",
    "matplotlib",
    "stable_baselines3",
    "sb3_contrib",
}
EXTRAS_AT_THE_TOP = {"frontend/zoo_vision.py", "frontend/zoo_language.py", "frontend/zoo_attention.py"}
"""Files that are imported only where an evaluation model is built."""

LAZY_LIBRARIES = ("dgl", "ray", "xgboost", "stable_baselines3", "onnxruntime", "transformers", "matplotlib")
LONGEST_FILE = 400


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.relative_to(folder).parts[0].startswith("."))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


SOURCES = {name_of(path): path for path in files(PACKAGE)}
ROOM_SOURCES = [name for name in SOURCES if "/" in name]


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


def imported(name: str, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Dotted names of the modules that import statements among `nodes` load (of names imported too: they may be)."""
    package = [NAME, *Path(name).parent.parts]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def everywhere(name: str) -> Iterator[ast.AST]:
    return ast.walk(tree_of(name))


def at_the_top(name: str) -> Iterator[ast.AST]:
    """The statements that run when the module is imported; those of functions and for type checkers do not."""
    pending: list[ast.AST] = [tree_of(name)]
    while pending:
        node = pending.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if not lazy and not checking:
                pending.append(child)


def own_parts(name: str, nodes: Iterator[ast.AST]) -> set[str]:
    """The package's top-level parts (rooms and modules) that are imported."""
    parts = (module.split(".") for module in imported(name, nodes))
    return {part[1] for part in parts if part[0] == NAME and len(part) > 1}


def libraries(name: str, nodes: Iterator[ast.AST]) -> set[str]:
    tops = {module.split(".")[0] for module in imported(name, nodes)}
    return tops - {NAME} - set(sys.stdlib_module_names)


def built_on(room: str) -> set[str]:
    return ROOMS[room] | {below for above in ROOMS[room] for below in built_on(above)}


def test_every_room_has_its_place():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("name", ROOM_SOURCES)
def test_room_imports_only_what_it_is_built_on(name):
    room = Path(name).parts[0]
    if Path(name).name == "__main__.py":  # a command, which is no part of its room: nothing imports it
        return
    assert own_parts(name, everywhere(name)) <= EVERYONES | {room} | built_on(room)


@pytest.mark.parametrize("name", [name for name in ROOM_SOURCES if name.startswith("agents/")])
def test_agents_know_nothing_of_compilers(name):
    assert own_parts(name, everywhere(name)) <= {"errors", "hashing", "jsonl", "agents"}
    assert libraries(name, everywhere(name)) <= AGENT_LIBRARIES


@pytest.mark.parametrize("name", [f"{part}.py" for part in sorted(EVERYONES)])
def test_what_is_everyones_imports_no_room(name):
    assert own_parts(name, everywhere(name)) <= EVERYONES


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_imports_a_command(name):
    assert not own_parts(name, everywhere(name)) & COMMANDS


@pytest.mark.parametrize("name", SOURCES)
def test_extras_are_imported_where_they_are_used(name):
    if name.startswith("agents/") or name in EXTRAS_AT_THE_TOP:
        return
    assert not libraries(name, at_the_top(name)) & EXTRAS


@pytest.mark.parametrize("name", SOURCES)
def test_ray_is_imported_where_it_is_used(name):
    assert "ray" not in libraries(name, at_the_top(name))


@pytest.mark.parametrize("name", SOURCES)
def test_no_module_outside_agents_loads_them_at_the_top(name):
    if not name.startswith("agents/"):
        assert "agents" not in own_parts(name, at_the_top(name))


def test_imports_are_seen():
    """What the tests above rest on."""
    assert own_parts("envs/problem.py", everywhere("envs/problem.py")) >= {"passes", "cost", "errors"}
    assert "tvm" in libraries("passes/graph.py", everywhere("passes/graph.py"))
    assert "kernels" in own_parts("kernels/pipeline.py", everywhere("kernels/pipeline.py"))  # written as .schedule
    assert "agents" in own_parts("superoptimize.py", everywhere("superoptimize.py"))
    assert "agents" not in own_parts("superoptimize.py", at_the_top("superoptimize.py"))
    assert built_on("search") == {"envs", "passes", "cost", "kernels"}


def test_public_names_are_there():
    names = {
        "from_onnx",
        "to_onnx",
        "Superoptimize",
        "ApplyPlan",
        "compile",
        "pipeline",
        "graph_cost",
        "Plan",
        "RewriteRule",
    }
    assert names <= set(rlflow_tvm.__all__)
    assert set(rlflow_tvm.__all__) <= set(dir(rlflow_tvm))
    for name in rlflow_tvm.__all__:
        assert getattr(rlflow_tvm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rlflow_tvm.nothing  # noqa: B018


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_list_what_they_offer(room):
    module = importlib.import_module(f"{NAME}.{room}")
    assert module.__doc__
    assert module.__all__
    for name in module.__all__:
        assert hasattr(module, name), name


@pytest.mark.parametrize("name", SOURCES)
def test_every_module_says_what_it_is(name):
    assert ast.get_docstring(tree_of(name))


def test_no_file_is_too_long():
    folders = [REPOSITORY / folder for folder in (NAME, "tests", "scripts")]
    lengths = {str(path): len(path.read_text().splitlines()) for folder in folders for path in files(folder)}
    assert lengths
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def loaded(names: str) -> set[str]:
    """What is in `sys.modules` of a process that has read these names of the package."""
    program = f"import sys, rlflow_tvm as rl; {names}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_deployed_build_loads_no_learning():
    modules = loaded("rl.ApplyPlan, rl.from_onnx, rl.pipeline, rl.compile")
    assert "rlflow_tvm.frontend" in modules
    assert not modules & {*LAZY_LIBRARIES, f"{NAME}.agents"}


def test_replaying_a_plan_loads_neither_measuring_nor_environments():
    modules = loaded("rl.ApplyPlan, rl.Plan, rl.pipeline, rl.compile")
    rooms = {name.split(".")[1] for name in modules if name.startswith(f"{NAME}.")}
    assert rooms == {*EVERYONES, "kernels", "passes", "replay"} - {"home", "jsonl"}  # no logs, nothing kept
    assert not modules & {*LAZY_LIBRARIES, "gymnasium", "onnx"}


def test_pipeline_is_registered_by_importing_the_package():
    from tvm import relax

    assert relax.get_pipeline("rlflow") is not None
