"""Axes of the charts: nice ticks, scales, and the frame around a plot, as static SVG.

Colours come from the style sheet, so charts follow the page's theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tightrope.page.markup import Markup, join, tag

Label = Callable[[float], str]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers within [low, high], about as many as wanted."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Rounding takes 0.30000000000000004 back to 0.3.
    places = max(0, 2 - math.floor(math.log10(step)))
    return [round(i * step, places) for i in range(first, last + 1)]


def widen(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """Return the interval with some room on both sides; a point gets room, too."""
    room = (high - low) * share or max(abs(high) * 0.1, 1e-3)
    return low - room, high + room


@dataclass(frozen=True)
class Scale:
    """Maps values onto pixels, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        # Divided first: the widths of extreme intervals overflow when multiplied.
        return self.start + (value / (high - low) - low / (high - low)) * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Return where to write numbers."""
        if not self.logarithmic:
            return ticks(self.low, self.high, wanted)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = [10.0**d for d in decades if self.low <= 10.0**d <= self.high]
        return every if len(every) > 1 else [self.low, self.high]


@dataclass(frozen=True)
class Frame:
    """The area of a plot, in units of its SVG."""

    width: float = 310
    height: float = 210
    left: float = 44
    right: float = 6
    top: float = 16
    bottom: float = 34

    def horizontal(self, low: float, high: float) -> Scale:
        """Return the scale from left to right."""
        return Scale(low, high, self.left, self.width - self.right)

    def vertical(self, low: float, high: float, logarithmic: bool = False) -> Scale:
        """Return the scale from bottom to top."""
        return Scale(low, high, self.height - self.bottom, self.top, logarithmic)

    def grid(self, x: Scale, y: Scale, x_label: Label, y_label: Label) -> Markup:
        """Return grid lines with their numbers."""
        floor, ceiling = self.height - self.bottom, self.top
        lines: list[Markup] = []
        for value in y.ticks():
            at = y(value)
            lines.append(line("grid", x.start, at, x.end, at))
            lines.append(text(x.start - 6, at + 4, y_label(value), "tick end"))
        for value in x.ticks(6):
            at = x(value)
            lines.append(line("grid faint", at, ceiling, at, floor))
            lines.append(text(at, floor + 15, x_label(value), "tick middle"))
        return join(*lines, line("axis", x.start, floor, x.end, floor))

    def x_title(self, title: str) -> Markup:
        """Return the name of the horizontal axis."""
        middle = (self.left + self.width - self.right) / 2
        return text(middle, self.height - 3, title, "axis-title middle")

    def y_title(self, title: str) -> Markup:
        """Return the name of the vertical axis, which is read at its top."""
        return text(0, 10, title, "axis-title")

    def svg(self, label: str, *content: Markup | None, **attributes: str | None) -> Markup:
        """Return the picture; `label` describes it to those who cannot see it."""
        return tag(
            "svg",
            *content,
            class_=f"chart {attributes.pop('class_', None) or ''}".strip(),
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            role="img",
            aria_label=label,
            **attributes,
        )


def text(x: float, y: float, content: str, class_: str) -> Markup:
    """Return text at a place."""
    return tag("text", content, x=float(x), y=float(y), class_=class_)


def line(class_: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    """Return a straight line."""
    return tag("line", class_=class_, x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2))


def path(points: Sequence[tuple[float, float] | None], class_: str) -> Markup:
    """Return a line through points; None leaves a gap, a lone point becomes a dot."""
    parts: list[str] = []
    dots: list[Markup] = []
    run: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            run.append(point)
            continue
        if len(run) == 1:
            dots.append(tag("circle", cx=run[0][0], cy=run[0][1], r=2.5, class_=f"dot {class_}"))
        elif run:
            parts.append("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in run))
        run = []
    drawn = tag("path", d="".join(parts), class_=f"line {class_}") if parts else None
    return join(drawn, *dots)
