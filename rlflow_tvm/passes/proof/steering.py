"""What a rule's conditions say of a draw before all of it is drawn: few draws are legal and within them by chance."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import Attribute
from rlflow_tvm.passes.rule import RewriteRule

_PARAMETERS = frozenset({"lanes", "block", "same", "is_weight"})


class Steering:
    """The conditions of a rule that steer a draw; none without a rule."""

    def __init__(self, rule: RewriteRule | None) -> None:
        conditions = [] if rule is None else [part for whole in rule.conditions for part in whole.conjuncts]
        self._conditions = [(condition, condition.names - _PARAMETERS) for condition in conditions]
        equal = filter(None, (_equation(condition.text) for condition in conditions))
        self._values = [(name, Attribute(value)) for name, value in equal]

    def permit(self, env: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
        """Whether no condition that reads one of the `new` names, and `env` beside them, fails to hold."""
        if not any(names & new.keys() for _, names in self._conditions):
            return True
        both = {**env, **new}
        for condition, names in self._conditions:
            if names & new.keys() and names <= both.keys():
                try:
                    if not condition.value(both):
                        return False
                except RewriteError:
                    continue  # asked again of the whole sample, after the conditions before it
        return True

    def value(self, variable: str, env: Mapping[str, Any]) -> Any:
        """What the variable must be. RewriteError where `env` does not tell."""
        for name, attribute in self._values:
            if name == variable:
                return attribute.value(env)
        raise RewriteError(f"{variable} may be anything")


def _equation(condition: str) -> tuple[str, str] | None:
    """Name and value of a condition `name == value`, which is all of it."""
    match ast.parse(condition, mode="eval").body:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq()], comparators=[value]):
            return name, ast.unparse(value)
    return None


UNSTEERED = Steering(None)
