"""Attribute expressions: what stands behind `=` in a rule, and in its conditions.

A subset of Python's expressions over integers, strings, tuples and the matched tensors, read with `ast` and
evaluated here by a closed list of nodes and functions: text from a rule file is never executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import relax

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.arithmetic import BINARY, all_multiplied, listed, numbers, product


class NotEvaluable(RewriteError):
    """An expression that does not fit what it is asked of: an axis that a tensor does not have, say."""


class NotComputable(NotEvaluable):
    """An expression that fits, of numbers without a result: a division by zero, or by what is infinite."""


class NotBound(RewriteError):
    """A name that the environment lacks."""


@dataclass(frozen=True)
class Attribute:
    """An attribute expression as text (`[0, 2, 1]`, `p`, `compose(p, q)`, `dim(w, 0) + 1`)."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def variable(self) -> str | None:
        """The name, if the expression is a bare name."""
        tree = _parse(self.text)
        return tree.id if isinstance(tree, ast.Name) else None

    @property
    def names(self) -> frozenset[str]:
        """The names it reads, functions apart."""
        return _names(self.text)

    @property
    def conjuncts(self) -> tuple[Attribute, ...]:
        """What it joins by `and`, all of which must hold: itself, if it joins nothing."""
        match _parse(self.text):
            case ast.BoolOp(op=ast.And(), values=values):
                return tuple(part for value in values for part in Attribute(ast.unparse(value)).conjuncts)
        return (self,)

    def check(self, names: Container[str]) -> None:
        """RewriteError if it is not of an allowed form or reads a name outside `names`: known without a match."""
        for tree in ast.walk(_parse(self.text)):
            odd_call = isinstance(tree, ast.Call) and not isinstance(tree.func, ast.Name)
            stepped = isinstance(tree, ast.Slice) and tree.step is not None
            if odd_call or stepped or not isinstance(tree, _FORMS):
                raise RewriteError(
                    f"attribute expression {self.text!r}: {ast.unparse(tree)!r} is not allowed in a rule"
                )
            if isinstance(tree, ast.Name) and tree.id not in names and tree.id not in FUNCTIONS:
                raise RewriteError(f"attribute expression {self.text!r}: {tree.id!r} is not bound by the left side")

    def value(self, env: Mapping[str, Any]) -> Any:
        """Its value where `env` holds tensors (Relax expressions), attribute values and rule parameters.

        NotBound for a name that `env` lacks, NotEvaluable for values that the expression does not take.
        """
        try:
            return _compiled(self.text)(env)
        except ArithmeticError as error:
            raise NotComputable(f"{self.text} cannot be evaluated ({error})") from error
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise NotEvaluable(f"{self.text} cannot be evaluated ({error})") from error


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise RewriteError(f"attribute expression {text!r} cannot be read") from None


@lru_cache(maxsize=4096)
def _names(text: str) -> frozenset[str]:
    return frozenset(tree.id for tree in ast.walk(_parse(text)) if isinstance(tree, ast.Name)) - FUNCTIONS.keys()


def shape(tensor: relax.Expr) -> tuple[int, ...]:
    """Static shape of a tensor expression."""
    return _shape_of_variable(tensor) if isinstance(tensor, relax.Var) else _shape(tensor)


def _shape(tensor: relax.Expr) -> tuple[int, ...]:
    ty = getattr(tensor, "ty", None)
    if isinstance(ty, relax.TensorType) and ty.shape is not None:
        return tuple(int(extent) for extent in ty.shape.values)
    raise RewriteError(f"a tensor of static shape was expected, not {ty or tensor}")


_shape_of_variable = lru_cache(maxsize=1 << 16)(_shape)  # a variable's type stays, and is asked for again and again


def dim(tensor: relax.Expr, axis: int) -> int:
    return shape(tensor)[axis]


def dtype(tensor: relax.Expr) -> str:
    return str(tensor.ty.dtype)


def is_float(tensor: relax.Expr) -> bool:
    return "float" in dtype(tensor)


def compose(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Axes of one permutation that does `first`, then `second`."""
    return tuple(first[axis] for axis in second)


def inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def swap_last(rank: int) -> tuple[int, ...]:
    """The permutation that transposes the last two of `rank` axes."""
    return (*numbers(rank - 2), rank - 1, rank - 2)


def broadcasts_along_channels(small: tuple[int, ...], big: tuple[int, ...]) -> bool:
    """Whether `small` is `big` or (1, C, 1, 1) beside (N, C, H, W): it packs by channels as `big` does."""
    return (
        len(small) == len(big) == 4 and small[1] == big[1] and all(s in (1, b) for s, b in zip(small, big, strict=True))
    )


def moves_only_units(extents: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether transposing a tensor of these extents by `axes` leaves its elements in the same order."""
    moved = [axis for axis in axes if extents[axis] != 1]
    return moved == sorted(moved)


def permuted(extents: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extents[axis] for axis in axes)


def without(extents: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The extents but for one axis."""
    axis %= len(extents)
    return (*extents[:axis], *extents[axis + 1 :])


def replaced(extents: tuple[int, ...], axis: int, *others: int) -> tuple[int, ...]:
    """The extents with `others` in place of one axis."""
    axis %= len(extents)
    return (*extents[:axis], *others, *extents[axis + 1 :])


def normal(axes: int | tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """Axes counted from the front, in order; None are all."""
    if axes is None:
        return numbers(rank)
    return tuple(sorted(axis % rank for axis in ((axes,) if isinstance(axes, int) else axes)))


def reduced(extents: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    """What is left of the extents when the axes are reduced."""
    gone = normal(axes, len(extents))
    return tuple(1 if i in gone else extent for i, extent in enumerate(extents) if keepdims or i not in gone)


def fits(small: tuple[int, ...], big: tuple[int, ...]) -> bool:
    """Whether `small` broadcasts to `big`, which stays as it is."""
    return len(small) <= len(big) and all(s in (1, b) for s, b in zip(small[::-1], big[::-1], strict=False))


def constant_along(small: tuple[int, ...], axes: tuple[int, ...], rank: int) -> bool:
    """Whether what is `small` is the same along these axes of what it broadcasts to, of `rank` axes."""
    padded = product((1,), rank - len(small)) + small
    return len(small) <= rank and all(padded[axis] == 1 for axis in normal(axes, rank))


def expanded(extents: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The extents with axes of extent 1 put in, at `axes` of the result."""
    rest = iter(extents)
    return tuple(1 if axis in axes else next(rest) for axis in range(len(extents) + len(axes)))


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two tensors' element-wise result."""
    return tuple(np.broadcast_shapes(a, b))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "shape": shape,
    "dim": dim,
    "dtype": dtype,
    "is_float": is_float,
    "rank": lambda tensor: len(shape(tensor)),
    "compose": compose,
    "inverse": inverse,
    "swap_last": swap_last,
    "prod": all_multiplied,
    "len": len,
    "min": min,
    "max": max,
    "range": numbers,
    "nchwc": lambda block: f"NCHW{block}c",
    "oihwo": lambda block: f"OIHW{block}o",
    "broadcasts_along_channels": broadcasts_along_channels,
    "moves_only_units": moves_only_units,
    "permuted": permuted,
    "without": without,
    "replaced": replaced,
    "normal": normal,
    "reduced": reduced,
    "fits": fits,
    "constant_along": constant_along,
    "expanded": expanded,
    "broadcast": broadcast,
    "places": lambda axes, order: tuple(sorted(order.index(axis) for axis in axes)),
    "picked": lambda axes, order: tuple(sorted(order[axis] for axis in axes)),
    "disjoint": lambda a, b: set(a).isdisjoint(b),
    "sorted": lambda values: tuple(sorted(values)),
}

_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}

_FORMS = (
    ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.Call, ast.expr_context,
    ast.UnaryOp, ast.USub, ast.Not, ast.BinOp, *BINARY, ast.BoolOp, ast.boolop, ast.Compare, *_COMPARE,
)  # fmt: skip


Env = Mapping[str, Any]
Compiled = Callable[[Env], Any]


@lru_cache(maxsize=4096)
def _compiled(text: str) -> Compiled:
    return _compile(_parse(text))


def _compile(tree: ast.expr) -> Compiled:
    """The expression as nested closures: conditions are asked thousands of times a second."""
    match tree:
        case ast.Constant(value=value):
            return lambda env: value
        case ast.Name(id=name):
            return lambda env: _bound(env, name)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            parts = [_compile(item) for item in items]
            return lambda env: listed([part(env) for part in parts])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            positive = _compile(operand)
            return lambda env: -positive(env)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            negated = _compile(operand)
            return lambda env: not negated(env)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            function, first, second = BINARY[type(op)], _compile(left), _compile(right)
            return lambda env: function(first(env), second(env))
        case ast.BoolOp(op=op, values=values):
            parts, quantifier = [_compile(value) for value in values], all if isinstance(op, ast.And) else any
            return lambda env: quantifier(part(env) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(o) in _COMPARE for o in ops):
            return _compile_comparison([_compile(part) for part in (left, *comparators)], ops)
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=None)):
            sliced, bounds = _compile(value), [None if b is None else _compile(b) for b in (lower, upper)]
            return lambda env: sliced(env)[slice(*(None if bound is None else bound(env) for bound in bounds))]
        case ast.Subscript(value=value, slice=index):
            indexed, place = _compile(value), _compile(index)
            return lambda env: indexed(env)[place(env)]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _compile_call(name, [_compile(arg) for arg in args])
    raise RewriteError(f"attribute expression {ast.unparse(tree)!r}: that form is not allowed in a rule")


def _compile_comparison(parts: list[Compiled], ops: list[ast.cmpop]) -> Compiled:
    compare = [_COMPARE[type(op)] for op in ops]
    if len(compare) == 1:
        (only,), (first, second) = compare, parts
        return lambda env: only(first(env), second(env))

    def chained(env: Env) -> bool:
        values = [part(env) for part in parts]
        return all(holds(a, b) for holds, a, b in zip(compare, values, values[1:], strict=False))

    return chained


def _bound(env: Env, name: str) -> Any:
    try:
        return env[name]
    except KeyError:
        raise NotBound(f"attribute variable {name!r} is not bound by the left side") from None


def _compile_call(name: str, arguments: list[Compiled]) -> Compiled:
    """A call of one of the functions, which no variable hides, or of a function among the rule set's parameters."""
    function = FUNCTIONS.get(name)
    if function is None:
        return lambda env: _parameter(env, name)(*[argument(env) for argument in arguments])
    if len(arguments) == 1:
        (only,) = arguments
        return lambda env: function(only(env))
    return lambda env: function(*[argument(env) for argument in arguments])


def _parameter(env: Env, name: str) -> Callable[..., Any]:
    function = env.get(name)
    if not callable(function) or isinstance(function, relax.Expr):
        raise RewriteError(f"no attribute function {name!r}; there are {', '.join(sorted(FUNCTIONS))}")
    return function
