"""What terms are evaluated over: prime fields, exact rationals, machine integers, shapes alone, degrees.

A tensor is a tuple of NumPy arrays of one shape, its planes; what a domain's planes are, it says. Moving elements
(reshape, transpose, ...) is the same in every domain; arithmetic is the domain's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod
from typing import Any, Protocol

import numpy as np

from rlflow_tvm.errors import RewriteError

Plane = np.ndarray
Tensor = tuple[Plane, ...]
Shape = tuple[int, ...]

P = 2147483579
Q = 1073741789
"""Primes with P = 2 Q + 1: the squares modulo P are a group of order Q, on which exponents live."""


class Undefined(RewriteError):
    """A value that the drawn tensors do not give: a division by zero. Others have to be drawn."""


class Unfit(Undefined):
    """Shapes, attributes or element types that the operator does not take, or of which a domain knows nothing."""


_ROOM = 1 << 20
"""Elements of one tensor, and products of one convolution, at most: samples are small, and what is not is a mistake."""


def check_room(*extents: int) -> None:
    """`Unfit` for what would fill the memory."""
    if prod(extents) > _ROOM:
        raise Unfit(f"{' x '.join(map(str, extents))} are too many elements")


class Domain(Protocol):
    """Arithmetic on tensors. `name` is what a proof records."""

    name: str

    def draw(self, shape: Shape, rng: np.random.Generator) -> Tensor: ...

    def constant(self, value: Fraction, like: Tensor) -> Tensor:
        """A scalar of `like`'s element type."""
        ...

    def add(self, a: Tensor, b: Tensor) -> Tensor: ...

    def multiply(self, a: Tensor, b: Tensor) -> Tensor: ...

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        """`Undefined` where an element of `b` is zero."""
        ...

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Sums over `axes`, which are dropped."""
        ...

    def maximum(self, a: Tensor, b: Tensor) -> Tensor: ...

    def minimum(self, a: Tensor, b: Tensor) -> Tensor: ...

    def exp(self, x: Tensor) -> Tensor: ...

    def function(self, name: str, *xs: Tensor) -> Tensor:
        """A function of which nothing is known but that it is one: random values, the same for the same arguments."""
        ...

    def cast(self, x: Tensor, dtype: str) -> Tensor: ...


def each(move: Callable[..., Plane], *tensors: Tensor) -> Tensor:
    """`move`, which only moves elements, applied plane by plane."""
    return tuple(move(*planes) for planes in zip(*tensors, strict=True))


def shape_of(x: Tensor) -> Shape:
    return x[0].shape


def mixed(x: np.ndarray, key: int) -> np.ndarray:
    """SplitMix64 of each element: uint64, evenly spread."""
    with np.errstate(over="ignore"):
        x = x.astype(np.uint64) + np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _key(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _power(base: np.ndarray, exponent: np.ndarray | int, modulus: int) -> np.ndarray:
    """Element by element, exponents not negative."""
    base, exponent = np.broadcast_arrays(np.asarray(base, np.int64), np.asarray(exponent, np.int64))
    result, base, exponent = np.ones_like(base), base % modulus, exponent.copy()
    while exponent.any():
        result = np.where(exponent & 1, result * base % modulus, result)
        base = base * base % modulus
        exponent >>= 1
    return result


_EXACT = ("float32", "float64")
"""Types that hold what the samples' own, float32, holds."""


def _unrounded(x: Tensor, dtype: str) -> Tensor:
    """`x`, of which exact arithmetic knows the value where nothing is rounded; which type it is of, `Shapes` says."""
    if dtype not in _EXACT:
        raise Unfit(f"what is rounded to {dtype} is another number")
    return x


class PrimeFields:
    """Planes: residues modulo P, and modulo Q for exponents, as in Mirage: exp(x) is a generator to the power of x
    modulo Q, another one for each seed, so exp(a + b) = exp(a) exp(b), and exp(1) is no number that a rule could know.
    What has been an exponential has no residue modulo Q: its second plane is a function of the first, and another
    exponential of it is one of which nothing is known.

    Order has no meaning here: a maximum is `Undefined`.
    """

    name = "prime fields"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        # a square other than 1: of order Q modulo P
        self._generator = pow(2 + _key(seed, "generator") % (P - 3), 2, P)

    def draw(self, shape: Shape, rng: np.random.Generator) -> Tensor:
        return rng.integers(0, P, shape), rng.integers(0, Q, shape)

    def constant(self, value: Fraction, like: Tensor) -> Tensor:
        return tuple(
            np.array(value.numerator * pow(value.denominator, -1, prime) % prime, np.int64) for prime in (P, Q)
        )

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (a[0] + b[0]) % P, (a[1] + b[1]) % Q

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return a[0] * b[0] % P, a[1] * b[1] % Q

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        if not (b[0].all() and b[1].all()):
            raise Undefined("a division by zero")
        return self.multiply(a, (_power(b[0], P - 2, P), _power(b[1], Q - 2, Q)))

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return x[0].sum(axes, dtype=np.int64) % P, x[1].sum(axes, dtype=np.int64) % Q

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        raise Undefined("a prime field has no order")

    minimum = maximum

    def exp(self, x: Tensor) -> Tensor:
        # the second plane of an exponential is mixed from the first, so exp(exp(x)) reads a residue that nothing
        # relates to exp(x)'s value: a function of it
        first = _power(np.array(self._generator), x[1], P)
        return first, (mixed(first, _key(self._seed, "exponent")) % np.uint64(Q)).astype(np.int64)

    def function(self, name: str, *xs: Tensor) -> Tensor:
        state = mixed(np.zeros((), np.int64), _key(self._seed, name))
        for x in xs:
            state = mixed(state ^ x[0].astype(np.uint64), 1)
        return (state % np.uint64(P)).astype(np.int64), (mixed(state, 2) % np.uint64(Q)).astype(np.int64)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return _unrounded(x, dtype)


_OF_ALL_MAGNITUDES = tuple(1 << bits for bits in range(21))


class Rationals:
    """One plane, of Python's integers and fractions: exact, and ordered. Exponentials and roots are functions of which
    nothing is known but that they are positive, of others not even that; of all some are less than one."""

    name = "rationals"

    def __init__(self, seed: int = 0, extent: int = 1 << 20, parts: Sequence[int] = _OF_ALL_MAGNITUDES) -> None:
        """`extent`: draws lie within it of zero. `parts`: into which of whole numbers they are, by default such that
        draws are of all magnitudes; powers of two, as sums of others have ever larger denominators."""
        self._seed, self._extent, self._parts = seed, extent, tuple(parts)

    def draw(self, shape: Shape, rng: np.random.Generator) -> Tensor:
        wholes = rng.integers(-self._extent, self._extent + 1, shape).astype(object)
        return (_object(_DIVIDE(wholes, rng.choice(self._parts, shape).astype(object))),)

    def constant(self, value: Fraction, like: Tensor) -> Tensor:
        plane = np.empty((), object)
        plane[()] = value.numerator if value.denominator == 1 else value
        return (plane,)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (_object(np.add(a[0], b[0])),)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return (_object(np.multiply(a[0], b[0])),)

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        try:
            return (_object(_DIVIDE(a[0], b[0])),)
        except ZeroDivisionError:
            raise Undefined("a division by zero") from None

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return (_object(x[0].sum(axes)),)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return (_object(np.maximum(a[0], b[0])),)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return (_object(np.minimum(a[0], b[0])),)

    def exp(self, x: Tensor) -> Tensor:
        above, below = (self._hashed(part, True, x) for part in ("exp", "1 / exp"))
        return self.divide(above, below)

    def function(self, name: str, *xs: Tensor) -> Tensor:
        return self._hashed(name, name == "sqrt", *xs)

    def _hashed(self, name: str, positive: bool, *xs: Tensor) -> Tensor:
        def value(*arguments: Fraction | int) -> Fraction | int:
            rest, sign = divmod(_key(self._seed, name, *map(str, arguments)), 2)
            rest, part = divmod(rest, len(self._parts))
            size = _divide(1 + rest % self._extent, self._parts[part])
            return size if positive or sign else -size

        return (_object(np.frompyfunc(value, len(xs), 1)(*(x[0] for x in xs))),)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return _unrounded(x, dtype)


def _divide(a: Any, b: Any) -> Any:
    quotient = Fraction(a) / b
    return quotient.numerator if quotient.denominator == 1 else quotient


_DIVIDE = np.frompyfunc(_divide, 2, 1)


def _object(value: Any) -> np.ndarray:
    """NumPy unwraps an array of objects without axes: wrapped again."""
    if isinstance(value, np.ndarray):
        return value
    plane = np.empty((), object)
    plane[()] = value
    return plane


class MachineIntegers:
    """One plane of a machine's integers, which wrap round; of each tensor's own type. Division and functions of
    reals have no meaning here: `Undefined`."""

    def __init__(self, dtype: str) -> None:
        self.name, self._dtype = dtype, dtype

    def draw(self, shape: Shape, rng: np.random.Generator) -> Tensor:
        bounds = np.iinfo(self._dtype)
        return (rng.integers(bounds.min, bounds.max + 1, shape).astype(self._dtype),)

    def constant(self, value: Fraction, like: Tensor) -> Tensor:
        if value.denominator != 1:
            raise Undefined(f"{value} is no integer")
        return (np.array(int(value)).astype(like[0].dtype),)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(a[0] + b[0]),)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(a[0] * b[0]),)

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        raise Undefined("integers are not divided")

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return (np.asarray(x[0].sum(axes, dtype=x[0].dtype)),)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(np.maximum(a[0], b[0])),)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(np.minimum(a[0], b[0])),)

    def exp(self, x: Tensor) -> Tensor:
        raise Undefined("exp is not for integers")

    def function(self, name: str, *xs: Tensor) -> Tensor:
        raise Undefined(f"{name} is not for integers")

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return (x[0].astype(dtype),)


class Shapes:
    """One plane of zeros, of the element type that the tensors are to have: what is left is shapes and types."""

    name = "shapes"

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def draw(self, shape: Shape, rng: np.random.Generator | None = None) -> Tensor:
        return (np.zeros(shape, self._dtype),)

    def constant(self, value: Fraction, like: Tensor) -> Tensor:
        dtype = like[0].dtype
        if dtype.kind != "f" and (value.denominator != 1 or not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max):
            raise Undefined(f"{value} is no {dtype}")
        return (np.zeros((), dtype),)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (np.asarray(a[0] + b[0]),)

    multiply = divide = maximum = minimum = add

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return (np.asarray(x[0].sum(axes, dtype=x[0].dtype)),)

    def exp(self, x: Tensor) -> Tensor:
        return x

    def function(self, name: str, *xs: Tensor) -> Tensor:
        return (np.zeros(np.broadcast_shapes(*map(shape_of, xs)), xs[0][0].dtype),)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return (x[0].astype(dtype),)


class Degrees:
    """Planes: degrees of numerator and denominator, at most, as polynomials in the drawn elements and in the values
    of functions; what the Schwartz-Zippel lemma needs. Of exponentials, which are no polynomials, their exponents'."""

    name = "degrees"

    def draw(self, shape: Shape, rng: np.random.Generator | None = None) -> Tensor:
        return np.ones(shape, np.int64), np.zeros(shape, np.int64)

    def constant(self, value: Fraction, like: Tensor) -> Tensor:
        return np.zeros((), np.int64), np.zeros((), np.int64)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return np.asarray(np.maximum(a[0] + b[1], b[0] + a[1])), np.asarray(a[1] + b[1])

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return np.asarray(a[0] + b[0]), np.asarray(a[1] + b[1])

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return np.asarray(a[0] + b[1]), np.asarray(a[1] + b[0])

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        below = np.asarray(x[1].sum(axes))
        return np.asarray((x[0] - x[1]).max(axes)) + below, below

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return self.add(a, b)

    minimum = maximum

    def exp(self, x: Tensor) -> Tensor:
        return x

    def function(self, name: str, *xs: Tensor) -> Tensor:
        # a value that is new, unless other arguments are met with the same values by chance
        argument = sum((np.asarray(plane) for x in xs for plane in x), start=np.zeros((), np.int64))
        return np.maximum(np.asarray(argument), 1), np.zeros(np.shape(argument), np.int64)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether tensors are equal, in shape, element type and every element of the first plane."""
    return len(a) == len(b) and all(
        x[0].shape == y[0].shape and x[0].dtype == y[0].dtype and bool(np.all(x[0] == y[0]))
        for x, y in zip(a, b, strict=True)
    )
