"""Histogram of margins: proved ones right of zero, those of counterexamples left of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tightrope.page.axes import Frame, Scale, line, ticks
from tightrope.page.content import VERDICTS, Contents, Sample
from tightrope.page.markup import Markup, each, join, scrolling, tag
from tightrope.page.numbers import count, significant
from tightrope.page.verdicts import key

FRAME = Frame(width=780, height=270, left=50, top=26)
BINS = 64
# Margins beyond these quantiles go into the outermost bins, so that few do not hide many.
TAIL = 0.005

NAMES = {
    "verified": "proved margins",
    "falsified": "margins of counterexamples",
    "unknown": "best bounds of unknown samples",
}


def draw_margins(run: Contents) -> Markup | None:
    """Return the histogram, or None if no sample has a margin."""
    groups = {v: _margins(run.samples, v) for v in VERDICTS}
    known = sorted(margin for group in groups.values() for margin in group)
    if not known:
        return None
    edges = bin_edges(known)
    counts = {v: count_bins(group, edges) for v, group in groups.items() if group}
    x = FRAME.horizontal(edges[0], edges[-1])
    tallest = max(map(sum, zip(*counts.values(), strict=True)))
    y = FRAME.vertical(0, tallest * 1.05)
    label = f"Margins of {run.name}: " + ", ".join(
        f"{len(groups[v])} {NAMES[v]}, median {significant(_median(groups[v]))}" for v in counts
    )
    zero = line("zero", x(0), FRAME.top, x(0), FRAME.height - FRAME.bottom)
    svg = FRAME.svg(
        label,
        FRAME.grid(x, y, lambda v: significant(v, 4), _whole_count),
        _bars(counts, edges, x, y),
        zero,
        FRAME.y_title("samples"),
        FRAME.x_title("margin: output of the label minus the largest other output"),
    )
    legend = tag("p", each(key(v, NAMES[v]) for v in counts), class_="legends")
    scroll = scrolling(svg, "Margins", class_="wide")
    return tag("figure", scroll, legend, _tail(known, edges), class_="panel")


def _whole_count(value: float) -> str:
    """Label an axis of samples: there are no halves of them."""
    return count(round(value)) if math.isclose(value, round(value)) else ""


def bin_edges(margins: Sequence[float]) -> list[float]:
    """Return edges of equal bins over (nearly) all margins, zero being one of them."""
    cut = int(TAIL * len(margins))
    low, high = min(margins[cut], 0.0), max(margins[len(margins) - 1 - cut], 0.0)
    width = (high - low) / BINS or 1.0
    steps = ticks(0.0, BINS * width, BINS)
    width = max(width, steps[1] - steps[0] if len(steps) > 1 else width)
    first, last = math.floor(low / width), math.ceil(high / width)
    if first == last:
        first, last = first - 1, last + 1
    return [i * width for i in range(first, last + 1)]


def count_bins(margins: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Count margins by bin; those outside go into the outermost ones."""
    counts = [0] * (len(edges) - 1)
    width = edges[1] - edges[0]
    for margin in margins:
        position = math.floor((margin - edges[0]) / width)
        counts[min(max(position, 0), len(counts) - 1)] += 1
    return counts


def _margins(samples: Sequence[Sample], verdict: str) -> list[float]:
    return [s.margin for s in samples if s.verdict == verdict and s.margin is not None]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _bars(counts: dict[str, list[int]], edges: Sequence[float], x: Scale, y: Scale) -> Markup:
    """Return the bars, verdicts on top of each other."""
    bars = []
    for i in range(len(edges) - 1):
        below = 0
        where = f"{significant(edges[i])} to {significant(edges[i + 1])}"
        for verdict, numbers in counts.items():
            if not numbers[i]:
                continue
            top, floor = y(below + numbers[i]), y(below)
            height = max(floor - top, 1.0)
            left, width = x(edges[i]) + 0.5, max(x(edges[i + 1]) - x(edges[i]) - 1.0, 0.5)
            hint = tag("title", f"{count(numbers[i])} {verdict}, margin {where}")
            shape = {"x": left, "y": floor - height, "width": width, "height": height}
            bars.append(tag("rect", hint, class_=f"fill {verdict}", **shape))
            below += numbers[i]
    return join(*bars)


def _tail(margins: Sequence[float], edges: Sequence[float]) -> Markup | None:
    outside = sum(m < edges[0] or m > edges[-1] for m in margins)
    if not outside:
        return None
    extremes = f"{significant(margins[0])} to {significant(margins[-1])}"
    words = f"The outermost bars include {count(outside)} from beyond the chart"
    return tag("p", f"{words}; all margins range from {extremes}.", class_="hint")
