"""The package's errors: one class a room, all of them `RlflowError`.

A message is one line that names the thing and the remedy; the commands print it and exit with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Iterator


class RlflowError(Exception):
    """Base of every error that a user can mend."""

    exit_code = 1


def kinds(of: type[RlflowError] = RlflowError) -> Iterator[type[RlflowError]]:
    """All kinds of an error, those of its kinds included."""
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


class UsageError(RlflowError):
    """The command or call was put together wrongly (unknown target, impossible option)."""

    exit_code = 2


class FrontendError(RlflowError):
    """The model could not be read, cleaned or imported."""


class RewriteError(RlflowError):
    """A rule could not be applied, or a rewritten module is not what it should be."""


class UncomparableError(RewriteError):
    """Nothing can be told by a module's outputs, whatever was made of it."""


class PlanError(RlflowError):
    """A plan file is unreadable, or belongs to another module or rule set."""


class KernelError(RlflowError):
    """A graph could not be lowered or a kernel could not be scheduled."""


class CostError(RlflowError):
    """A cost was asked for that cannot be given (unusable database, no device)."""


class EnvError(RlflowError):
    """An environment was used out of order or built from unusable parts."""


class AgentError(RlflowError):
    """A checkpoint or training configuration is unusable."""


class Ended(SystemExit):
    """The process is to end, with this exit code, as a signal asked for; a class of its own, that leaves what TVM calls
    back as what it was."""

    def __init__(self, code: int | str) -> None:
        super().__init__(int(code))


class ReportError(RlflowError):
    """A report cannot be made of what is there (no run folder, a damaged log, a missing model)."""
