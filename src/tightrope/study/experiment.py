"""What an experiment is: claims of the paper, the runs that test them, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tightrope.study.plans import Plan

if TYPE_CHECKING:
    from tightrope.study.measured import Measurements

SCALES = ("laptop", "paper")
CORES = 2  # of the laptop that the minutes are for
Value = float | int | str | None


class Verdict(StrEnum):
    """What the numbers say about a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNTESTED = "not tested at this scale"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, what became of it, and the numbers that say so."""

    text: str
    where: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Column:
    """A column of a table; `form` is how its numbers are written."""

    name: str
    title: str
    form: str = ".2f"

    def show(self, value: Value) -> str:
        """Return the text of a cell."""
        if value is None:
            return "-"
        if isinstance(value, str) or self.form == "":
            return str(value)
        return format(value, self.form)


@dataclass(frozen=True)
class Table:
    """A table: rows are values by column name, None where there is no number."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]

    def cells(self) -> list[list[str]]:
        """Return the texts of all rows."""
        return [[column.show(row.get(column.name)) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class Picture:
    """A figure to draw; `draw(plt)` returns a matplotlib figure."""

    name: str
    draw: Callable[[Any], Any]


@dataclass(frozen=True)
class Findings:
    """What an analysis returns; `problems` are contradictions that must not go unseen."""

    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    pictures: tuple[Picture, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper as one command.

    `plans(scale)` are the runs it needs; `analyse` turns what was measured into tables, figures
    and verdicts. An experiment without plans looks at all runs there are. `paper_minutes` is a
    rough figure for the GPU of the paper, from the times it reports.
    """

    name: str
    claim: str
    where: str
    plans: Callable[[str], Sequence[Plan]]
    analyse: Callable[[Measurements], Findings]
    paper_minutes: int

    def minutes(self, scale: str) -> int:
        """Return about how long it takes from nothing; on a laptop, all cores working."""
        if scale == "paper":
            return self.paper_minutes
        plans = self.plans(scale)
        longest = max((plan.minutes for plan in plans), default=0.0)
        return max(1, round(max(longest, sum(plan.minutes for plan in plans) / CORES)))


@dataclass(frozen=True)
class Result:
    """The outcome of an experiment; `failures` are runs that failed, with the reason."""

    name: str
    scale: str
    claim: str
    where: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    failures: Mapping[str, str]
    problems: tuple[str, ...]
    figures: tuple[str, ...]
    folder: str
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all runs came to their end and nothing contradicts itself."""
        return not self.failures and not self.problems
