"""Write docs/reference/: the public names with their docstrings, and the commands with their options.

    python scripts/reference.py

What is public is what a room's `__all__` lists, and what `MORE` names besides. Names are read from the source, not from
imported objects: that needs no extras, and shows signatures as they are written.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

import rlflow_tvm

PACKAGE = Path(rlflow_tvm.__file__).parent
FOLDER = PACKAGE.parent / "docs" / "reference"

ROOMS = ("passes", "search", "envs", "cost")
MORE = {
    "kernels": ("Kernel", "KernelRule", "as_target", "explain", "extract_kernels", "num_cores", "vector_lanes"),
    "kernels.precision": ("to_half",),
    "passes.proofs": ("read_rules",),
    "passes.verify": ("verify_rule",),
    "agents.config": ("PPOConfig",),
    "agents.candidate.config": ("CandidateConfig",),
    "agents.world.config": ("WorldModelConfig",),
    "envs.observation": ("observe",),
    "envs.changes": ("observe_candidates",),
    "superoptimize": ("optimize", "keep_if_not_slower"),
    "ordering": ("LearnedOrder",),
}
"""Names of other modules that the documents use; of `errors` all are shown."""
COMMANDS = ("optimize", "train", "compare", "report", "rules", "cost")
WIDTH = 100

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign
_METAVARS = {"Path": "PATH", "int": "N", "float": "X", "str": "TEXT"}
_GENERATED = "<!-- written by scripts/reference.py from the docstrings: change those -->\n"
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$")
_ITEM = re.compile(r"^(\*{0,2}\w+): (.*)$")


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    homes = {name: rlflow_tvm._HOMES[name] for name in rlflow_tvm.__all__}
    found = {"rlflow_tvm.md": _page("rlflow_tvm", homes)}
    for room in ROOMS:
        module = importlib.import_module(f"rlflow_tvm.{room}")
        found[f"{room}.md"] = _page(module.__name__, dict.fromkeys(module.__all__, module.__name__))
    errors = tuple(node.name for node in _tree("rlflow_tvm.errors").body if isinstance(node, ast.ClassDef))
    more = {f"rlflow_tvm.{module}": names for module, names in {**MORE, "errors": errors}.items()}
    sections = [_section(module, dict.fromkeys(names, module)) for module, names in more.items()]
    found["more.md"] = "\n".join([_GENERATED, *sections])
    found["commands.md"] = _commands()
    listed = "".join(f"- [{name.removesuffix('.md')}]({name}): {_about(text)}\n" for name, text in found.items())
    found["README.md"] = f"{_GENERATED}\n# Reference\n\n{listed}"
    return found


def _about(page: str) -> str:
    """The names on a page, but for members."""
    names = (line.removeprefix("## ").removeprefix("class ") for line in page.splitlines() if line.startswith("## "))
    return ", ".join(f"`{name}`" for name in names)


def _page(module: str, homes: dict[str, str]) -> str:
    return f"{_GENERATED}\n{_section(module, homes)}"


def _section(module: str, homes: dict[str, str]) -> str:
    parts = [f"# {module}\n", _prose(ast.get_docstring(_tree(module)) or "")]
    for name, home in homes.items():
        parts.append(_described(name, *definition(name, home)))
    return "\n".join(parts)


def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module).read_text())


def _source(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definition(name: str, module: str) -> tuple[Definition, str, str]:
    """Where `name`, as `module` knows it, is defined, what is written below that, and in which module; LookupError if
    nowhere."""
    body = _tree(module).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, ast.get_docstring(node) or "", module
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node, _below(after), module
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return node, _below(after), module
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(alias.name, _imported_from(node, module))
    raise LookupError(f"{module} does not define {name}")


def _below(node: ast.stmt | None) -> str:
    """The text of a statement that is nothing but a text, as stands below what it describes."""
    text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
    return text if isinstance(text, str) else ""


def _imported_from(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if _source(module).name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], node.module or ""]).rstrip(".")


def _described(name: str, node: Definition, text: str, module: str) -> str:
    if isinstance(node, ast.FunctionDef):
        return _entry(f"## {name}", _signature(node, name), text)
    if isinstance(node, ast.ClassDef):
        return "\n".join(
            [_entry(f"## class {name}", _class_signature(node, name, module), text), *_members(node, name)]
        )
    annotation = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    value = "" if node.value is None else ast.unparse(node.value)
    stated = f"{name}{annotation}" + (f" = {value}" if 0 < len(value) <= WIDTH else "")
    return _entry(f"## {name}", stated, text)


def _members(node: ast.ClassDef, owner: str) -> Iterator[str]:
    """The public methods, properties and described fields of a class."""
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in member.decorator_list]
            text = ast.get_docstring(member) or ""
            if any(decorator.endswith("property") for decorator in decorators):
                returns = f": {ast.unparse(member.returns)}" if member.returns else ""
                yield _entry(f"### {owner}.{member.name}", f"{member.name}{returns}", text)
            elif text:  # one without tells nothing that its class, or the one it is inherited from, does not
                static = "staticmethod" in decorators
                yield _entry(f"### {owner}.{member.name}", _signature(member, member.name, bound=not static), text)
        elif (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(member, ast.AnnAssign)
        ):
            field = ast.unparse(member.target)
            yield _entry(f"### {owner}.{field}", ast.unparse(member), str(after.value.value))


def _class_signature(node: ast.ClassDef, name: str, module: str) -> str:
    """As its own `__init__` has it, or its nearest base's."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _signature(member, name, bound=True, returns=False)
    dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    for base in [] if dataclass else node.bases:
        try:
            inherited, _, home = definition(ast.unparse(base).partition("[")[0], module)
        except (LookupError, OSError):  # of another package
            continue
        if isinstance(inherited, ast.ClassDef):
            return _class_signature(inherited, name, home)
    fields = [ast.unparse(member) for member in node.body if isinstance(member, ast.AnnAssign)] if dataclass else []
    return _call(name, [field for field in fields if not field.startswith("_")])


def _signature(node: ast.FunctionDef, name: str, *, bound: bool = False, returns: bool = True) -> str:
    """`bound`: the first argument is the object or class, and is not shown."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    shown = [_argument(arg, default) for arg, default in zip(plain, defaults, strict=True)][int(bound) :]
    if a.vararg is not None:
        shown.append(f"*{ast.unparse(a.vararg)}")
    elif a.kwonlyargs:
        shown.append("*")
    shown += [_argument(arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg is not None:
        shown.append(f"**{ast.unparse(a.kwarg)}")
    return _call(name, shown) + (f" -> {ast.unparse(node.returns)}" if returns and node.returns else "")


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + ("" if default is None else f" = {ast.unparse(default)}")


def _call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    return line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {each}," for each in arguments), ")"])


def _entry(heading: str, stated: str, text: str) -> str:
    return f"{heading}\n\n```python\n{stated}\n```\n" + (f"\n{_prose(text)}" if text else "")


def _prose(docstring: str) -> str:
    """A docstring as Markdown: what stands below `Args:` and the like becomes a list."""
    shown, listing = [], False
    for line in inspect.cleandoc(docstring).splitlines():
        inner = line.strip()
        if _SECTION.match(line):
            listing = True
            shown += [f"**{inner}**", ""]
        elif listing and line.startswith("    ") and (item := _ITEM.match(inner)):
            shown.append(f"- `{item[1]}`: {item[2]}")
        elif listing and line.startswith("    "):
            shown.append(f"  {inner}")
        else:
            listing = listing and not inner
            shown.append(line)
    return "\n".join(shown).strip() + "\n"


def _commands() -> str:
    parts = [f"{_GENERATED}\n# Commands\n", "What `--help` tells of each of them.\n"]
    for name in COMMANDS:
        module = importlib.import_module("rlflow_tvm.cost.__main__" if name == "cost" else f"rlflow_tvm.{name}")
        if hasattr(module, "COMMANDS"):
            parts.append(f"## python -m rlflow_tvm.{name}\n\n{_prose(module.__doc__ or '')}")
            parts += [_command(f"### python -m rlflow_tvm.{name} {each}", do) for each, do in module.COMMANDS.items()]
        else:
            parts.append(_command(f"## python -m rlflow_tvm.{name}", module.main))
    return "\n".join(parts)


def _command(heading: str, command: Callable[..., None]) -> str:
    """Read from the function that typer makes the command of: typer's own objects are others in each version."""
    hints = get_type_hints(command, include_extras=True)
    usage, told = [heading.lstrip("# "), "[OPTIONS]"], []
    for name, param in inspect.signature(command).parameters.items():
        value, info = get_args(hints[name])
        required = param.default is inspect.Parameter.empty
        if isinstance(info, typer.models.ArgumentInfo):
            shown = info.metavar or f"{name.upper()}{'...' if 'list' in str(value) else ''}"
            usage.append(shown if required else f"[{shown}]")
        else:
            shown = _option(name, value, info)
        notes = ["required"] if required else []
        if isinstance(info.show_default, str):
            notes.append(f"default: {info.show_default}")
        elif not required and param.default is not None and param.default is not False:
            notes.append(f"default: {param.default}")
        notes += [f"{bound} {limit}" for bound, limit in (("at least", info.min), ("at most", info.max)) if limit]
        noted = f" [{'; '.join(notes)}]" if notes else ""
        told.append(f"- `{shown}`: {info.help}{noted}\n")
    return f"{heading}\n\n```text\n{' '.join(usage)}\n```\n\n{_prose(command.__doc__ or '')}\n{''.join(told)}"


def _option(name: str, value: Any, info: Any) -> str:
    # typer keeps the first name given as the default, until it copies this
    texts = (info.default, *(info.param_decls or ()))
    given = [text for text in texts if isinstance(text, str) and text.startswith("--")]
    options = given or [f"--{name.replace('_', '-')}"]
    if value is bool:
        return "/".join(options if given else [*options, f"--no-{name.replace('_', '-')}"])
    kind = next(text for known, text in _METAVARS.items() if known in str(value))
    return f"{'/'.join(options)} {info.metavar or kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (out / name).write_text(text)
        print(out / name)


if __name__ == "__main__":
    main()
