"""How the figures look: histograms of errors, curves, and natural against certified accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LABELS = {
    "pgd": "PGD",
    "ibp": "IBP",
    "sabr": "SABR",
    "taps": "TAPS",
    "staps": "STAPS",
    "mtl-ibp": "MTL-IBP",
    "cc-ibp": "CC-IBP",
    "exp-ibp": "EXP-IBP",
    "crown-ibp": "CROWN-IBP",
    "ibp-r": "IBP-R",
    "colt": "COLT",
    "diffai": "DiffAI",
    "cap": "Wong-Kolter",
    "sortnet": "SortNet",
    "ad-cert": "AD-CERT",
    "cc-dist": "CC-Dist",
    "arow": "ARoW",
    "mart": "MART",
    "noise": "noise",
}
COLORS = {
    "ibp": "C0",
    "pgd": "C2",
    "sabr": "C1",
    "taps": "C3",
    "staps": "C4",
    "mtl-ibp": "C5",
}
Values = np.ndarray


def label(name: str) -> str:
    """Return how a method is written."""
    return LABELS.get(name, name)


def histogram(axes: Any, values: Mapping[str, Values], *, spread: float | None = None) -> None:
    """Draw one histogram per name on common bins, each with its mean in the legend."""
    together = np.concatenate(list(values.values()))
    low, high = np.quantile(together, (0.002, 0.998))
    if spread is not None:
        low, high = max(low, -spread), min(high, spread)
    if low >= high:
        low, high = low - 0.5, high + 0.5
    bins = np.linspace(low, high, 81)
    for name, numbers in values.items():
        text = f"{label(name)} (mean {numbers.mean():.3g})"
        shown = np.clip(numbers, low, high)
        look = {"label": text, "color": COLORS.get(name), "alpha": 0.55}
        weights = np.full(len(numbers), 1 / len(numbers))
        # One outline: the legend's place is searched for among all shapes.
        axes.hist(shown, bins, weights=weights, histtype="stepfilled", **look)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_ylabel("share of samples")
    axes.legend(fontsize="small", loc="upper right")


def curves(
    axes: Any,
    x: Sequence[float | str],
    lines: Mapping[str, Sequence[float | None]],
    *,
    xlabel: str,
    ylabel: str = "accuracy, %",
) -> None:
    """Draw curves over common positions; missing numbers are gaps."""
    numeric = all(not isinstance(value, str) for value in x)
    positions = [float(v) for v in x] if numeric else list(range(len(x)))
    for name, values in lines.items():
        y = [np.nan if value is None else value for value in values]
        axes.plot(positions, y, marker="o", label=name)
    if not numeric:
        axes.set_xticks(positions, [str(value) for value in x])
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize="small")


def scatter(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Draw natural against certified accuracy, a point per method."""
    for name, (natural, certified) in points.items():
        axes.plot(natural, certified, "o", color=COLORS.get(name, "gray"))
        axes.annotate(label(name), (natural, certified), xytext=(5, -3), textcoords="offset points")
    axes.set(xlabel="natural accuracy, %", ylabel="certified accuracy, %")
    axes.margins(x=0.4, y=0.25)  # room for the names
    axes.grid(alpha=0.3)
