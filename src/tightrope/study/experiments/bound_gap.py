"""`bound-gap`: what the attack in the classifier takes off the bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Picture, Sheet, Table, Value
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import histogram, label
from tightrope.study.plans import Plan

METHODS = ("ibp", "sabr", "taps", "staps")
SIMILAR = 0.25  # largest distance of two distribution functions that we call similar


def plans(scale: str) -> list[Plan]:
    """The networks of `precision`: the same at either scale."""
    return [families.tiny(method) for method in METHODS]


def gaps(run: Measured) -> dict[str, np.ndarray]:
    """Return IBP less TAPS bounds and SABR less STAPS bounds on the worst margin."""
    return {
        "taps": run.margins("ibp") - run.margins("taps"),
        "staps": run.margins("sabr") - run.margins("staps"),
    }


def rows(runs: Measurements) -> Iterator[Mapping[str, Value]]:
    """Compare the differences by training method."""
    for method in METHODS:
        errors = published.ERRORS[method]
        row: dict[str, Value] = {"method": label(method)}
        row["paper_taps"] = errors["ibp"][0] - errors["taps"][0]
        own = runs.value(f"tiny-{method}", gaps)
        if own is not None:
            for kind, values in own.items():
                row[kind] = float(values.mean())
                row[f"{kind}_deviation"] = float(values.std())
            row["distance"] = scaled_distance(own["taps"], own["staps"])
        yield row


def scaled_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples, each divided by its mean."""
    a, b = np.sort(a / (abs(a.mean()) or 1.0)), np.sort(b / (abs(b.mean()) or 1.0))
    everywhere = np.concatenate([a, b])
    shares = [np.searchsorted(v, everywhere, side="right") / len(v) for v in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def claims(runs: Measurements, tables: Sequence[Table]) -> list[Claim]:
    """Compare the networks trained by SABR, TAPS and STAPS."""
    names = [f"tiny-{m}" for m in ("sabr", "taps", "staps")]
    return [
        *(
            runs.judge(
                f"SABR regularises the classifier more than TAPS and especially STAPS do: its "
                f"{text} are the smallest, those of STAPS the largest.",
                "Figure 6",
                names,
                lambda *three, kind=kind: _ordered(kind, *three),
            )
            for kind, text in (
                ("taps", "differences of IBP and TAPS bounds"),
                ("staps", "differences of SABR and STAPS bounds"),
            )
        ),
        runs.judge(
            "The two kinds of differences are distributed alike, up to scale.",
            "Figure 6",
            names,
            _alike,
        ),
    ]


def _ordered(kind: str, *three: Measured) -> tuple[bool, str]:
    sabr, taps, staps = (float(gaps(run)[kind].mean()) for run in three)
    text = f"trained by SABR {sabr:.4f}, TAPS {taps:.4f}, STAPS {staps:.4f}"
    return sabr < taps < staps, text


def _alike(*three: Measured) -> tuple[bool, str]:
    found = {run.name: gaps(run) for run in three}
    distances = {name: scaled_distance(g["taps"], g["staps"]) for name, g in found.items()}
    text = ", ".join(f"{name.removeprefix('tiny-')} {d:.3f}" for name, d in distances.items())
    return max(distances.values()) <= SIMILAR, f"distance (at most {SIMILAR} is alike): {text}"


def draw(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw histograms of both kinds of differences."""
    every = {method: runs.value(f"tiny-{method}", gaps) for method in METHODS}
    found = {method: own for method, own in every.items() if own is not None}
    if found:
        yield Picture("bound-gap", lambda plt: _draw(plt, found))


def _draw(plt: Any, found: Mapping[str, Any]) -> Any:
    figure, grid = plt.subplots(1, 2, figsize=(9, 3.6))
    titles = {"taps": "IBP less TAPS bounds", "staps": "SABR less STAPS bounds"}
    for axes, (kind, title) in zip(grid, titles.items(), strict=True):
        histogram(axes, {method: values[kind] for method, values in found.items()})
        axes.set(title=title, xlabel="difference of bounds on the worst margin")
    return figure


TABLE = Sheet(
    "bound-gap",
    "Difference of bounds on the worst margin at 0.05",
    (
        Column("method", "trained by"),
        Column("taps", "IBP - TAPS: mean", ".4f"),
        Column("taps_deviation", "deviation", ".4f"),
        Column("paper_taps", "paper: mean", ".4f"),
        Column("staps", "SABR - STAPS: mean", ".4f"),
        Column("staps_deviation", "deviation", ".4f"),
        Column("distance", "distance of scaled distributions", ".3f"),
    ),
    rows,
)
EXPERIMENT = Experiment(
    name="bound-gap",
    claim="The latent attack takes most off the bounds of networks trained by TAPS and STAPS: "
    "their later layers are regularised least.",
    where="Figure 6; Section 4.2",
    paper_minutes=100,
    plans=plans,
    tables=(TABLE,),
    claims=claims,
    draw=draw,
)
