"""Votes under noise: a table of its own, never beside proofs."""

from __future__ import annotations

from collections.abc import Sequence

from tightrope.page.content import Contents, Votes
from tightrope.page.markup import Markup, each, scrolling, tag
from tightrope.page.numbers import MISSING, count, percent

ABOUT = (
    "Randomised smoothing: the majority vote of the network on noisy copies of an input, in the l2 "
    "norm. Each radius holds with probability 1 − α only; none of this is a proof."
)
COLUMNS = ("#", "Run", "Method", "σ", "Draws", "α", "Samples", "Accuracy", "Abstained")
TEXT = {"Run", "Method"}


def draw_votes(runs: Sequence[Contents]) -> Markup | None:
    """Return the table of the runs that were smoothed, None if there is none."""
    smoothed = [(n, run, run.votes) for n, run in enumerate(runs, start=1) if run.votes is not None]
    if not smoothed:
        return None
    radii = list(dict.fromkeys(radius for _, _, votes in smoothed for radius in votes.certified))
    names = (*COLUMNS, *(f"l2 {radius}" for radius in radii))
    head = tag("tr", each(_header(name) for name in names))
    body = each(_row(number, run, votes, radii) for number, run, votes in smoothed)
    table = tag("table", tag("caption", ABOUT), tag("thead", head), tag("tbody", body))
    return tag("div", scrolling(table, "Randomised smoothing"), class_="panel votes")


def _header(name: str) -> Markup:
    return tag("th", name, scope="col", class_=None if name in TEXT else "number")


def _row(number: int, run: Contents, votes: Votes, radii: Sequence[str]) -> Markup:
    cells = (
        f"{votes.sigma:g}",
        count(votes.draws),
        f"{votes.alpha:g}",
        count(votes.samples),
        percent(votes.accuracy),
        percent(votes.abstained),
        *(percent(votes.certified.get(radius)) for radius in radii),
    )
    return tag(
        "tr",
        tag("td", str(number), class_="number"),
        tag("th", run.name, scope="row"),
        tag("td", run.method or MISSING),
        each(tag("td", cell, class_="number") for cell in cells),
    )
