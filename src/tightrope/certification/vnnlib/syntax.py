"""The grammar of VNN-LIB: which brackets may stand where, and what each of them means.

Brackets become values as soon as they close, so that a long file is never held as a tree of
words, and what does not belong into a file is refused at its first word.
"""

from __future__ import annotations

from tightrope.certification.vnnlib.brackets import Brackets, Skipped
from tightrope.certification.vnnlib.cases import Assertions
from tightrope.certification.vnnlib.declarations import Declaration, Network, Version
from tightrope.certification.vnnlib.formulas import (
    Both,
    Either,
    Formula,
    comparison,
    single_bound,
)
from tightrope.certification.vnnlib.names import Names
from tightrope.certification.vnnlib.terms import Arithmetic, Sum, term
from tightrope.certification.vnnlib.text import (
    TOKEN,
    TOO_LARGE,
    Source,
    parse_number,
    too_large,
)
from tightrope.deadline import Deadline
from tightrope.errors import UserError, shorten
from tightrope.limits import VNNLIB_ALTERNATIVES, VNNLIB_DEPTH, VNNLIB_TERMS

IGNORED = frozenset(("set-logic", "set-info", "set-option", "check-sat", "get-model", "exit"))
DECLARING = frozenset(("declare-const", "declare-fun"))
COMPARISONS = frozenset(("<=", ">=", "<", ">", "==", "=", "!="))
_TOKENS_PER_LOOK = 1 << 12  # at the clock


class File:
    """The outermost level: declarations, and assertions that all hold."""

    position = 0

    def __init__(self, text: str) -> None:
        self.source = Source(text)
        self.names = Names()
        self.asserted = Assertions()
        # How many parts a conjunction and a disjunction may have, whatever they are.
        self.most = {"and": VNNLIB_TERMS, "or": VNNLIB_ALTERNATIVES}
        self.most_parts = {head: limit.value for head, limit in self.most.items()}

    def read(self, deadline: Deadline) -> None:
        """Read the whole text."""
        stack: list[Brackets] = [self]
        deepest = VNNLIB_DEPTH.value
        opened: int | None = None  # where brackets have opened that have no first word yet
        for count, match in enumerate(TOKEN.finditer(self.source.text)):
            if not count % _TOKENS_PER_LOOK:
                deadline.check()
            position, token = match.start(), match[0]
            if token[0] == ";":
                continue
            if opened is not None:
                head = "" if token in ("(", ")") or match[1] else token
                stack.append(stack[-1].open(head, opened))
                opened = None
                if head:
                    continue
            if match[1]:
                self._compare(stack[-1], match[1], match[2], match[3], position)
            elif token == "(":
                if len(stack) > deepest:
                    message = f"more than {deepest} brackets inside each other"
                    raise self.source.error(position, message)
                opened = position
            elif token == ")":
                if len(stack) == 1:
                    message = "a closing bracket without an opening one"
                    raise self.source.error(position, message)
                deadline.check()  # a product may be long, though its brackets are few
                stack.pop().close(stack[-1])
            else:
                stack[-1].word(token, position)
        if opened is not None or len(stack) > 1:
            last = stack[-1].position if opened is None else opened
            raise self.source.error(last, "the bracket that opens here is never closed")

    def _compare(self, outer: Brackets, head: str, left: str, right: str, position: int) -> None:
        """Read a comparison of two words, mostly the bound of a variable."""
        if isinstance(outer, Assertion | Junction):
            small, large = (left, right) if head[0] == "<" else (right, left)
            variable, number, upper = self.names.find(small), parse_number(large), True
            if variable is None or number is None:
                variable, number, upper = self.names.find(large), parse_number(small), False
            if variable is not None and number is not None:
                if too_large(number):
                    raise self.source.error(position, TOO_LARGE)
                outer.take(single_bound(variable, number, upper, len(head) == 1, position))
                return
        inner = outer.open(head, position)
        inner.word(left, position)
        inner.word(right, position)
        inner.close(outer)

    def open(self, head: str, position: int) -> Brackets:
        """Begin a statement."""
        if head in IGNORED:
            return Skipped(position)
        if head in DECLARING:
            return Declaration(self, position)
        if head == "assert":
            return Assertion(self, position)
        if head == "declare-network":
            return Network(self, position)
        if head == "vnnlib-version":
            return Version(self, position)
        raise self.misplaced(position)

    def misplaced(self, position: int) -> UserError:
        """Return the error for a statement that is none."""
        shown = self.source.show(position)
        return self.source.error(position, f"expected declare-const or assert, got {shown}")

    def no_formula(self, position: int) -> UserError:
        """Return the error for brackets that are no formula."""
        shown = self.source.show(position)
        message = f"expected and, or, <=, >=, <, >, == or !=, got {shown}"
        return self.source.error(position, message)

    def word(self, word: str, position: int) -> None:
        """Refuse a word outside all brackets."""
        raise self.source.error(position, f"expected '(', got {shorten(word)}")

    def close(self, outer: Brackets) -> None:
        """Never happens: the outermost level has no brackets."""
        raise AssertionError


class Assertion:
    """`(assert formula)`."""

    def __init__(self, file: File, position: int) -> None:
        self.file, self.position = file, position
        self.formula: Formula | None = None

    def open(self, head: str, position: int) -> Brackets:
        """Begin the formula."""
        return open_formula(self.file, head, position)

    def word(self, word: str, position: int) -> None:
        """Refuse a word that stands for a formula."""
        raise self.file.misplaced(self.position)

    def take(self, formula: Formula) -> None:
        """Read the formula."""
        if self.formula is not None:
            raise self.file.misplaced(self.position)
        self.formula = formula

    def close(self, outer: Brackets) -> None:
        """Assert the formula."""
        if self.formula is None:
            raise self.file.misplaced(self.position)
        self.file.asserted.add(self.formula)


def open_formula(file: File, head: str, position: int) -> Brackets:
    """Begin brackets where a formula is expected."""
    if head in COMPARISONS:
        return Comparison(file, head, position)
    if head in ("and", "or"):
        return Junction(file, head, position)
    if file.names.networks and (
        not head or file.names.find(head) is not None or parse_number(head) is not None
    ):
        infix = Comparison(file, "", position)
        if head:
            infix.word(head, position)
        return infix
    raise file.no_formula(position)


class Junction:
    """`(and formula ...)` or `(or formula ...)`."""

    def __init__(self, file: File, head: str, position: int) -> None:
        self.file, self.head, self.position = file, head, position
        self.parts: list[Formula] = []
        self.most = file.most_parts[head]

    def open(self, head: str, position: int) -> Brackets:
        """Begin a part."""
        return open_formula(self.file, head, position)

    def word(self, word: str, position: int) -> None:
        """Refuse a word that stands for a formula."""
        shown = self.file.source.show(self.position)
        message = f"expected formulas in brackets, got {shown}"
        raise self.file.source.error(self.position, message)

    def take(self, formula: Formula) -> None:
        """Read a part."""
        self.parts.append(formula)
        if len(self.parts) > self.most:
            raise self.file.most[self.head].exceeded("the product of the assertions")

    def close(self, outer: Brackets) -> None:
        """Join the parts."""
        if not self.parts:
            raise self.file.no_formula(self.position)
        assert isinstance(outer, Assertion | Junction)
        if len(self.parts) == 1:
            outer.take(self.parts[0])
        else:
            outer.take(Both(self.parts) if self.head == "and" else Either(self.parts))


class Comparison:
    """`(<= term term)` and its kin; without a head, `(term <= term)`."""

    def __init__(self, file: File, head: str, position: int) -> None:
        self.file, self.head, self.position = file, head, position
        self.terms: list[Sum] = []

    def open(self, head: str, position: int) -> Brackets:
        """Begin a term."""
        return Term(self.file, head, position)

    def word(self, word: str, position: int) -> None:
        """Read a term of one word, or the sign between two terms."""
        if not self.head and word in COMPARISONS and len(self.terms) == 1:
            self.head = word
        else:
            self.take(term(self.file.names, word, self.file.source, position))

    def take(self, term: Sum) -> None:
        """Read a term."""
        if len(self.terms) == (2 if self.head else 1):
            raise self.file.no_formula(self.position)
        self.terms.append(term)

    def close(self, outer: Brackets) -> None:
        """Make it a formula."""
        if len(self.terms) != 2:
            raise self.file.no_formula(self.position)
        assert isinstance(outer, Assertion | Junction)
        left, right = self.terms
        outer.take(comparison(self.head, left, right, self.file.source, self.position))


class Term:
    """`(+ term ...)` and its kin."""

    def __init__(self, file: File, head: str, position: int) -> None:
        self.file, self.position = file, position
        if head not in Arithmetic.HEADS:
            shown = file.source.show(position)
            raise file.source.error(position, f"expected a linear term, got {shown}")
        self.value = Arithmetic(head, file.source, position)

    def open(self, head: str, position: int) -> Brackets:
        """Begin an operand."""
        return Term(self.file, head, position)

    def word(self, word: str, position: int) -> None:
        """Read an operand of one word."""
        self.take(term(self.file.names, word, self.file.source, position))

    def take(self, term: Sum) -> None:
        """Read an operand."""
        self.value.take(term)

    def close(self, outer: Brackets) -> None:
        """Hand the value out."""
        assert isinstance(outer, Comparison | Term)
        outer.take(self.value.close())
