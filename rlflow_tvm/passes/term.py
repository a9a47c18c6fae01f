"""Terms: the two sides of a substitution rule, as text and as data.

A rule is written as an equation in a small subset of Python's expression syntax (parsed, never executed):

    permute_dims(permute_dims(x, axes=p), axes=q) => permute_dims(x, axes=compose(p, q))
    matmul(x, a), matmul(x, b) => s[0], s[1] where s = split(matmul(x, concat(a, b, axis=-1)), ...)
    Unary[f](unpack(x)) => unpack(Unary[f](x))

Lower-case heads are operators of `ops.OPERATORS`, `Unary[f]` is any operator of a class, remembered as `f`;
bare names are variables, `1.0` and `number(e)` scalar constants; keyword arguments are attributes (literals, variables
or expressions, see `attribute.py`), `**k` stands for all attributes that are not named. `s[0]` is an item of a tuple.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from rlflow_tvm.errors import RewriteError
from rlflow_tvm.passes.attribute import Attribute
from rlflow_tvm.passes.ops import CLASSES, OPERATORS


@dataclass(frozen=True)
class Var:
    """A tensor variable."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Number:
    """A scalar constant."""

    value: float

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Scalar:
    """A scalar constant whose value is an attribute: `number(e)` binds `e` on the left, is computed on the right."""

    attribute: Attribute

    def __str__(self) -> str:
        return f"number({self.attribute})"


@dataclass(frozen=True)
class Item:
    """One item of a tuple-valued term."""

    term: Term
    index: int

    def __str__(self) -> str:
        return f"{self.term}[{self.index}]"


@dataclass(frozen=True)
class Apply:
    """An operator (or, with `member`, any operator of a class) applied to terms.

    `attributes` are the named ones; `rest`, if any, is the name that holds all the others.
    """

    head: str
    args: tuple[Term, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()
    rest: str | None = None
    member: str | None = None

    def __str__(self) -> str:
        head = f"{self.head}[{self.member}]" if self.member else self.head
        parts = [str(a) for a in self.args] + [f"{k}={v}" for k, v in self.attributes]
        if self.rest:
            parts.append(f"**{self.rest}")
        return f"{head}({', '.join(parts)})"


Term = Var | Number | Scalar | Item | Apply


@dataclass(frozen=True)
class Equation:
    """Left terms (roots), right terms in the same number, and the attributes that `where` names."""

    left: tuple[Term, ...]
    right: tuple[Term, ...]
    lets: tuple[tuple[str, Attribute], ...] = ()

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.left))} => {', '.join(map(str, self.right))}"
        if self.lets:
            text += " where " + "; ".join(f"{name} = {value}" for name, value in self.lets)
        return text


def subterms(term: Term) -> Iterator[Term]:
    """`term` and everything below it, parents first."""
    yield term
    if isinstance(term, Apply):
        for arg in term.args:
            yield from subterms(arg)
    elif isinstance(term, Item):
        yield from subterms(term.term)


def depth(term: Term) -> int:
    """Operators on the longest way down (a variable has depth 0)."""
    if isinstance(term, Apply):
        return 1 + max((depth(a) for a in term.args), default=0)
    return 1 + depth(term.term) if isinstance(term, Item) else 0


_MOST_SUBTERMS = 1000
"""Of a term with a name: where each of many names uses the one before twice, the last would be endless."""

_DEEPEST = 100
"""Of a term, in operators: what follows terms down calls itself for each."""


def parse_equation(text: str) -> Equation:
    """Read `LEFT[, LEFT] => RIGHT[, RIGHT] [where name = ...; name = ...]`; RewriteError says what is wrong."""
    sides = text.split("=>")
    if len(sides) != 2:
        raise RewriteError(f"rule text {text!r}: exactly one => is needed between the two sides")
    right_text, _, where = sides[1].partition(" where ")
    terms: dict[str, Term] = {}
    lets: list[tuple[str, Attribute]] = []
    for clause in filter(None, (c.strip() for c in where.split(";"))):
        name, equals, value = clause.partition("=")
        if not equals or not name.strip().isidentifier():
            raise RewriteError(f"rule text {text!r}: where-clause {clause!r} is not of the form name = value")
        named = {*terms, *(each for each, _ in lets)}
        if name.strip() in named:
            raise RewriteError(f"rule text {text!r}: {name.strip()} is said twice behind where")
        tree = _expression(value, text)
        if _is_term(tree):
            terms[name.strip()] = _term(tree, terms, text)
            if sum(1 for _ in islice(subterms(terms[name.strip()]), _MOST_SUBTERMS + 1)) > _MOST_SUBTERMS:
                raise RewriteError(
                    f"rule text {text!r}: {name.strip()} is more than {_MOST_SUBTERMS} terms, written out: shorten it"
                )
        else:
            lets.append((name.strip(), Attribute(ast.unparse(tree))))
    read = {each.id for each in ast.walk(_expression(sides[0], text)) if isinstance(each, ast.Name)}
    if hidden := sorted(read & terms.keys()):
        raise RewriteError(f"rule text {text!r}: {hidden[0]} is a term behind where, and a name on the left: rename it")
    left, right = (_terms(side, terms, text) for side in (sides[0], right_text))
    for term in (*terms.values(), *left, *right):
        if depth(term) > _DEEPEST:
            raise RewriteError(f"rule text {text!r}: a term in it is more than {_DEEPEST} operators deep: shorten it")
    if len(left) != len(right):
        raise RewriteError(f"rule text {text!r}: {len(left)} terms on the left, {len(right)} on the right")
    return Equation(left, right, tuple(lets))


def _expression(text: str, rule: str) -> ast.expr:
    try:
        return ast.parse(" ".join(text.split()), mode="eval").body
    except SyntaxError as error:
        raise RewriteError(f"rule text {rule!r}: cannot be read near {text.strip()!r} ({error.msg})") from None


def _is_term(tree: ast.expr) -> bool:
    if isinstance(tree, ast.Subscript):
        return _is_term(tree.value)
    if not isinstance(tree, ast.Call):
        return False
    return isinstance(tree.func, ast.Subscript) or (isinstance(tree.func, ast.Name) and tree.func.id in OPERATORS)


def _terms(text: str, named: dict[str, Term], rule: str) -> tuple[Term, ...]:
    tree = _expression(text, rule)
    items = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    return tuple(_term(item, named, rule) for item in items)


def _term(tree: ast.expr, named: dict[str, Term], rule: str) -> Term:
    if isinstance(tree, ast.Name):
        return named.get(tree.id, Var(tree.id))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        inner = _term(tree.operand, named, rule)
        if isinstance(inner, Number):
            return Number(-inner.value)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
        try:
            value = float(tree.value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise RewriteError(f"rule text {rule!r}: a number in it is beyond those of 64 bits")
        return Number(value)
    if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant) and isinstance(tree.slice.value, int):
        return Item(_term(tree.value, named, rule), tree.slice.value)
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "number":
        if len(tree.args) != 1 or tree.keywords:
            raise RewriteError(f"rule text {rule!r}: {ast.unparse(tree)}: number takes one attribute expression")
        return Scalar(Attribute(ast.unparse(tree.args[0])))
    if isinstance(tree, ast.Call):
        head, member = _head(tree.func, rule)
        attributes = tuple((k.arg, Attribute(ast.unparse(k.value))) for k in tree.keywords if k.arg is not None)
        rest = [k.value for k in tree.keywords if k.arg is None]
        if len(rest) > 1 or not all(isinstance(r, ast.Name) for r in rest):
            raise RewriteError(f"rule text {rule!r}: at most one **name in {ast.unparse(tree)}")
        args = tuple(_term(arg, named, rule) for arg in tree.args)
        operator = OPERATORS.get(head)
        if operator is not None:
            operator.check_form(len(args), [k for k, _ in attributes], rule)
        else:
            OPERATORS[CLASSES[head][0]].check_form(len(args), [], rule)
            if attributes or rest:
                raise RewriteError(f"rule text {rule!r}: {head}[{member}] stands for its attributes too; name none")
        return Apply(head, args, attributes, rest[0].id if rest else None, member)  # type: ignore[attr-defined]
    raise RewriteError(f"rule text {rule!r}: {ast.unparse(tree)} is no term")


def _head(tree: ast.expr, rule: str) -> tuple[str, str | None]:
    if isinstance(tree, ast.Name) and tree.id in OPERATORS:
        return tree.id, None
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name) and isinstance(tree.slice, ast.Name):
        if tree.value.id not in CLASSES:
            raise RewriteError(f"rule text {rule!r}: no class {tree.value.id}; there are {', '.join(CLASSES)}")
        return tree.value.id, tree.slice.id
    raise RewriteError(f"rule text {rule!r}: no operator {ast.unparse(tree)}; see passes/ops.py for their names")
