"""What must hold of a network's outputs, said in Python: `argmax`, `within` and `linear`.

Specs are joined by `&` and `|`. What is searched for is where they fail: the negation, multiplied
out into groups of rows, a group for each way to fail. Numbers are taken as the floats they are;
whether a spec holds at some outputs is decided exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.certification.arguments import Numbers, check_label, numbers
from tightrope.certification.properties import Unsafe
from tightrope.errors import UserError, shorten
from tightrope.limits import SPEC_COEFFICIENTS, SPEC_ROWS

MOST_LEVELS = 100  # of `&` within `|` within `&` ...
FIELDS = ("matrix", "offset", "strict")


@dataclass(frozen=True)
class Rows:
    """Conditions `matrix @ outputs + offset > 0`; those that are not `strict` may be zero."""

    matrix: Tensor  # [rows, outputs]
    offset: Tensor  # [rows]
    strict: Tensor  # [rows]

    def fail(self, outputs: Tensor) -> Tensor:
        """Return which of them do not hold at finite outputs, exactly."""
        outputs = outputs.double().to(self.matrix.device)
        value = self.matrix @ outputs + self.offset
        terms = self.matrix.abs() @ outputs.abs() + self.offset.abs()
        width = self.matrix.shape[1] + 2
        error = width * (2.0**-51 * terms + math.ulp(0.0))
        unclear = ~(value.abs() > error) | ~torch.isfinite(error)
        sign = value.sign()
        for row in unclear.nonzero()[:, 0].tolist():
            sign[row] = self._sign(row, outputs)
        return torch.where(self.strict, sign <= 0, sign < 0)

    def _sign(self, row: int, outputs: Tensor) -> int:
        used = self.matrix[row].nonzero()[:, 0]
        factors, values = self.matrix[row, used].tolist(), outputs[used].tolist()
        terms = (Fraction(f) * Fraction(v) for f, v in zip(factors, values, strict=True))
        total = sum(terms, Fraction(float(self.offset[row])))
        return (total > 0) - (total < 0)

    def proved_by(self, outputs: Box) -> Tensor:
        """Return which conditions on one output alone, not strict ones, its bounds prove.

        Bounds are compared as they are: what ends at a limit stays within it.
        """
        low, high = (t.flatten().to(self.matrix) for t in outputs.corners)
        single = ((self.matrix != 0).sum(1) == 1) & (self.matrix.abs().sum(1) == 1)
        place = self.matrix.abs().argmax(1)
        above = (self.matrix.sum(1) > 0) & (low[place] >= -self.offset)
        below = (self.matrix.sum(1) < 0) & (high[place] <= self.offset)
        return single & ~self.strict & (above | below)


@dataclass(frozen=True)
class Failure:
    """The outputs at which a spec fails: where all rows of some group do."""

    rows: Rows
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of rows of all groups."""
        return sum(map(len, self.groups))

    def holds_at(self, outputs: Tensor) -> bool:
        """Return whether the spec fails at some outputs; no answer is a failure, too."""
        if not bool(torch.isfinite(outputs).all()):
            return True
        failed = self.rows.fail(outputs.flatten()).tolist()
        return any(all(failed[row] for row in group) for group in self.groups)

    def without(self, proved: Tensor) -> Failure:
        """Return what is left when some rows are known to hold everywhere."""
        known = proved.tolist()
        left = tuple(group for group in self.groups if not any(known[row] for row in group))
        return Failure(self.rows, left)

    def unsafe(self, device: torch.device) -> Unsafe:
        """Return the groups as problems have them; there is at least one."""
        members = torch.tensor([row for group in self.groups for row in group])
        sizes = torch.tensor([len(group) for group in self.groups])
        SPEC_COEFFICIENTS.check(
            len(members) * self.rows.matrix.shape[1],
            f"the spec, {len(members)} rows for {self.rows.matrix.shape[1]} outputs,",
        )
        group = torch.arange(len(sizes)).repeat_interleave(sizes)
        matrix, offset = self.rows.matrix[members], self.rows.offset[members]
        return Unsafe(matrix.to(device), offset.to(device), group.to(device))


@dataclass(frozen=True, eq=False)
class Spec:
    """What must hold of the outputs: made by `argmax`, `within` and `linear`, joined by & and |."""

    text: str
    failure: Callable[[int], Failure]  # by the number of outputs
    sign: str = ""  # by which it is joined of `parts`
    parts: tuple[Spec, ...] = ()
    levels: int = 1

    def __and__(self, other: Spec) -> Spec:
        return _joined("&", self, other)

    def __or__(self, other: Spec) -> Spec:
        return _joined("|", self, other)

    def __bool__(self) -> bool:
        raise UserError("join specs by & and |: `and` and `or` would leave one of them out")

    def __repr__(self) -> str:
        inside = f" {self.sign} ".join(f"({p!r})" if p.parts else repr(p) for p in self.parts)
        return inside or self.text


def argmax(label: int, among: Iterable[int] | None = None) -> Spec:
    """Say that output `label` is larger than all others, or than those `among` some classes."""
    label = check_label(label, "label")
    others = None if among is None else [check_label(i, "among") for i in among]
    text = f"argmax({label})" if others is None else f"argmax({label}, among={others})"
    if others is not None and not set(others) - {label}:
        raise UserError(f"among must name a class other than {label}, got {shorten(others)}")

    def failure(outputs: int) -> Failure:
        known = range(outputs) if others is None else dict.fromkeys(others)
        for place in (label, *known):
            if not 0 <= place < outputs:
                raise UserError(
                    f"{text} asks about output {place}, the network has outputs 0 to {outputs - 1}"
                )
        rivals = torch.tensor([i for i in known if i != label])
        if not len(rivals):
            raise UserError("argmax needs a network of at least two outputs")
        SPEC_COEFFICIENTS.check(len(rivals) * outputs, f"argmax over {outputs} outputs")
        matrix = torch.zeros(len(rivals), outputs, dtype=torch.float64)
        matrix[:, label] = 1.0
        matrix[torch.arange(len(rivals)), rivals] = -1.0
        return _each(matrix, matrix.new_zeros(len(rivals)), strict=True)

    return Spec(text, failure)


def within(lower: Numbers | None = None, upper: Numbers | None = None) -> Spec:
    """Say that outputs lie in a range, its ends included; None or infinity: no end.

    Each end is one number for all outputs, or one for each of them.
    """
    low, high = (_side(lower, -math.inf, "lower"), _side(upper, math.inf, "upper"))
    if low.numel() > 1 and high.numel() > 1 and low.numel() != high.numel():
        raise UserError(f"within: {low.numel()} lower ends do not go with {high.numel()} upper")
    if not bool((low <= high).all()):
        raise UserError("within: a lower end lies above the upper one")
    if not (bool(low.isfinite().any()) or bool(high.isfinite().any())):
        raise UserError("within needs a lower or an upper end that is finite")

    def failure(outputs: int) -> Failure:
        ends = [_for_outputs(side, outputs) for side in (low, high)]
        place = [end.isfinite().nonzero()[:, 0] for end in ends]
        count = sum(map(len, place))
        SPEC_COEFFICIENTS.check(count * outputs, f"within over {outputs} outputs")
        matrix = torch.zeros(count, outputs, dtype=torch.float64)
        matrix[torch.arange(len(place[0])), place[0]] = 1.0
        matrix[torch.arange(len(place[0]), count), place[1]] = -1.0
        return _each(matrix, torch.cat([-ends[0][place[0]], ends[1][place[1]]]), strict=False)

    return Spec(f"within({shorten(lower)}, {shorten(upper)})", failure)


def linear(matrix: Numbers | Sequence[Sequence[float]], offset: Numbers = 0.0) -> Spec:
    """Say that all rows of `matrix @ outputs + offset` are positive; one row may be a vector."""
    rows = numbers(matrix, "matrix")
    rows = rows[None] if rows.dim() == 1 else rows
    if rows.dim() != 2 or not rows.numel():
        raise UserError(f"matrix must have a row for each condition, got shape {tuple(rows.shape)}")
    ends = numbers(offset, "offset")
    if ends.dim() > 1 or (ends.dim() == 1 and len(ends) not in (1, len(rows))):
        raise UserError(
            f"offset must be one number or one for each of {len(rows)} rows, got shape "
            f"{tuple(ends.shape)}"
        )
    if not (bool(rows.isfinite().all()) and bool(ends.isfinite().all())):
        raise UserError("linear needs finite numbers in matrix and offset")

    def failure(outputs: int) -> Failure:
        if rows.shape[1] != outputs:
            raise UserError(f"linear has {rows.shape[1]} columns, the network {outputs} outputs")
        return _each(rows, ends.expand(len(rows)).clone(), strict=True)

    return Spec(f"linear({shorten(matrix)}, {shorten(offset)})", failure)


def _each(matrix: Tensor, offset: Tensor, *, strict: bool) -> Failure:
    """Return the failure of conditions that must all hold: any of them fails."""
    SPEC_ROWS.check(len(matrix), "the spec")
    rows = Rows(matrix, offset, torch.full((len(matrix),), strict))
    return Failure(rows, tuple((i,) for i in range(len(matrix))))


def _joined(sign: str, first: Spec, second: Spec) -> Spec:
    if not isinstance(second, Spec):
        raise UserError(f"a spec is joined with another one, got {shorten(second)}")
    parts = sum(((s.parts if s.sign == sign else (s,)) for s in (first, second)), ())
    levels = 1 + max(part.levels for part in parts)
    if levels > MOST_LEVELS:
        raise UserError(f"the spec has more than {MOST_LEVELS} levels of & and | in each other")

    def failure(outputs: int) -> Failure:
        failures = [part.failure(outputs) for part in parts]
        return (_any_fails if sign == "&" else _all_fail)(failures)

    return Spec("", failure, sign, parts, levels)


def _any_fails(failures: Sequence[Failure]) -> Failure:
    SPEC_ROWS.check(sum(f.size for f in failures), "the spec")
    return Failure(_stacked(failures), tuple(g for part in _placed(failures) for g in part))


def _all_fail(failures: Sequence[Failure]) -> Failure:
    """Multiply out: each way to fail is one of every part."""
    groups: list[tuple[int, ...]] = [()]
    for part in _placed(failures):
        size = sum(map(len, groups)) * len(part) + sum(map(len, part)) * len(groups)
        SPEC_ROWS.check(size, "the spec, multiplied out,")
        groups = [(*before, *group) for before in groups for group in part]
    return Failure(_stacked(failures), tuple(groups))


def _placed(failures: Sequence[Failure]) -> Iterator[list[tuple[int, ...]]]:
    """Yield the groups of each part, with the places that its rows have among all of them."""
    first = 0
    for failure in failures:
        yield [tuple(first + row for row in group) for group in failure.groups]
        first += len(failure.rows.offset)


def _stacked(failures: Sequence[Failure]) -> Rows:
    rows = [failure.rows for failure in failures]
    count, outputs = sum(len(r.offset) for r in rows), rows[0].matrix.shape[1]
    SPEC_COEFFICIENTS.check(count * outputs, f"the spec, {count} rows for {outputs} outputs,")
    return Rows(*(torch.cat([getattr(r, name) for r in rows]) for name in FIELDS))


def _side(value: Numbers | None, default: float, name: str) -> Tensor:
    """Return an end of a range as numbers; one that excludes everything is refused."""
    side = torch.tensor(default, dtype=torch.float64) if value is None else numbers(value, name)
    if bool(side.isnan().any()) or bool((side == -default).any()):
        raise UserError(f"within: {name} must be numbers, {default} where there is no end")
    return side


def _for_outputs(side: Tensor, outputs: int) -> Tensor:
    if side.numel() not in (1, outputs):
        raise UserError(f"within has {side.numel()} ends, the network {outputs} outputs")
    return side.flatten().expand(outputs)
