"""`connector`: the parameter c of the gradient connector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tightrope.study import families
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Picture, Table, Value
from tightrope.study.measured import Measured, Measurements, doubt, over_seeds
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan

WHERE = "Figure 8; Section 4.2"
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


def plans(scale: str) -> list[Plan]:
    """All seeds of every c."""
    return [plan for group in groups(scale).values() for own in group.values() for plan in own]


def analyse(runs: Measurements) -> Findings:
    """Follow TAPS and natural accuracy over c."""
    columns = (
        Column("network", "network"),
        Column("c", "c", "g"),
        Column("seeds", "seeds", "d"),
        Column("taps", "TAPS accuracy"),
        Column("taps_deviation", "deviation"),
        Column("natural", "natural"),
        Column("natural_deviation", "deviation"),
        Column("certified", "certified"),
        Column("samples", "certified on", "d"),
    )
    rows: list[dict[str, Value]] = []
    claims: list[Claim] = []
    drawn: dict[str, Any] = {}
    for network, group in groups(runs.scale).items():
        own = [_row(runs, network, c, [plan.name for plan in p]) for c, p in group.items()]
        rows += own
        claims += _claims(runs, network, group)
        if any(row["taps"] is not None for row in own):
            drawn[network] = own
    title = "Effect of c, %, means over seeds (the paper shows it as curves only)"
    pictures = (Picture("connector", lambda plt: _draw(plt, drawn)),) if drawn else ()
    return Findings((Table("connector", title, columns, tuple(rows)),), tuple(claims), pictures)


def _row(runs: Measurements, network: str, c: float, names: list[str]) -> dict[str, Value]:
    return {
        "network": network,
        "c": c,
        "seeds": sum(runs.get(name) is not None for name in names),
        "taps": runs.mean(names, _taps),
        "taps_deviation": runs.deviation(names, _taps),
        "natural": runs.mean(names, _natural),
        "natural_deviation": runs.deviation(names, _natural),
        "certified": runs.mean(names, lambda run: run.certified),
        "samples": runs.value(names[0], lambda run: run.samples),
    }


def _taps(run: Measured) -> float:
    return run.accuracy("taps")


def _natural(run: Measured) -> float:
    return run.accuracy("natural")


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


def _draw(plt: Any, drawn: dict[str, Any]) -> Any:
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
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="connector",
    claim="TAPS trains best with a connector between binary and linear: c = 0.5.",
    where=WHERE,
    plans=plans,
    analyse=analyse,
    paper_minutes=4_500,
)
