"""The certification as a waterfall: what each stage decided, what it left, how long it took."""

from __future__ import annotations

from tightrope.page.content import Certificate
from tightrope.page.markup import Markup, each, scrolling, tag
from tightrope.page.numbers import count, duration, percent
from tightrope.page.verdicts import key

WIDTH = 300.0
HEIGHT = 26.0
# A single sample of ten thousand can still be seen.
VISIBLE = 1.5


def draw_cascade(certificate: Certificate) -> Markup:
    """Return the table of stages with a bar in each row."""
    # Summaries that a damaged file leaves may count more than they should.
    decided = sum(s.verified + s.falsified for s in certificate.stages)
    total = max(certificate.samples - certificate.open, decided + certificate.unknown, 1)
    seconds = sum(stage.seconds for stage in certificate.stages)
    left = total
    rows = []
    for stage in certificate.stages:
        bar = _bar(total, left, stage.verified, stage.falsified)
        left -= stage.verified + stage.falsified
        share = f" ({percent(stage.seconds / seconds, 0)})" if seconds > 0 else ""
        numbers = (
            (count(stage.verified), None),
            (count(stage.falsified), None),
            (count(left), None),
            (duration(stage.seconds), share),
        )
        rows.append(
            tag(
                "tr",
                tag("th", stage.name, scope="row"),
                tag("td", bar, class_="bar"),
                each(
                    tag("td", text, tag("small", small) if small else None, class_="number")
                    for text, small in numbers
                ),
            )
        )
    head = tag(
        "tr",
        tag("th", "Stage", scope="col"),
        tag("th", "Samples", scope="col", class_="bar"),
        each(
            tag("th", name, scope="col", class_="number")
            for name in ("Verified", "Falsified", "Left", "Time")
        ),
    )
    table = tag("table", tag("thead", head), tag("tbody", each(rows)), class_="cascade")
    legend = tag(
        "p",
        *(key(v) for v in ("verified", "falsified")),
        tag("span", tag("i", class_="swatch left"), "left to the next stage", class_="legend"),
        class_="legends",
    )
    return tag(
        "div",
        scrolling(table, "Stages"),
        legend,
        _rest(certificate),
        class_="panel",
    )


def _bar(total: int, left: int, verified: int, falsified: int) -> Markup:
    """Return a bar of the open samples: those decided now, then those left."""
    scale = WIDTH / total
    wide = [max(n * scale, VISIBLE) if n > 0 else 0.0 for n in (verified, falsified)]
    start = min((total - left) * scale, WIDTH - sum(wide))
    pieces = [tag("rect", x=0.0, y=12.0, width=start, height=2.0, class_="done")]
    for width, name in zip(wide, ("verified", "falsified"), strict=True):
        if width:
            rectangle = {"x": start, "y": 3.0, "width": width, "height": 20.0}
            pieces.append(tag("rect", class_=f"fill {name}", **rectangle))
        start += width
    if start < WIDTH:
        rectangle = {"x": start, "y": 8.0, "width": WIDTH - start, "height": 10.0}
        pieces.append(tag("rect", class_="rest", **rectangle))
    return tag(
        "svg",
        each(pieces),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        preserveAspectRatio="none",
        aria_hidden="true",
        class_="strip",
    )


def _rest(certificate: Certificate) -> Markup | None:
    """Return a sentence about samples without a proof or counterexample."""
    sentences = []
    if certificate.unknown:
        reasons = ", ".join(f"{count(n)} {name}" for name, n in certificate.reasons.items())
        why = f" ({reasons})" if reasons else ""
        sentences.append(f"{count(certificate.unknown)} samples stayed unknown{why}.")
    if certificate.open:
        sentences.append(f"{count(certificate.open)} samples are not decided yet.")
    return tag("p", " ".join(sentences), class_="hint") if sentences else None
