"""Natural against certified accuracy of all runs, drawn as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from tightrope.page.axes import Frame, Scale, line, text, widen
from tightrope.page.content import Certificate, Contents
from tightrope.page.markup import Markup, join, scrolling, tag
from tightrope.page.numbers import percent

FRAME = Frame(width=780, height=380, left=56, top=26, bottom=40)
LONGEST = 22
# More runs than this go by their numbers: names would cover each other.
NAMED = 8
LETTER = 6.6  # about the width of a letter of a label
LINE = 15.0
# Where a label may be, relative to its dot: to the right of it, left, and some lines up or down,
# the nearest first: runs with the same accuracies have all their labels at one dot.
PLACES = tuple((dx, 4 + LINE * n) for n in (0, -1, 1, -2, 2, -3, 3, -4, 4) for dx in (9, -9))

Rectangle = tuple[float, float, float, float]


def draw_tradeoff(runs: Sequence[Contents]) -> Markup | None:
    """Return the scatter plot of the certified runs; None if there is none.

    A thin line goes from what is certified up to what an attack left standing: the exact robust
    accuracy lies on it.
    """
    shown = [(i, run) for i, run in enumerate(runs, start=1) if run.certificate is not None]
    if not shown:
        return None
    certificates = [run.certificate for _, run in shown if run.certificate is not None]
    naturals = [c.natural for c in certificates]
    robust = [c.certified for c in certificates]
    robust += [c.adversarial for c in certificates if c.adversarial is not None]
    x = FRAME.horizontal(*_range(naturals))
    y = FRAME.vertical(*_range(robust))
    dots: list[Markup | None] = []
    taken = [_mark(c, x, y) for c in certificates]
    for number, run in shown:
        dots.append(_dot(run, _label(number, run, len(runs)), x, y, taken))
    svg = FRAME.svg(
        "Natural and certified accuracy: "
        + "; ".join(
            f"{run.name} {percent(c.natural)} and {percent(c.certified)}"
            for (_, run), c in zip(shown, certificates, strict=True)
        ),
        FRAME.grid(x, y, _percent, _percent),
        _diagonal(x, y),
        *dots,
        FRAME.y_title("robust accuracy: certified, and under attack"),
        FRAME.x_title("natural accuracy"),
    )
    scroll = scrolling(svg, "Natural versus certified", class_="wide")
    hint = (
        "A dot is the certified accuracy; the bar above it is what the attack left standing. "
        "The exact robust accuracy lies between the two."
    )
    if len(runs) > NAMED:
        hint += " The numbers are those of the table of all runs."
    return tag("figure", scroll, tag("p", hint, class_="hint"), class_="panel")


def _label(number: int, run: Contents, runs: int) -> str:
    if runs > NAMED:
        return str(number)
    name = run.name if len(run.name) <= LONGEST else f"{run.name[: LONGEST - 1]}…"
    return name if runs == 1 else f"{number} {name}"


def _mark(certificate: Certificate, x: Scale, y: Scale) -> Rectangle:
    """Return the area of a dot and the line above it."""
    across, up = x(certificate.natural), y(certificate.certified)
    top = up if certificate.adversarial is None else min(up, y(certificate.adversarial))
    return across - 6, top - 6, 12.0, up - top + 12


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = widen(min(values), max(values), 0.15)
    # At least three per cent, so that noise does not look like a difference.
    room = max(0.0, 0.03 - (high - low)) / 2
    low, high = low - room, high + room
    return max(low, 0.0), min(high, 1.0)


def _percent(value: float) -> str:
    return f"{100 * value:.4g}\u202f%"


def _diagonal(x: Scale, y: Scale) -> Markup | None:
    """Return the line that nothing can be above: certified samples are classified correctly."""
    low, high = max(x.low, y.low), min(x.high, y.high)
    if high - low < 0.2 * (x.high - x.low):
        return None
    drawn = line("diagonal", x(low), y(low), x(high), y(high))
    return join(drawn, text(x(high) - 8, y(high) + 14, "robust = natural", "diagonal-name end"))


def _dot(run: Contents, label: str, x: Scale, y: Scale, taken: list[Rectangle]) -> Markup | None:
    certificate = run.certificate
    assert certificate is not None
    across, up = x(certificate.natural), y(certificate.certified)
    whisker = None
    if certificate.adversarial is not None:
        top = y(certificate.adversarial)
        bar = line("whisker", across - 6, top, across + 6, top)
        whisker = join(line("whisker", across, up, across, top), bar)
    dx, dy = _free_place(across, up, len(label) * LETTER, taken)
    hint = (
        f"{run.name}: natural {percent(certificate.natural)}, "
        f"adversarial {percent(certificate.adversarial)}, "
        f"certified {percent(certificate.certified)}"
    )
    return tag(
        "g",
        tag("title", hint),
        whisker,
        tag("circle", cx=across, cy=up, r=5.0, class_="point"),
        text(across + dx, up + dy, label, "point-name" + (" end" if dx < 0 else "")),
    )


def _free_place(x: float, y: float, width: float, taken: list[Rectangle]) -> tuple[float, float]:
    """Return the offset of a label that covers least of what is there, and remember it."""

    def rectangle(place: tuple[float, float]) -> Rectangle:
        left = x + place[0] - (width if place[0] < 0 else 0)
        return left, y + place[1] - LINE + 3, width, LINE

    def cost(place: tuple[float, float]) -> float:
        left, top, wide, high = rectangle(place)
        inside = left >= FRAME.left and left + wide <= FRAME.width
        inside = inside and top >= 0 and top + high <= FRAME.height - FRAME.bottom
        return sum(_overlap((left, top, wide, high), other) for other in taken) + 1e4 * (not inside)

    best = min(PLACES, key=cost)
    taken.append(rectangle(best))
    return best


def _overlap(a: Rectangle, b: Rectangle) -> float:
    wide = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    high = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    return max(wide, 0.0) * max(high, 0.0)
