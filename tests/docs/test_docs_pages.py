"""The documents, followed to the letter: every command typed, every block of Python run, what they state compared."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCS, Reader, blocks, differences

from tests.one_processor import one_processor

PAGES = ("howto-pipelines.md", "howto-own.md", "explanation.md")


@pytest.fixture(scope="module", autouse=True)
def on_one_processor() -> Iterator[None]:
    """What the pages start measures kernels, and finds what the pages state."""
    with one_processor():
        yield


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Reader, int]]:
    """The tutorial, followed once, in its folder, and how many of its blocks that were."""
    with Reader("tutorial.md", tmp_path_factory.mktemp("tutorial")) as reader:
        yield reader, reader.follow()


def test_the_tutorial_does_what_it_states(tutorial: tuple[Reader, int]) -> None:
    assert tutorial[1] >= 5


@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_states(name: str, tmp_path: Path) -> None:
    with Reader(name, tmp_path) as reader:
        assert reader.follow() >= 5


def index_reached(folder: Path) -> bool:
    """Whether pip finds a small package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "typing_extensions"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_tutorial_in_an_environment_with_tvm_alone(
    tutorial: tuple[Reader, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above imitates: the environment is made by the tutorial's own commands."""
    if not index_reached(tmp_path / "index"):
        pytest.skip("pip reaches no package index")
    reader, _ = tutorial
    fresh = reader.folder / "fresh"
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it would bring other packages into the environment
    shutil.rmtree(fresh)
    (install,) = (block for block in reader.blocks if block.comment == "installs: runtime")
    (run,) = (block for block in reader.blocks if block.text.startswith("$ fresh/bin/python"))
    reader.type(install)
    reader.type(run)
    listed = subprocess.run(
        [fresh / "bin" / "pip", "list", "--format", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    assert "apache-tvm==0.27" in listed
    assert "torch" not in listed
    assert "rlflow" not in listed


def test_the_imitated_environment_has_tvm_alone(tmp_path: Path) -> None:
    Reader("tutorial.md", tmp_path)
    script = tmp_path / "script.py"
    for name in ("rlflow_tvm", "torch", "dgl", "onnx"):
        script.write_text(f"import {name}\n")
        done = subprocess.run([tmp_path / "fresh/bin/python", script], capture_output=True, text=True, check=False)
        assert f"ModuleNotFoundError: No module named '{name}'" in done.stderr
    script.write_text("import numpy, tvm; print(tvm.cpu())\n")
    done = subprocess.run([tmp_path / "fresh/bin/python", script], capture_output=True, text=True, check=False)
    assert done.stdout == "cpu:0\n", done.stderr


def prose(page: Path) -> str:
    """Without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page says behind its #."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_link_to_what_is_there() -> None:
    root, found = DOCS.parent, 0
    pages = (root / "README.md", root / "CONTRIBUTING.md", *DOCS.glob("*.md"), *DOCS.glob("*/*.md"))
    for page in pages:
        words = re.sub(r"`[^`]*`", "", prose(page))
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", words):
            if "://" in link:
                continue
            to = page.parent / link if link else page
            assert to.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(to), f"{page.name}: {link}#{anchor}"
            found += bool(anchor)
    assert found > 5


TEXT = """
<!-- file: x -->
```console
$ one
1.5 ms
2e-07
$ two
```
```python
print(1)
```
"""


def test_blocks_are_read() -> None:
    console, python = blocks(TEXT)
    assert console.commands == [("one", "1.5 ms\n2e-07\n"), ("two", "")]
    assert (console.comment, console.line) == ("file: x", 3)
    assert (python.language, python.text, python.comment, python.line) == ("python", "print(1)\n", "", 9)
    with pytest.raises(ValueError, match="line 1 is not closed"):
        list(blocks("```python\nprint(1)"))


def test_what_is_stated_is_compared() -> None:
    assert differences("1.5 ms (a)\n", "1.5 ms (a)\n") == ""
    assert differences("... ms by ...\n", "0.7 ms by 13\n") == ""
    assert differences("f(..., x)\n", "f(1, x)\n")
    assert "printed was:\n0.7 ms" in differences("1.5 ms\n", "0.7 ms\n")
    for printed in ("0.7 s by 13\n", "fast ms by 13\n", "0.7 ms by 13\nmore\n"):
        assert differences("... ms by ...\n", printed)
