"""`weight`: how much the gradient of the TAPS loss counts against that of the IBP loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Picture, Table, Value
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import curves
from tightrope.study.plans import Plan

WHERE = "Tables 2, 14; Section 4.2"
LAPTOP = ("ibp", "0", "1", "5", "10", "20", "inf")
TINY = ("ibp", "1", "5", "20")


def groups(scale: str) -> dict[str, dict[str, Plan]]:
    """Return the plans by setting and row of the table."""
    if scale == "laptop":
        return {
            "CNN3": {w: _plan(families.equal, w) for w in LAPTOP},
            "tiny CNN3": {w: _plan(families.short, w) for w in TINY},
        }

    def make(setting: str) -> dict[str, Plan]:
        rows = published.WEIGHT[setting]
        return {w: _plan(_Family(setting), w) for w in rows}

    return {setting: make(setting) for setting in published.WEIGHT}


class _Family:
    """The paper's runs of one setting, made like those of a laptop."""

    def __init__(self, setting: str) -> None:
        self.setting = setting

    def __call__(self, method: str = "taps", **options: Any) -> Plan:
        return families.paper(self.setting, method, **options)


def _plan(family: Any, weight: str) -> Plan:
    if weight == "ibp":
        return family("ibp")
    if weight == "taps alone":
        return family("taps", loss="taps")
    return family("taps", weight=math.inf if weight == "inf" else float(weight))


def plans(scale: str) -> list[Plan]:
    """One run per weight."""
    return [plan for group in groups(scale).values() for plan in group.values()]


def analyse(runs: Measurements) -> Findings:
    """Follow accuracies and certification times over the weight."""
    columns = (
        Column("setting", "setting"),
        Column("weight", "w"),
        Column("natural", "natural"),
        Column("adversarial", "adversarial"),
        Column("certified", "certified"),
        Column("by_ibp", "by IBP alone"),
        Column("seconds", "s / sample", ".3g"),
        Column("samples", "samples", "d"),
        Column("paper_natural", "paper: natural"),
        Column("paper_adversarial", "adversarial"),
        Column("paper_certified", "certified"),
        Column("paper_seconds", "s / sample", ".3g"),
    )
    rows, claims, pictures = [], [], []
    everything = groups(runs.scale)
    tried = {
        s for s, group in everything.items() if any(runs.tried(p.name) for p in group.values())
    }
    for setting, group in everything.items():
        reference = published.WEIGHT.get(setting, published.WEIGHT["mnist-0.3"])
        own = [_row(runs, setting, w, plan, reference) for w, plan in group.items()]
        if not tried or setting in tried:  # with --only: rows without a number help nobody
            rows += own
        claims += _claims(runs, setting, {w: plan.name for w, plan in group.items()})
        if any(row["certified"] is not None for row in own):
            pictures.append(_picture(setting, own))
    if runs.scale == "laptop":
        rows_title = "Effect of w, % (the paper's numbers: CNN7, MNIST at 0.3)"
    else:
        rows_title = "Effect of w, %"
    table = Table("weight", rows_title, columns, tuple(rows))
    return Findings((table,), tuple(claims), tuple(pictures))


def _row(
    runs: Measurements, setting: str, weight: str, plan: Plan, reference: Any
) -> dict[str, Value]:
    seconds, natural, adversarial, certified = reference.get(weight, (None,) * 4)
    return {
        "setting": setting,
        "weight": {"ibp": "IBP loss alone", "taps alone": "TAPS loss alone"}.get(weight, weight),
        "natural": runs.value(plan.name, lambda run: run.natural),
        "adversarial": runs.value(plan.name, lambda run: run.adversarial),
        "certified": runs.value(plan.name, lambda run: run.certified),
        "by_ibp": runs.value(plan.name, lambda run: run.certified_by("ibp")),
        "seconds": runs.value(plan.name, lambda run: run.certify_seconds),
        "samples": runs.value(plan.name, lambda run: run.samples),
        "paper_natural": natural,
        "paper_adversarial": adversarial,
        "paper_certified": certified,
        "paper_seconds": seconds,
    }


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


def _picture(setting: str, rows: list[dict[str, Value]]) -> Picture:
    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(6, 4))
        x = [str(row["weight"]).replace(" loss alone", "") for row in rows]
        lines: Any = {n: [row[n] for row in rows] for n in ("natural", "adversarial", "certified")}
        curves(axes, x, lines, xlabel="w")
        figure.tight_layout()
        return figure

    return Picture(f"weight-{setting.lower().replace(' ', '-')}", draw)


EXPERIMENT = Experiment(
    name="weight",
    claim="More weight on the TAPS gradient raises natural accuracy and certification time; "
    "certified accuracy peaks in between.",
    where=WHERE,
    plans=plans,
    analyse=analyse,
    paper_minutes=16_000,
)
