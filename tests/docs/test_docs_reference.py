"""The reference is what the script makes of the docstrings, and holds all that is public."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import pytest
from documents import DOCS

from tests.command_process import run_command

SCRIPT = DOCS.parent / "scripts" / "reference.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_committed_is_what_the_script_makes(reference: ModuleType) -> None:
    made = reference.pages()
    assert {path.name for path in (DOCS / "reference").iterdir()} == set(made)
    stale = [name for name, text in made.items() if (DOCS / "reference" / name).read_text() != text]
    assert not stale, f"python scripts/reference.py writes {stale} anew"


@pytest.mark.parametrize("room", ["", ".passes", ".search", ".envs", ".cost"])
def test_all_that_is_public_is_there(room: str) -> None:
    module = importlib.import_module(f"rlflow_tvm{room}")
    lines = (DOCS / "reference" / f"{room.removeprefix('.') or 'rlflow_tvm'}.md").read_text().splitlines()
    for name in module.__all__:
        assert f"## {name}" in lines or f"## class {name}" in lines, name


def test_what_pages_import_is_there() -> None:
    told = [line for page in DOCS.glob("reference/*.md") for line in page.read_text().splitlines()]
    names = {line.removeprefix("## ").removeprefix("class ") for line in told if line.startswith("## ")}
    for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")):
        for imported in re.findall(r"^from rlflow_tvm[.\w]* import (.+)$", page.read_text(), re.MULTILINE):
            assert set(imported.split(", ")) <= names, page.name


def test_options_are_those_of_the_command() -> None:
    text = (DOCS / "reference" / "commands.md").read_text()
    section = text[text.index("## python -m rlflow_tvm.optimize") : text.index("## python -m rlflow_tvm.train")]
    done = run_command("rlflow_tvm.optimize", ["--help"], os.environ, 60.0)
    assert done.returncode == 0, done.stderr
    for option in ("--search", "--plan", "--onnx", "--budget", "--tune"):
        assert option in done.stdout
        assert f"- `{option} " in section


def test_names_are_those_that_the_commands_show() -> None:
    text = (DOCS / "reference" / "commands.md").read_text()
    for name in ("--resume", "--rpc HOST:PORT", "--compiled/--no-compiled", "RUN_FOLDER|MODEL", "MODELS..."):
        assert f"- `{name}`: " in text


def test_no_help_holds_what_is_taken_for_markup() -> None:
    """A word in square brackets is not shown by `--help`."""
    told = [line for line in (DOCS / "reference" / "commands.md").read_text().splitlines() if line.startswith("- `")]
    assert told
    marks = re.compile(r" \[(default: |at least |required\])")  # what the reference itself writes behind a text
    swallowed = [line for line in told if re.search(r"\[[a-z]", marks.split(line)[0].split("`: ", 1)[1])]
    assert not swallowed


SOURCE = '''
from other import moved

LIMIT: float = 1.5
"""Above it nothing goes."""


@dataclass
class Thing:
    """A thing.

    Args:
        size: of it,
            in metres.

    It is kept.
    """

    size: int = 3
    _hidden: int = 0

    @property
    def area(self) -> int:
        """Its area."""

    def _inner(self) -> None:
        """Not shown."""


def act(x: int, *, fast: bool = False) -> str:
    """Do it."""
'''


def test_definitions_are_read_from_the_source(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "thing"
    package.mkdir()
    (package / "__init__.py").write_text(
        '"""Things."""\nfrom .parts import LIMIT, Thing\nfrom thing.parts import act as do\n'
    )
    (package / "parts.py").write_text(SOURCE)
    monkeypatch.setattr(reference, "PACKAGE", package)
    page = reference._page("thing", dict.fromkeys(("LIMIT", "Thing", "do"), "thing"))
    assert page.endswith(
        """
# thing

Things.

## LIMIT

```python
LIMIT: float = 1.5
```

Above it nothing goes.

## class Thing

```python
Thing(size: int = 3)
```

A thing.

**Args:**

- `size`: of it,
  in metres.

It is kept.

### Thing.area

```python
area: int
```

Its area.

## do

```python
do(x: int, *, fast: bool = False) -> str
```

Do it.
"""
    )
    with pytest.raises(LookupError, match="does not define nothing"):
        reference.definition("nothing", "thing")
