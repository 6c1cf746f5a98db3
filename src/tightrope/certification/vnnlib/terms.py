"""Linear terms of VNN-LIB, in exact arithmetic and in memory that the file bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from tightrope.certification.vnnlib.names import Names
from tightrope.certification.vnnlib.text import (
    Source,
    Variable,
    parse_indexed,
    parse_number,
    parse_variable,
)
from tightrope.errors import UserError, shorten
from tightrope.limits import DIGITS

_BITS_PER_DIGIT = 3.33


@dataclass
class Sum:
    """A linear term: a constant plus multiples of variables."""

    constant: Fraction = Fraction(0)
    factors: dict[Variable, Fraction] = field(default_factory=dict)

    def add(self, other: Sum, sign: int = 1) -> None:
        """Add another term, or subtract it, in place."""
        if other.constant:
            self.constant += sign * other.constant
        for variable, factor in other.factors.items():
            self.factors[variable] = self.factors.get(variable, 0) + sign * factor

    def scaled(self, factor: Fraction) -> Sum:
        """Return a multiple of the term."""
        factors = {variable: factor * own for variable, own in self.factors.items()}
        return Sum(factor * self.constant, factors)


def term(names: Names, word: str, source: Source, position: int) -> Sum:
    """Return the term that one word is."""
    variable = names.find(word)
    if variable is not None:
        return Sum(factors={variable: Fraction(1)})
    number = parse_number(word)
    if number is not None:
        return Sum(number)
    if parse_variable(word) or parse_indexed(word):
        raise source.error(position, f"{word[:60]} is not declared")
    raise source.error(position, f"expected a number or a variable, got {shorten(word)}")


class Arithmetic:
    """A sum, difference, product or quotient, computed while its operands are read."""

    HEADS = frozenset("+-*/")

    def __init__(self, head: str, source: Source, position: int) -> None:
        self.head, self.source, self.position = head, source, position
        self.value: Sum | None = None
        self.operands = 0
        self.most_bits = int(DIGITS.value * _BITS_PER_DIGIT)

    def take(self, operand: Sum) -> None:
        """Read the next operand."""
        self.operands += 1
        if self.value is None:
            self.value = operand
        elif self.head in "+-":
            self.value.add(operand, 1 if self.head == "+" else -1)
            self._check(self.value.constant, *(self.value.factors[v] for v in operand.factors))
        elif self.head == "*":
            self._multiply(operand)
        else:
            self._divide(operand)

    def close(self) -> Sum:
        """Return the value."""
        if self.value is None:
            shown = self.source.show(self.position)
            raise self.source.error(self.position, f"expected a linear term, got {shown}")
        if self.operands == 1 and self.head == "/":
            raise self._no_division()
        if self.operands == 1 and self.head == "-":
            return self.value.scaled(Fraction(-1))
        return self.value

    def _multiply(self, operand: Sum) -> None:
        assert self.value is not None
        if self.value.factors and operand.factors:
            shown = self.source.show(self.position)
            message = f"a product of variables is not linear: {shown}"
            raise self.source.error(self.position, message)
        scalar, other = (operand, self.value) if self.value.factors else (self.value, operand)
        self._set(other.scaled(scalar.constant))

    def _divide(self, operand: Sum) -> None:
        assert self.value is not None
        if operand.factors or not operand.constant:
            raise self._no_division()
        self._set(self.value.scaled(1 / operand.constant))

    def _no_division(self) -> UserError:
        return self.source.error(
            self.position, "only a division by constants other than 0 is linear"
        )

    def _set(self, value: Sum) -> None:
        self._check(value.constant, *value.factors.values())
        self.value = value

    def _check(self, *numbers: Fraction) -> None:
        """Refuse numbers that would grow with every operation."""
        for number in numbers:
            if max(number.numerator.bit_length(), number.denominator.bit_length()) > self.most_bits:
                message = f"the result of {self.source.show(self.position)}"
                raise self.source.error(self.position, str(DIGITS.exceeded(message)))
