"""What an experiment is: runs, the columns of its tables, claims of the paper, and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """A column of a table; `form` is how its numbers are written.

    `read` finds the number of a row in its runs, given their names; without it, the row knows it
    beforehand. A column without a title is left to machines.
    """

    name: str
    title: str
    form: str = ".2f"
    read: Callable[[Measurements, Sequence[str]], Value] | None = None

    def show(self, value: Value) -> str:
        """Return the text of a cell."""
        if value is None:
            return "-"
        if isinstance(value, str) or self.form == "":
            return str(value)
        return format(value, self.form)


@dataclass(frozen=True)
class Row:
    """A row before anything is measured: what is known of it, and its runs, one per seed."""

    known: Mapping[str, Value]
    plans: tuple[Plan, ...]

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [plan.name for plan in self.plans]


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

    def groups(self, needed: str) -> dict[str, list[Mapping[str, Value]]]:
        """Return rows by their first column, of groups with a number in the column `needed`."""
        found: dict[str, list[Mapping[str, Value]]] = {}
        for row in self.rows:
            found.setdefault(str(row[self.columns[0].name]), []).append(row)
        return {
            name: rows
            for name, rows in found.items()
            if any(row.get(needed) is not None for row in rows)
        }


@dataclass(frozen=True)
class Sheet:
    """A table to be filled; its title may depend on the scale.

    `rows(runs)` gives a `Row` for the columns to fill, or the values of one that is read at once.
    """

    name: str
    title: str | Mapping[str, str]
    columns: tuple[Column, ...]
    rows: Callable[[Measurements], Iterable[Row | Mapping[str, Value]]]

    def filled(self, runs: Measurements) -> Table:
        """Read what was measured."""
        title = self.title if isinstance(self.title, str) else self.title[runs.scale]
        shown = tuple(column for column in self.columns if column.title)
        rows = tuple(self._values(runs, row) for row in self.rows(runs))
        return Table(self.name, title, shown, rows)

    def _values(self, runs: Measurements, row: Row | Mapping[str, Value]) -> Mapping[str, Value]:
        if not isinstance(row, Row):
            return row
        return {
            c.name: row.known[c.name] if c.read is None else c.read(runs, row.names)
            for c in self.columns
        }


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

    `plans(scale)` are the runs it needs; without any, it looks at all runs there are. `tables`
    say what to read of them, `claims(runs, tables)` puts claims of the paper to the test,
    `draw(runs, tables)` makes figures, and `problems(runs)` are contradictions that must not go
    unseen. `paper_minutes` is a rough figure for the GPU of the paper, from the times it reports.
    """

    name: str
    claim: str
    where: str
    paper_minutes: int
    plans: Callable[[str], Sequence[Plan]]
    tables: tuple[Sheet, ...]
    claims: Callable[[Measurements, Sequence[Table]], Iterable[Claim]]
    draw: Callable[[Measurements, Sequence[Table]], Iterable[Picture]] = lambda runs, tables: ()
    problems: Callable[[Measurements], Iterable[str]] = lambda runs: ()

    def analyse(self, runs: Measurements) -> Findings:
        """Turn what was measured into tables, verdicts and figures."""
        tables = tuple(sheet.filled(runs) for sheet in self.tables)
        return Findings(
            tables,
            tuple(self.claims(runs, tables)),
            tuple(self.draw(runs, tables)),
            tuple(self.problems(runs)),
        )

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
