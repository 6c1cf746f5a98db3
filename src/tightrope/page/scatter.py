"""Natural against certified accuracy: one point per method."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightrope.files import write_bytes


@dataclass(frozen=True)
class Point:
    """Accuracies of a method, from 0 to 1; deviations over seeds are None for a single one."""

    name: str
    natural: float
    adversarial: float
    certified: float
    natural_deviation: float | None = None
    certified_deviation: float | None = None


def draw_scatter(points: Sequence[Point], path: Path) -> Path | None:
    """Draw the points into a PNG file; None without points or without matplotlib.

    A thin line goes from what is certified up to what an attack left standing: the exact robust
    accuracy lies on it.
    """
    if not points:
        return None
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 4.0))
    for i, point in enumerate(points):
        x, y = 100 * point.natural, 100 * point.certified
        wide, high = point.natural_deviation, point.certified_deviation
        axes.vlines(x, y, 100 * point.adversarial, color=f"C{i}", linewidth=1)
        axes.plot(x, 100 * point.adversarial, marker="_", markersize=12, color=f"C{i}")
        axes.errorbar(
            x,
            y,
            xerr=None if wide is None else 100 * wide,
            yerr=None if high is None else 100 * high,
            marker="o",
            capsize=3,
            color=f"C{i}",
        )
        axes.annotate(point.name, (x, y), xytext=(7, -4), textcoords="offset points")
    axes.set(
        xlabel="natural accuracy, %",
        ylabel="robust accuracy, %",
        title="certified (dot) up to under attack (bar)",
    )
    axes.margins(0.2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    write_bytes(path, buffer.getvalue(), own_folder=True)
    return path
