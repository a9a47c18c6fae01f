"""What attribute expressions reckon with: Python's operators, of which none can be led to fill the memory or never to
end. A rule file may come from anywhere."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

_LONGEST = 4096
"""Of the tuples and texts that an expression makes, at most."""
_MOST_BITS = 4096
"""Of whole numbers, and of what a fraction is made of, at most."""
_ITEMS = (tuple, str, bytes)


def numbers(*bounds: int) -> tuple[int, ...]:
    """Python's range, as a tuple."""
    if range(*bounds)[_LONGEST:]:
        raise ValueError(f"more than {_LONGEST} numbers")
    return tuple(range(*bounds))


def listed(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values as a tuple, which may hold tuples, but these none: each of them may be of the greatest length."""
    if any(isinstance(inner, tuple) for value in values if isinstance(value, tuple) for inner in value):
        raise ValueError("more than 4096 items, or may be: tuples in tuples in tuples")
    return tuple(values)


def product(a: Any, b: Any) -> Any:
    """Of numbers, or items so many times."""
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of more than {_MOST_BITS} bits")
    for items, count in ((a, b), (b, a)):
        if isinstance(items, _ITEMS) and isinstance(count, int) and len(items) * count > _LONGEST:
            raise ValueError(f"more than {_LONGEST} items")
    return a * b


def all_multiplied(values: tuple[Any, ...]) -> Any:
    """Their product, 1 of none."""
    found: Any = 1
    for value in values:
        found = product(found, value)
    return found


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, _ITEMS) and isinstance(b, _ITEMS) and len(a) + len(b) > _LONGEST:
        raise ValueError(f"more than {_LONGEST} items")
    return a + b


def _remainder(a: Any, b: Any) -> Any:
    if isinstance(a, str | bytes):
        raise TypeError("a text is not formatted")  # as wide as it asks for
    return a % b


def _quotient(a: Any, b: Any) -> Fraction:
    """Exact: of numbers that become scalar constants."""
    if isinstance(a, _ITEMS) or isinstance(b, _ITEMS):
        raise TypeError("no number")  # Fraction reads texts, and 1e999999999 is one
    return Fraction(a) / Fraction(b)


def _bits(value: Any) -> int:
    if isinstance(value, Fraction):
        return max(value.numerator.bit_length(), value.denominator.bit_length())
    return value.bit_length() if isinstance(value, int) else 0


def _bounded(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Where one of the operands is a fraction, both of whose parts grow with each operator."""

    def bounded(a: Any, b: Any) -> Any:
        if (isinstance(a, Fraction) or isinstance(b, Fraction)) and _bits(a) + _bits(b) > _MOST_BITS:
            raise ValueError(f"a fraction of more than {_MOST_BITS} bits")
        return function(a, b)

    return bounded


BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: _bounded(_sum),
    ast.Sub: _bounded(operator.sub),
    ast.Mult: _bounded(product),
    ast.FloorDiv: _bounded(operator.floordiv),
    ast.Mod: _bounded(_remainder),
    ast.Div: _bounded(_quotient),
}
"""By the operator's class in Python's syntax tree; ArithmeticError, TypeError or ValueError where there is no result or
too large a one."""
