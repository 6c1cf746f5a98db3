"""`weight`: how much the gradient of the TAPS loss counts against that of the IBP loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

from tightrope.study import columns, families, published
from tightrope.study.experiment import Claim, Column, Experiment, Picture, Row, Sheet, Table
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan

LAPTOP = ("ibp", "0", "1", "5", "10", "20", "inf")
TINY = ("ibp", "1", "5", "20")
ALONE = {"ibp": "IBP loss alone", "taps alone": "TAPS loss alone"}


def groups(scale: str) -> dict[str, dict[str, Plan]]:
    """Return the plans by setting and row of the table."""
    if scale == "laptop":
        return {
            "CNN3": {w: _plan(families.equal, w) for w in LAPTOP},
            "tiny CNN3": {w: _plan(families.short, w) for w in TINY},
        }
    return {
        setting: {w: _plan(partial(families.paper, setting), w) for w in weights}
        for setting, weights in published.WEIGHT.items()
    }


def _plan(family: Callable[..., Plan], weight: str) -> Plan:
    if weight == "ibp":
        return family("ibp")
    if weight == "taps alone":
        return family("taps", loss="taps")
    return family("taps", weight=math.inf if weight == "inf" else float(weight))


def rows(scale: str) -> list[Row]:
    """One run per weight."""
    made = []
    for setting, group in groups(scale).items():
        reference = published.WEIGHT.get(setting, published.WEIGHT["mnist-0.3"])
        for weight, plan in group.items():
            numbers = reference.get(weight, (None,) * 4)
            known = columns.paper("seconds natural adversarial certified", numbers)
            known |= {"setting": setting, "weight": ALONE.get(weight, weight)}
            made.append(Row(known, (plan,)))
    return made


def claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Follow accuracies and certification times over the weight."""
    for setting, group in groups(runs.scale).items():
        yield from _claims(runs, setting, {w: plan.name for w, plan in group.items()})


def _claims(runs: Measurements, setting: str, names: dict[str, str]) -> list[Claim]:
    ends = [names["ibp"], names["20"]]
    order = [w for w in ("ibp", "0", "1", "5", "10", "15", "20", "inf") if w in names]
    return [
        runs.judge(
            f"{setting}: a larger w raises natural accuracy.",
            "Table 2",
            ends,
            lambda a, b: (
                b.natural > a.natural,
                f"IBP {a.natural:.2f}, w = 20 {b.natural:.2f}",
            ),
        ),
        runs.judge(
            f"{setting}: a larger w makes certification slower.",
            "Table 2",
            ends,
            lambda a, b: (
                b.certify_seconds > a.certify_seconds,
                f"seconds per sample: IBP {a.certify_seconds:.3g}, w = 20 {b.certify_seconds:.3g}",
            ),
        ),
        runs.judge(
            f"{setting}: a larger w regularises less: intervals alone certify less.",
            "Section 4.2",
            [names[w] for w in ("1", "5", "20") if w in names],
            _by_intervals,
        ),
        runs.judge(
            f"{setting}: certified accuracy first rises with w and then falls: its peak is "
            "neither at IBP nor at the largest w.",
            "Table 2",
            [names[w] for w in order],
            lambda *found: _peak(order, found),
        ),
    ]


def _by_intervals(*found: Measured) -> tuple[bool, str]:
    values = [run.certified_by("ibp") for run in found]
    falls = all(a > b for a, b in pairwise(values))
    return falls, "by intervals, in the order of w: " + ", ".join(f"{v:.2f}" for v in values)


def _peak(order: Sequence[str], found: tuple[Measured, ...]) -> tuple[bool, str]:
    values = dict(zip(order, (run.certified for run in found), strict=True))
    best = max(values.values())
    inside = [w for w in order[1:-1] if values[w] == best]
    holds = bool(inside) and best > values[order[0]] and best > values[order[-1]]
    return holds, "certified by w: " + ", ".join(f"{w} {v:.2f}" for w, v in values.items())


def draw(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw accuracies over the weight, a figure per setting."""
    for setting, rows in tables[0].groups("certified").items():
        yield Picture(f"weight-{setting.lower().replace(' ', '-')}", partial(_draw, rows=rows))


def _draw(plt: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = plt.subplots(figsize=(6, 4))
    x = [str(row["weight"]).replace(" loss alone", "") for row in rows]
    lines = {n: [row[n] for row in rows] for n in ("natural", "adversarial", "certified")}
    curves(axes, x, lines, xlabel="w")
    return figure


TABLE = Sheet(
    "weight",
    {
        "laptop": "Effect of w, % (the paper's numbers: CNN7, MNIST at 0.3)",
        "paper": "Effect of w, %",
    },
    (
        Column("setting", "setting"),
        Column("weight", "w"),
        columns.NATURAL,
        columns.ADVERSARIAL,
        columns.CERTIFIED,
        Column("by_ibp", "by IBP alone", read=columns.first(columns.by_ibp)),
        Column("seconds", "s / sample", ".3g", columns.first(attrgetter("certify_seconds"))),
        columns.SAMPLES,
        Column("paper_natural", "paper: natural"),
        Column("paper_adversarial", "adversarial"),
        Column("paper_certified", "certified"),
        Column("paper_seconds", "s / sample", ".3g"),
    ),
    lambda runs: columns.only_tried(runs, rows(runs.scale), "setting"),
)
EXPERIMENT = Experiment(
    name="weight",
    claim="More weight on the TAPS gradient raises natural accuracy and certification time; "
    "certified accuracy peaks in between.",
    where="Tables 2, 14; Section 4.2",
    paper_minutes=16_000,
    plans=lambda scale: columns.plans_of(rows(scale)),
    tables=(TABLE,),
    claims=claims,
    draw=draw,
)
