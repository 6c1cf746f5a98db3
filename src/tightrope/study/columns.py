"""Columns that several tables share, and how a column reads the runs of its row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

from tightrope.study.experiment import Column, Row, Value
from tightrope.study.measured import Measured, Measurements
from tightrope.study.plans import Plan

Read = Callable[[Measured], Any]
Reading = Callable[[Measurements, Sequence[str]], Value]


def first(read: Read) -> Reading:
    """Read the first run of a row."""
    return lambda runs, names: runs.value(names[0], read)


def mean(read: Read) -> Reading:
    """Take the mean over the runs of a row that are there."""
    return lambda runs, names: runs.mean(names, read)


def deviation(read: Read) -> Reading:
    """Take the standard deviation over the runs of a row that are there."""
    return lambda runs, names: runs.deviation(names, read)


def count(read: Read) -> Reading:
    """Count the runs of a row that have a number."""
    return lambda runs, names: len(runs.values(names, read))


def made(runs: Measurements, names: Sequence[str]) -> int:
    """Count the runs of a row that are there."""
    return sum(runs.get(name) is not None for name in names)


natural, adversarial, certified = map(attrgetter, ("natural", "adversarial", "certified"))
by_ibp = methodcaller("certified_by", "ibp")
taps_accuracy, natural_accuracy = (methodcaller("accuracy", n) for n in ("taps", "natural"))

NATURAL = Column("natural", "natural", read=first(natural))
ADVERSARIAL = Column("adversarial", "adversarial", read=first(adversarial))
CERTIFIED = Column("certified", "certified", read=first(certified))
SAMPLES = Column("samples", "samples", "d", first(attrgetter("samples")))
TAPS = Column("taps", "TAPS accuracy", read=first(taps_accuracy))
SEEDS = Column("seeds", "seeds", "d", made)
# Of rows with several seeds.
MEAN_CERTIFIED = Column("certified", "certified", read=mean(certified))
MEAN_NATURAL = Column("natural", "natural", read=mean(natural_accuracy))
MEAN_TAPS = Column("taps", "TAPS accuracy", read=mean(taps_accuracy))
CERTIFIED_ON = Column("samples", "certified on", "d", SAMPLES.read)


def paper(names: str, values: Sequence[Value]) -> dict[str, Value]:
    """Return the paper's numbers by column; `names` are words, of columns `paper_WORD`."""
    return {f"paper_{name}": value for name, value in zip(names.split(), values, strict=True)}


def plans_of(rows: Iterable[Row]) -> list[Plan]:
    """Return the runs of some rows."""
    return [plan for row in rows for plan in row.plans]


def only_tried(runs: Measurements, rows: Sequence[Row], group: str) -> list[Row]:
    """Leave out groups of rows of which no run was begun, unless none was at all.

    With `--only`, rows without a number help nobody.
    """
    tried = {row.known[group] for row in rows if any(map(runs.tried, row.names))}
    return [row for row in rows if not tried or row.known[group] in tried]
