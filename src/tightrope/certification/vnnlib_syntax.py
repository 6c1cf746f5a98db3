"""The text of VNN-LIB files: brackets, declarations and linear terms, with line numbers.

Numbers are read as the decimals they are, never through floating point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from tightrope.errors import UserError, shorten

LARGEST_EXPONENT = 126  # of two: float32 holds what lies below 2 ** 128
DEEPEST = 200  # brackets inside brackets

_TOKEN = re.compile(r";[^\n]*|\n|[()]|[^\s();]+")
# The longest float64 has 1074 digits behind the point; longer exponents would fill the memory.
_NUMBER = re.compile(r"[-+]?(\d{1,999}(\.\d{0,1999})?|\.\d{1,1999})([eE][-+]?\d{1,3})?")
_ONE, _MINUS_ONE = Fraction(1), Fraction(-1)
_VARIABLE = re.compile(r"([XY])_(0|[1-9]\d{0,8})")


class Form(list["Form | str"]):
    """A pair of brackets with what it holds, and the line where it opens."""

    __slots__ = ("line",)

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line

    @property
    def head(self) -> str:
        """The first word, or nothing."""
        return self[0] if self and isinstance(self[0], str) else ""


def syntax_error(line: int, message: str) -> UserError:
    """Return the error for something wrong in a line; the reader adds the file's name."""
    return UserError(f"line {line}: {message}")


def read_forms(text: str) -> Form:
    """Return the outermost brackets of a text, in one form."""
    line = 1
    stack = [Form(1)]
    for token in _TOKEN.findall(text):
        if token == "(":
            if len(stack) > DEEPEST:
                raise syntax_error(line, f"more than {DEEPEST} brackets inside each other")
            inner = Form(line)
            stack[-1].append(inner)
            stack.append(inner)
        elif token == ")":
            if len(stack) == 1:
                raise syntax_error(line, "a closing bracket without an opening one")
            stack.pop()
        elif token == "\n":
            line += 1
        elif token[0] != ";":
            if len(stack) == 1:
                raise syntax_error(line, f"expected '(', got {shorten(token)}")
            stack[-1].append(token)
    if len(stack) > 1:
        raise syntax_error(stack[-1].line, "the bracket that opens here is never closed")
    return stack[0]


class Variable(NamedTuple):
    """An input `X_i` or an output `Y_i`."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}_{self.number}"


def parse_variable(text: str) -> Variable | None:
    """Return the variable of that name, if it is the name of one."""
    match = _VARIABLE.fullmatch(text)
    return Variable(match[1], int(match[2])) if match else None


@lru_cache(maxsize=1 << 14)
def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a decimal, if the text is one."""
    return Fraction(text) if _NUMBER.fullmatch(text) else None


@dataclass
class Sum:
    """A linear term: a constant plus multiples of variables."""

    constant: Fraction = Fraction(0)
    factors: dict[Variable, Fraction] = field(default_factory=dict)

    def add(self, other: Sum, sign: int = 1) -> Sum:
        """Add another term, or subtract it, in place."""
        if other.constant:
            self.constant += sign * other.constant
        for variable, factor in other.factors.items():
            self.factors[variable] = self.factors.get(variable, 0) + sign * factor
        return self

    def scaled(self, factor: Fraction) -> Sum:
        """Return a multiple of the term."""
        factors = {variable: factor * own for variable, own in self.factors.items()}
        return Sum(factor * self.constant, factors)


class Declarations:
    """The variables that a file declares."""

    def __init__(self) -> None:
        self.known: dict[str, Variable] = {}

    def declare(self, form: Form) -> None:
        """Read `(declare-const X_0 Real)` or `(declare-fun X_0 () Real)`."""
        words = [word for word in form[1:] if word != []]
        name = words[0] if words and isinstance(words[0], str) else ""
        variable = parse_variable(name)
        if variable is None or words[1:] != ["Real"]:
            raise syntax_error(form.line, f"expected (declare-const X_0 Real), got {show(form)}")
        if name in self.known:
            raise syntax_error(form.line, f"{name} is declared twice")
        self.known[name] = variable

    def count(self, kind: str) -> int:
        """Return the number of inputs or outputs, which must be numbered without gaps."""
        indices = {variable.number for variable in self.known.values() if variable.kind == kind}
        if not indices:
            raise UserError(f"no variable {kind}_0 is declared")
        for index in range(len(indices)):
            if index not in indices:
                raise UserError(f"{kind}_{index} is not declared, though {kind}_{max(indices)} is")
        return len(indices)

    def linear(self, term: Form | str, line: int) -> Sum:
        """Read a linear term."""
        if isinstance(term, str):
            variable = self.known.get(term)
            if variable is not None:
                return Sum(factors={variable: Fraction(1)})
            number = parse_number(term)
            if number is not None:
                return Sum(number)
            if parse_variable(term):
                raise syntax_error(line, f"{term} is not declared")
            raise syntax_error(line, f"expected a number or a variable, got {shorten(term)}")
        parts = [self.linear(part, term.line) for part in term[1:]]
        if not parts or term.head not in ("+", "-", "*", "/"):
            raise syntax_error(term.line, f"expected a linear term, got {show(term)}")
        return _combine(term, parts)


def _combine(term: Form, parts: list[Sum]) -> Sum:
    if term.head == "+" or (term.head == "-" and len(parts) > 1):
        total = parts[0]
        for part in parts[1:]:
            total.add(part, 1 if term.head == "+" else -1)
        return total
    if term.head == "-":
        return parts[0].scaled(Fraction(-1))
    if term.head == "/":
        divisors = [part.constant for part in parts[1:]]
        if not divisors or any(part.factors for part in parts[1:]) or not all(divisors):
            raise syntax_error(term.line, "only a division by constants other than 0 is linear")
        parts[1:] = [Sum(1 / divisor) for divisor in divisors]
    product = parts[0]
    for part in parts[1:]:
        if product.factors and part.factors:
            raise syntax_error(term.line, f"a product of variables is not linear: {show(term)}")
        scalar, other = (part, product) if product.factors else (product, part)
        product = other.scaled(scalar.constant)
    return product


@dataclass(frozen=True)
class Atom:
    """One inequality, `constant + sum of factor * variable <= 0`, or `< 0` when it is strict."""

    factors: dict[Variable, Fraction]
    constant: Fraction
    strict: bool
    line: int

    @property
    def kind(self) -> str:
        """`"X"` for a bound of one input, `"Y"` for outputs only, empty for constants."""
        kinds = {variable.kind for variable in self.factors}
        if len(kinds) > 1:
            raise syntax_error(self.line, "a constraint that mixes inputs and outputs")
        if kinds == {"X"} and len(self.factors) > 1:
            raise syntax_error(self.line, "a constraint that relates several inputs")
        return kinds.pop() if kinds else ""


def comparison(form: Form, declared: Declarations) -> Atom:
    """Read one of `(<= a b)`, `(>= a b)`, `(< a b)`, `(> a b)`."""
    if len(form) != 3 or form.head not in ("<=", ">=", "<", ">"):
        raise syntax_error(form.line, f"expected and, or, <=, >=, < or >, got {show(form)}")
    small, large = (form[1], form[2]) if form.head[0] == "<" else (form[2], form[1])
    if isinstance(small, str) and isinstance(large, str):
        atom = _bound(form, small, large, declared)
        if atom is not None:
            return atom
    total = declared.linear(small, form.line).add(declared.linear(large, form.line), -1)
    factors = {variable: factor for variable, factor in total.factors.items() if factor}
    _check_range(form, total.constant, *factors.values())
    return Atom(factors, total.constant, len(form.head) == 1, form.line)


def _bound(form: Form, small: str, large: str, declared: Declarations) -> Atom | None:
    """Read the bound of a variable, the shortcut for what long files consist of."""
    variable, number = declared.known.get(small), parse_number(large)
    if variable is not None and number is not None:
        factor, constant = _ONE, -number
    else:
        variable, number = declared.known.get(large), parse_number(small)
        if variable is None or number is None:
            return None
        factor, constant = _MINUS_ONE, number
    _check_range(form, number)
    return Atom({variable: factor}, constant, len(form.head) == 1, form.line)


def _check_range(form: Form, *numbers: Fraction) -> None:
    for number in numbers:
        digits = number.numerator.bit_length() - number.denominator.bit_length()
        if digits > LARGEST_EXPONENT:
            raise syntax_error(form.line, "a number above 8e37, near the end of float32")


def show(form: Form | str) -> str:
    """Return a form as text, shortened for a message."""
    return shorten(" ".join(_words(form)).replace("( ", "(").replace(" )", ")"))


def _words(form: Form | str) -> Iterator[str]:
    if isinstance(form, str):
        yield form
        return
    yield "("
    for part in form[:8]:
        yield from _words(part)
    yield ")"
