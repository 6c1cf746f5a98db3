"""`connector`: the parameter c of the gradient connector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightrope.study import families
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Picture, Table, Value
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan

WHERE = "Figure 8; Section 4.2"
ALL = (0.0, 0.25, 0.5, 0.75, 1.0)


def groups(scale: str) -> dict[str, dict[float, Plan]]:
    """Return the plans by network and c."""
    if scale == "paper":
        return {"mnist-0.3": {c: families.paper("mnist-0.3", "taps", connector=c) for c in ALL}}
    return {
        "tiny CNN3": {c: families.short(connector=c) for c in ALL},
        "CNN3": {c: families.equal(connector=c) for c in (0.0, 0.5, 1.0)},
    }


def plans(scale: str) -> list[Plan]:
    """One run per c."""
    return [plan for group in groups(scale).values() for plan in group.values()]


def analyse(runs: Measurements) -> Findings:
    """Follow TAPS and natural accuracy over c."""
    columns = (
        Column("network", "network"),
        Column("c", "c", "g"),
        Column("taps", "TAPS accuracy"),
        Column("natural", "natural"),
        Column("certified", "certified"),
        Column("samples", "certified on", "d"),
    )
    rows: list[dict[str, Value]] = []
    claims: list[Claim] = []
    drawn: dict[str, Any] = {}
    for network, group in groups(runs.scale).items():
        own = [_row(runs, network, c, plan) for c, plan in group.items()]
        rows += own
        claims += _claims(runs, network, group)
        if any(row["taps"] is not None for row in own):
            drawn[network] = own
    title = "Effect of c, % (the paper shows it as curves only)"
    pictures = (Picture("connector", lambda plt: _draw(plt, drawn)),) if drawn else ()
    return Findings((Table("connector", title, columns, tuple(rows)),), tuple(claims), pictures)


def _row(runs: Measurements, network: str, c: float, plan: Plan) -> dict[str, Value]:
    return {
        "network": network,
        "c": c,
        "taps": runs.value(plan.name, lambda run: run.accuracy("taps")),
        "natural": runs.value(plan.name, lambda run: run.accuracy("natural")),
        "certified": runs.value(plan.name, lambda run: run.certified),
        "samples": runs.value(plan.name, lambda run: run.samples),
    }


def _claims(runs: Measurements, network: str, group: dict[float, Plan]) -> list[Claim]:
    names, values = [plan.name for plan in group.values()], list(group)
    return [
        runs.judge(
            f"{network}: TAPS accuracy is highest at c = 0.5.",
            "Figure 8",
            names,
            lambda *found: _extreme(values, found, "taps", 0.5, max),
        ),
        runs.judge(
            f"{network}: the binary connector, c = 0, has the lowest TAPS accuracy.",
            "Figure 8",
            names,
            lambda *found: _extreme(values, found, "taps", 0.0, min),
        ),
        runs.judge(
            f"{network}: the binary connector, c = 0, has the lowest natural accuracy.",
            "Figure 8",
            names,
            lambda *found: _extreme(values, found, "natural", 0.0, min),
        ),
    ]


def _extreme(
    values: Sequence[float], found: Sequence[Measured], what: str, at: float, best: Any
) -> tuple[bool, str]:
    by = dict(zip(values, (run.accuracy(what) for run in found), strict=True))
    text = ", ".join(f"c = {c:g}: {value:.2f}" for c, value in by.items())
    alone = sum(value == by[at] for value in by.values()) == 1
    return alone and by[at] == best(by.values()), text


def _draw(plt: Any, drawn: dict[str, Any]) -> Any:
    figure, grid = plt.subplots(len(drawn), 2, figsize=(8, 3.2 * len(drawn)), squeeze=False)
    for line, (network, rows) in zip(grid, drawn.items(), strict=True):
        for axes, what in zip(line, ("taps", "natural"), strict=True):
            title = {"taps": "TAPS accuracy", "natural": "natural accuracy"}[what]
            shown = {title: [row[what] for row in rows]}
            curves(axes, [row["c"] for row in rows], shown, xlabel="c", ylabel=f"{title}, %")
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
