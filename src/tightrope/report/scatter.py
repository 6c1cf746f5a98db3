"""Natural against certified accuracy: one point per method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# Mean natural and certified accuracy, and their deviations over seeds, if known.
Point = tuple[float | None, float | None, float | None, float | None]


def draw_scatter(points: Mapping[str, Point], path: Path) -> Path | None:
    """Draw the points into an image file; None without points or without matplotlib."""
    known = {name: p for name, p in points.items() if p[0] is not None and p[1] is not None}
    if not known:
        return None
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 4.0))
    for name, (natural, certified, wide, high) in known.items():
        assert natural is not None and certified is not None
        axes.errorbar(
            100 * natural,
            100 * certified,
            xerr=None if wide is None else 100 * wide,
            yerr=None if high is None else 100 * high,
            marker="o",
            capsize=3,
            linestyle="none",
        )
        axes.annotate(
            name, (100 * natural, 100 * certified), xytext=(6, 5), textcoords="offset points"
        )
    axes.set(xlabel="natural accuracy, %", ylabel="certified accuracy, %")
    axes.margins(0.25)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
