"""`connector`: the parameter c of the gradient connector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from tightrope.study import columns, families
from tightrope.study.columns import deviation, natural_accuracy, plans_of, taps_accuracy
from tightrope.study.experiment import Claim, Column, Experiment, Picture, Row, Sheet, Table
from tightrope.study.measured import Measured, Measurements, doubt, over_seeds
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan

ALL = (0.0, 0.25, 0.5, 0.75, 1.0)
SPAN = 1.0  # points that the picture shows at least
# Tiny networks differ by less than their seeds do.
SEEDS = range(3)


def groups(scale: str) -> dict[str, dict[float, list[Plan]]]:
    """Return the plans by network and c, one per seed."""
    if scale == "paper":
        return {"mnist-0.3": {c: [families.paper("mnist-0.3", "taps", connector=c)] for c in ALL}}
    few = (0.0, 0.5, 1.0)
    return {
        "tiny CNN3": {c: [families.short(connector=c, seed=s) for s in SEEDS] for c in few},
        "CNN3": {c: [families.equal(connector=c)] for c in few},
    }


def rows(scale: str) -> list[Row]:
    """All seeds of every c."""
    return [
        Row({"network": network, "c": c}, tuple(plans))
        for network, group in groups(scale).items()
        for c, plans in group.items()
    ]


def claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Follow TAPS and natural accuracy over c."""
    for network, group in groups(runs.scale).items():
        yield from _claims(runs, network, group)


def _claims(runs: Measurements, network: str, group: dict[float, list[Plan]]) -> list[Claim]:
    tested = {
        "TAPS accuracy is highest at c = 0.5.": ("taps", 0.5, max),
        "the binary connector, c = 0, has the lowest TAPS accuracy.": ("taps", 0.0, min),
        "the binary connector, c = 0, has the lowest natural accuracy.": ("natural", 0.0, min),
    }
    names = [plan.name for own in group.values() for plan in own]
    values = [c for c, own in group.items() for _ in own]
    return [
        runs.judge(
            f"{network}: {text}",
            "Figure 8",
            names,
            lambda *found, how=how: _extreme(values, found, *how),
        )
        for text, how in tested.items()
    ]


def _extreme(
    values: Sequence[float], found: Sequence[Measured], what: str, at: float, best: Any
) -> tuple[bool, str]:
    by: dict[float, list[float]] = {}
    for c, run in zip(values, found, strict=True):
        by.setdefault(c, []).append(run.accuracy(what))
    text = ", ".join(f"c = {c:g}: {over_seeds(own)}" for c, own in by.items()) + doubt(by.values())
    means = {c: fmean(own) for c, own in by.items()}
    alone = sum(value == means[at] for value in means.values()) == 1
    return alone and means[at] == best(means.values()), text


def draw(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw both accuracies over c, with their deviations, network by network."""
    drawn = tables[0].groups("taps")
    if drawn:
        yield Picture("connector", lambda plt: _draw(plt, drawn))


def _draw(plt: Any, drawn: Mapping[str, Any]) -> Any:
    figure, grid = plt.subplots(len(drawn), 2, figsize=(8, 3.2 * len(drawn)), squeeze=False)
    for line, (network, rows) in zip(grid, drawn.items(), strict=True):
        for axes, what in zip(line, ("taps", "natural"), strict=True):
            title = {"taps": "TAPS accuracy", "natural": "natural accuracy"}[what]
            shown = {title: [row[what] for row in rows]}
            ends = [row["c"] for row in rows]
            curves(axes, ends, shown, xlabel="c", ylabel=f"{title}, %")
            spread = [row[f"{what}_deviation"] or 0.0 for row in rows]
            means = [math.nan if value is None else value for value in shown[title]]
            axes.errorbar(ends, means, spread, fmt="none", capsize=4)
            low, high = axes.get_ylim()
            # Differences of hundredths should not look large.
            missing = max(0.0, SPAN - (high - low)) / 2
            axes.set_ylim(low - missing, high + missing)
            axes.set_title(network)
    return figure


TABLE = Sheet(
    "connector",
    "Effect of c, %, means over seeds (the paper shows it as curves only)",
    (
        Column("network", "network"),
        Column("c", "c", "g"),
        columns.SEEDS,
        columns.MEAN_TAPS,
        Column("taps_deviation", "deviation", read=deviation(taps_accuracy)),
        columns.MEAN_NATURAL,
        Column("natural_deviation", "deviation", read=deviation(natural_accuracy)),
        columns.MEAN_CERTIFIED,
        columns.CERTIFIED_ON,
    ),
    lambda runs: rows(runs.scale),
)
EXPERIMENT = Experiment(
    name="connector",
    claim="TAPS trains best with a connector between binary and linear: c = 0.5.",
    where="Figure 8; Section 4.2",
    paper_minutes=4_500,
    plans=lambda scale: plans_of(rows(scale)),
    tables=(TABLE,),
    claims=claims,
    draw=draw,
)
