"""Training curves: loss, accuracies and radius by epoch, the annealing phase shaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightrope.page.axes import Frame, Label, Scale, line, path, text, widen
from tightrope.page.content import Contents, Epoch
from tightrope.page.markup import Markup, data_block, each, join, tag
from tightrope.page.numbers import percent, significant

# A loss that falls by more than this factor is drawn on a logarithmic scale.
WIDE = 50.0
FRAME = Frame()


@dataclass(frozen=True)
class Series:
    """One curve: the field of the history, its name, and the class that draws it."""

    field: str
    name: str
    style: str


LOSS = (Series("loss", "training loss", "training robust"),)
ACCURACY = (
    Series("natural", "natural, training", "training natural"),
    Series("validation_natural", "natural, validation", "validation natural"),
    Series("robust", "robust, training", "training robust"),
    Series("validation_robust", "robust, validation", "validation robust"),
)
RADIUS = (Series("radius", "radius", "training natural"),)


def draw_curves(run: Contents) -> Markup | None:
    """Return the three charts of a training, or None if it has no epoch yet."""
    if not run.history:
        return None
    charts = (
        _chart(run, "Accuracy", ACCURACY, lambda value: percent(value, 0)),
        _chart(run, "Loss", LOSS, lambda value: significant(value, 3)),
        _chart(run, "Radius", RADIUS, lambda value: significant(value, 3)),
    )
    return tag("div", each(charts), class_="charts")


def _chart(run: Contents, title: str, series: Sequence[Series], label: Label) -> Markup | None:
    """Return one chart with its legend and the values our script reads out."""
    known = [s for s in series if any(s.field in epoch.values for epoch in run.history)]
    if not known:
        return None
    x = FRAME.horizontal(0, max(epoch.number + 1 for epoch in run.history))
    y = _vertical(run.history, known, title)
    lines = [path([_place(epoch, s.field, x, y) for epoch in run.history], s.style) for s in known]
    cursor = line("cursor", x.start, FRAME.top, x.start, FRAME.height - FRAME.bottom)
    last = run.history[-1].values
    ends = ", ".join(f"{s.name} {_exact(title, last[s.field])}" for s in known if s.field in last)
    svg = FRAME.svg(
        f"{title} of {run.name} over {len(run.history)} epochs; at the end {ends or 'unknown'}",
        _phase(run.annealing, x),
        FRAME.grid(x, y, lambda value: f"{value:g}", label),
        FRAME.x_title("epoch"),
        *lines,
        cursor,
        class_="curves",
        tabindex="0",
    )
    readout = tag("output", _legend(known), class_="readout")
    return tag(
        "figure",
        tag("figcaption", title, tag("small", " logarithmic") if y.logarithmic else None),
        svg,
        readout,
        data_block(_values(run.history, known, x, title)),
        class_="panel",
    )


def _vertical(history: Sequence[Epoch], series: Sequence[Series], title: str) -> Scale:
    values = [e.values[s.field] for e in history for s in series if s.field in e.values]
    low, high = min(values), max(values)
    if title == "Accuracy":
        # The whole range would press good networks against the top.
        low, high = widen(low, high)
        return FRAME.vertical(max(low, 0.0), min(high, 1.0))
    if low > 0 and high / low > WIDE and title == "Loss":
        return FRAME.vertical(low / 1.1, high * 1.1, logarithmic=True)
    return FRAME.vertical(min(low, 0.0), widen(min(low, 0.0), high)[1])


def _place(epoch: Epoch, field: str, x: Scale, y: Scale) -> tuple[float, float] | None:
    value = epoch.values.get(field)
    return None if value is None else (x(epoch.number + 1), y(value))


def _phase(annealing: tuple[int, int] | None, x: Scale) -> Markup | None:
    """Return the shade over the epochs in which the radius grows, and its label."""
    if annealing is None:
        return None
    start, end = (x(min(max(epoch, x.low), x.high)) for epoch in annealing)
    if end - start < 1:
        return None
    height = FRAME.height - FRAME.bottom - FRAME.top
    shade = tag(
        "rect", x=float(start), y=FRAME.top, width=float(end - start), height=height, class_="phase"
    )
    edge = line("phase-edge", end, FRAME.top, end, FRAME.top + height)
    roomy = end - start > 50
    name = text(start + 3, FRAME.top - 4, "annealing" if roomy else "ann.", "phase-name")
    return join(shade, edge, name)


def _legend(series: Sequence[Series]) -> Markup:
    return each(
        tag(
            "span",
            tag(
                "svg",
                tag("path", d="M0 5H22", class_=f"line {s.style}"),
                class_="key",
                viewBox="0 0 22 10",
                aria_hidden="true",
            ),
            s.name,
            " ",
            tag("b", class_="value"),
            class_="legend",
        )
        for s in series
    )


def _exact(title: str, value: float | None) -> str:
    return percent(value) if title == "Accuracy" else significant(value, 4)


def _values(
    history: Sequence[Epoch], series: Sequence[Series], x: Scale, title: str
) -> dict[str, object]:
    return {
        "epochs": [epoch.number + 1 for epoch in history],
        "places": [round(x(epoch.number + 1), 1) for epoch in history],
        "series": [[_exact(title, e.values.get(s.field)) for e in history] for s in series],
    }
