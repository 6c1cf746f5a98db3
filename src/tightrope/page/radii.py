"""Accuracies by radius, where a folder was certified at several: a chart and its numbers."""

from __future__ import annotations

from tightrope.page.axes import Frame, Scale, path
from tightrope.page.content import Certificate, Radius
from tightrope.page.markup import Markup, each, scrolling, tag
from tightrope.page.numbers import count, percent

FRAME = Frame(width=780, height=260, left=56, top=26, bottom=40)
# A field, what it is called, and the class that draws it.
SERIES = (
    ("natural", "natural", "training natural"),
    ("adversarial", "under attack", "validation robust"),
    ("certified", "certified", "training robust"),
)


def draw_radii(certificate: Certificate) -> Markup | None:
    """Return the curve of accuracies over radii; None if there is one radius only."""
    points = sorted(certificate.radii, key=lambda point: point.value)
    if len(points) < 2:
        return None
    x = FRAME.horizontal(0.0, points[-1].value * 1.04)
    y = FRAME.vertical(0.0, 1.0)
    known = [s for s in SERIES if any(getattr(point, s[0]) is not None for point in points)]
    lines = [
        path([_place(point, field, x, y) for point in points], style) for field, _, style in known
    ]
    dots = [
        tag("circle", cx=x(point.value), cy=y(point.certified), r=3.5, class_="dot robust")
        for point in points
    ]
    norm = f" ({certificate.norm})" if certificate.norm else ""
    spoken = "; ".join(f"{point.eps}: {percent(point.certified)}" for point in points)
    svg = FRAME.svg(
        f"Certified accuracy by radius{norm}: {spoken}",
        FRAME.grid(x, y, lambda value: f"{value:.4g}", lambda value: percent(value, 0)),
        *lines,
        *dots,
        FRAME.y_title("accuracy"),
        FRAME.x_title(f"radius ε{norm}"),
    )
    return tag(
        "figure",
        tag("figcaption", f"By radius{norm}"),
        scrolling(svg, "Accuracy by radius", class_="wide"),
        tag("p", each(_key(name, style) for _, name, style in known), class_="legends"),
        scrolling(_table(points), "Accuracies by radius"),
        class_="panel",
    )


def _place(point: Radius, field: str, x: Scale, y: Scale) -> tuple[float, float] | None:
    value = getattr(point, field)
    return None if value is None else (x(point.value), y(value))


def _key(name: str, style: str) -> Markup:
    stroke = tag("path", d="M0 5H22", class_=f"line {style}")
    picture = tag("svg", stroke, class_="key", viewBox="0 0 22 10", aria_hidden="true")
    return tag("span", picture, name, class_="legend")


def _table(points: list[Radius]) -> Markup:
    names = ("ε", "Samples", "Natural", "Under attack", "Certified", "Unknown")
    head = tag("tr", each(tag("th", name, scope="col", class_="number") for name in names))
    rows = each(
        tag(
            "tr",
            tag("th", point.eps, scope="row", class_="number"),
            each(
                tag("td", text, class_="number")
                for text in (
                    count(point.samples),
                    *map(percent, (point.natural, point.adversarial, point.certified)),
                    count(point.unknown),
                )
            ),
        )
        for point in points
    )
    return tag("table", tag("thead", head), tag("tbody", rows))
