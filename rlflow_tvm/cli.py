"""What the commands share: reading arguments, progress, JSON files, and errors as one line with an exit code."""

from __future__ import annotations

import functools
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlflow_tvm.errors import RlflowError, UsageError
from rlflow_tvm.signals import ended_in_order

if TYPE_CHECKING:
    import argparse

    import tvm

    from rlflow_tvm.cost import RpcDevices

P = ParamSpec("P")
T = TypeVar("T")

Recognise = Callable[[str], bool]
"""Whether an argument is a value of the option before it."""

console = Console(stderr=True)
"""For progress and messages; results go to standard output."""
_TOLD_EVERY_SECS = 60.0

ZOO_PREFIX = "zoo:"

RpcOption = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT",
        help="Measure kernels on the machines that TVM's RPC tracker there lists under --rpc-key; --target is theirs.",
    ),
]
SEARCHES = ("greedy", "backtracking", "beam", "random", "random-restarts", "family", "variable-depth")
DEFAULT_SEARCH = "family"
"""The keys of `rlflow_tvm.search.SEARCHES`, and its default: importing that takes a second, which `--help` does not."""
SEARCH_HELP = f"{', '.join(SEARCHES[:-1])} or {SEARCHES[-1]}."
TARGET_HELP = "llvm (this machine), cuda (its GPU) or a TVM target as JSON."
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="N|TIME",
        help="What the search may spend: moves tried, as 20000, or a time, as 90s, 5m or 2h; by default its own.",
    ),
]
PredictOption = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="How much of a graph's time may be predicted, not measured, on the way."),
]
RulesOption = Annotated[
    Path | None,
    typer.Option(help="Rules beside the catalogue: a file that `rlflow_tvm.rules verify --record` has proved."),
]
RpcKeyOption = Annotated[str | None, typer.Option("--rpc-key", help="The key of the machines to measure on.")]


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Print a `RlflowError` as one line and exit with its code; Ctrl-C exits with 130, signals as the system has it."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if console.is_terminal:
            logging.basicConfig(
                level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
            )
        else:  # whole lines: of one that is folded nobody can take a path
            logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        try:
            with ended_in_order():
                return command(*args, **kwargs)
        except RlflowError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapped


@contextmanager
def errors_of(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A `RlflowError` as an error of that parser's command: one line, and exit code 2."""
    try:
        yield
    except RlflowError as error:
        parser.error(str(error))


def parse_target(text: str) -> tvm.target.Target:
    """`llvm` (this machine), `cuda` (its GPU) or JSON such as `{"kind": "llvm", "mcpu": "znver4", "num-cores": 8}`."""
    from rlflow_tvm.kernels import as_target

    if not text.lstrip().startswith("{"):
        return as_target(text)
    try:
        return as_target(json.loads(text))
    except json.JSONDecodeError as error:
        raise UsageError(f"--target {text}: not valid JSON ({error})") from None


def parse_rpc(address: str | None, key: str | None) -> RpcDevices | None:
    """The machines to measure on, None for this one. UsageError for one option without the other, or no HOST:PORT."""
    if address is None and key is None:
        return None
    if address is None or not key:
        raise UsageError("--rpc HOST:PORT and --rpc-key KEY go together: give both, or neither to measure here")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rpc {address}: HOST:PORT is expected, as in --rpc 192.168.0.7:9190")
    from rlflow_tvm.cost import RpcDevices

    return RpcDevices(host, int(port), key)


def parse_shapes(texts: list[str]) -> dict[str, tuple[int, ...]]:
    """`NAME=1,3,224,224` once or more."""
    from rlflow_tvm.frontend import parse_shape

    shapes = {}
    for text in texts:
        try:
            name, extents = parse_shape(text)
        except ValueError as error:
            raise UsageError(f"--shape {text}: {error}") from None
        shapes[name] = extents
    return shapes


def parse_settings(text: str | None) -> dict[str, Any]:
    """Of an agent, as a JSON object or the file of one; none without a text."""
    if text is None:
        return {}
    where = "--settings"
    if not text.lstrip().startswith("{"):
        where = f"--settings {text}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{where}: cannot be read ({reason}): give a JSON object, or a file of one") from None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise UsageError(f'{where}: an object is expected, such as {{"learning_rate": 0.0003, "hidden": 128}}')
    return settings


def model_path(model: str) -> Path:
    """The file that MODEL means: a path, or `zoo:NAME` for a bundled or locally built evaluation model."""
    from rlflow_tvm.frontend import zoo

    return zoo.path(model.removeprefix(ZOO_PREFIX)) if model.startswith(ZOO_PREFIX) else Path(model)


def name_and_shapes(model: str, texts: list[str]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """MODEL without the shapes of inputs behind it (`model.onnx@image=1,3,224,224`), and those, which stand before what
    `texts` say (see `parse_shapes`)."""
    from rlflow_tvm.frontend import split_shapes

    name, own = split_shapes(model)
    return name, parse_shapes(texts) | own


def check_writable(*paths: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """UsageError now rather than an error after long work, if a path is a folder or a device, its folder does not exist
    or cannot be written, it is one of `inputs`, which are read, or two are of one file."""
    read = {Path(os.path.realpath(path)) for path in inputs if path is not None}
    seen = set()
    for path in paths:
        if path is None:
            continue
        real = Path(os.path.realpath(path))  # what a link leads to is what is written
        try:
            mode = real.lstat().st_mode
        except FileNotFoundError:
            mode = None
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror}); give another file") from None
        if mode is not None and stat.S_ISDIR(mode):
            raise UsageError(f"{path}: is a folder; give the name of a file")
        if mode is not None and not stat.S_ISREG(mode):
            raise UsageError(f"{path}: is no regular file, and a new one would take its place; give another name")
        if not os.path.isdir(real.parent) or not os.access(real.parent, os.W_OK):
            raise UsageError(f"{path}: the folder {real.parent} does not exist or cannot be written; make it first")
        if real in read:
            raise UsageError(f"{path}: is read too, and what is written would take its place; give another name")
        if real in seen:
            raise UsageError(f"{path}: is given for two things to write; give each a file of its own")
        seen.add(real)


def check_folder(folder: Path, *names: str, inputs: Iterable[Path | None] = ()) -> None:
    """UsageError now rather than an error after long work, where files of these names cannot be put into `folder`,
    which need not be there yet, or are `inputs`."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file; give a folder")
    check_writable(*([folder / name for name in names] if folder.is_dir() else [folder]), inputs=inputs)


def write_json(path: Path | None, data: Any) -> None:
    """Write `data` to `path` atomically; nothing without a path. RlflowError if it cannot be written."""
    if path is None:
        return
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def write_text(path: Path | None, text: str) -> None:
    """Write `text` to `path` atomically; nothing without a path. RlflowError if it cannot be written."""
    if path is None:
        return
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")  # a file's name in it may be any bytes


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`, which it becomes in the end: whole or not at all. RlflowError where not."""
    real = Path(os.path.realpath(path))
    temporary = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(real)
    except OSError as error:
        raise RlflowError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def milliseconds(secs: float) -> str:
    return f"{secs * 1e3:.3f} ms"


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """A bar on standard error, where that is no terminal a line a minute; the result takes (done, total[, text]), and
    without these `aside`, of what is under way meanwhile."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(title), total=None, text="")  # a path may hold what rich takes for markup
        told_at, known, told = time.monotonic(), "", ""

        def update(done: int | None = None, total: int | None = None, text: str = "", *, aside: str = "") -> None:
            nonlocal told_at, known, told
            if done is not None:
                known, told = f" {done} of {total}", text
            line = f"{told}  {aside}".strip()
            progress.update(task, completed=done, total=total, text=escape(line))
            if not console.is_terminal and time.monotonic() - told_at >= _TOLD_EVERY_SECS:
                console.print(f"{title}:{known} {line}".rstrip(), markup=False, soft_wrap=True)
                told_at = time.monotonic()

        yield update


def kernels_told(bar: Callable[..., None]) -> Callable[[int, int], None]:
    """A `CostModel`'s `on_progress`, told beside the work that asks for prices."""
    return lambda done, total: bar(aside=f"(kernel {done} of {total})")


def run(command: Callable[..., None], lists: Mapping[str, Recognise] | None = None) -> None:
    """Run a module's command; a bug shows Python's own traceback, short enough to report.

    `lists` names options that take several values behind one mention, and how one is told from the command's argument.
    """
    _any_name_printed()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app(args=spread(sys.argv[1:], lists or {}))


def run_group(title: str, commands: Mapping[str, Callable[..., None]]) -> None:
    """Run one of several commands of a module, by its name."""
    _any_name_printed()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=title)
    for name, command in commands.items():
        app.command(name)(command)
    app()


def _any_name_printed() -> None:
    """A file's name may be any bytes: what is no text in it is printed as it was given, rather than end the command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")


def spread(args: list[str], lists: Mapping[str, Recognise]) -> list[str]:
    """`--against a b` as `--against a --against b`, the form that the parser knows.

    Of a command with one argument of its own: once that has been given, whatever stands behind such an option is its
    value, right or wrong; before, what is recognised as one.
    """
    result: list[str] = []
    option, given, first = "", False, False
    for arg in args:
        if first:  # the value right behind an option's name
            first = False
        elif arg.startswith("-"):
            option = arg if arg in lists else ""
            first = "=" not in arg
        elif option and (given or lists[option](arg)):
            result.append(option)
        else:
            option, given = "", True
        result.append(arg)
    return result
