"""The summary: cards of the best run, and a table of all of them that can be sorted."""

from __future__ import annotations

from collections.abc import Sequence

from tightrope.page.content import Contents
from tightrope.page.markup import Content, Markup, each, scrolling, tag
from tightrope.page.numbers import MISSING, count, duration, percent

Cell = tuple[Content, float | str | None]  # what is shown, and what is sorted by


def best_run(runs: Sequence[Contents]) -> Contents:
    """Return the run with the highest certified accuracy if that means something.

    Otherwise it is the first one, if possible one that is certified.
    """
    certified = [run for run in runs if run.certificate is not None] or list(runs)
    return max(certified, key=_certified) if comparable(runs) else certified[0]


def comparable(runs: Sequence[Contents]) -> bool:
    """Return whether the accuracies of the certified runs are of equal data and radius."""
    kinds = {
        (run.settings.get("data"), run.radius, run.certificate.samples, run.certificate.open)
        for run in runs
        if run.certificate is not None
    }
    return len(kinds) == 1


def _certified(run: Contents) -> float:
    return -1.0 if run.certificate is None else run.certificate.certified


def draw_cards(run: Contents) -> Markup:
    """Return the cards of a run."""
    c = run.certificate
    seconds = None if c is None else c.seconds
    decided = None if c is None else c.samples - c.open
    of_all = None if c is None or not c.open else f"of {count(c.samples)}, still running"
    last = run.history[-1].values if run.history else {}
    natural, note = (None, None) if c is None else (c.natural, "test samples")
    if c is None and "validation_natural" in last:
        natural, note = last["validation_natural"], "validation, last epoch"
    unknown = "" if c is None else _unknown(c.unknown)
    cards = (
        ("Natural accuracy", percent(natural), note or "not measured yet", "natural", natural),
        (
            "Adversarial accuracy",
            percent(c.adversarial if c else None),
            "not broken by an attack" if c else "not certified yet",
            "adversarial",
            c.adversarial if c else None,
        ),
        (
            "Certified accuracy",
            percent(c.certified if c else None),
            f"proved{unknown}" if c else "not certified yet",
            "certified",
            c.certified if c else None,
        ),
    )
    facts = (
        ("Samples", count(decided), of_all),
        ("Radius ε", run.radius or MISSING, None),
        ("Method", run.method or MISSING, run.settings.get("net")),
        ("Training", duration(run.training_seconds), _epochs(run)),
        ("Certification", duration(seconds), None),
    )
    return tag(
        "div",
        tag("div", each(_card(*card) for card in cards), class_="cards"),
        tag("dl", each(_fact(*fact) for fact in facts), class_="facts-row"),
    )


def _unknown(unknown: int) -> str:
    return f", {count(unknown)} unknown" if unknown else ", none unknown"


def _epochs(run: Contents) -> str | None:
    planned = run.settings.get("epochs")
    done = len(run.history)
    if not done:
        return None
    return f"{done} epochs" if planned in (None, str(done)) else f"{done} of {planned} epochs"


def _card(name: str, value: str, note: str, kind: str, share: float | None) -> Markup:
    bar = tag(
        "svg",
        tag("rect", width=100.0, height=4.0, class_="track"),
        tag("rect", width=100.0 * min(max(share or 0.0, 0.0), 1.0), height=4.0, class_="level"),
        viewBox="0 0 100 4",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    return tag(
        "div",
        tag("p", name, class_="card-name"),
        tag("p", value, class_="card-value"),
        bar,
        tag("p", note, class_="card-note"),
        class_=f"card {kind}",
    )


def _fact(name: str, value: str, note: str | None) -> Markup:
    small = tag("small", f" {note}") if note else None
    return tag("div", tag("dt", name), tag("dd", value, small))


COLUMNS = (
    "#",
    "Run",
    "Method",
    "Net",
    "ε",
    "Samples",
    "Natural",
    "Adversarial",
    "Certified",
    "Unknown",
    "Training",
    "Certifying",
)
TEXT = {"Run", "Method", "Net"}


def draw_tables(runs: Sequence[Contents]) -> Markup:
    """Return tables of the runs, by what is guaranteed of them; headers are buttons that sort.

    Runs that have only votes under noise stand in the table of `draw_votes`.
    """
    numbered = list(enumerate(runs, start=1))
    proved = [(number, run) for number, run in numbered if run.certificate is not None]
    neither = [(n, run) for n, run in numbered if run.certificate is None and run.votes is None]
    groups = [("Certified: what is proved of each network.", proved)] if proved else []
    groups += [("Not certified: nothing is guaranteed of these.", neither)] if neither else []
    if len(groups) == 1 and len(groups[0][1]) == len(runs):
        groups = [("All runs.", numbered)]
    return each(_draw_table(caption, group, runs) for caption, group in groups)


def _draw_table(
    about: str, numbered: Sequence[tuple[int, Contents]], runs: Sequence[Contents]
) -> Markup:
    head = tag("tr", each(_header(name) for name in COLUMNS))
    body = each(_row(number, run) for number, run in numbered)
    caption = tag("caption", f"{about} Press a heading to sort by it.")
    table = tag("table", caption, tag("thead", head), tag("tbody", body), class_="sortable")
    certified = [run for _, run in numbered if run.certificate is not None]
    hint = None
    if len(certified) > 1 and not comparable(runs):
        text = "These runs were certified on different samples, data or radii: compare with care."
        hint = tag("p", text, class_="hint")
    return tag("div", scrolling(table, about.rstrip(".")), hint, class_="panel")


def _header(name: str) -> Markup:
    button = tag("button", name, tag("span", class_="arrow", aria_hidden="true"), type="button")
    return tag(
        "th",
        button,
        scope="col",
        aria_sort="ascending" if name == "#" else "none",
        class_=None if name in TEXT else "number",
    )


def _row(number: int, run: Contents) -> Markup:
    c = run.certificate
    seconds = run.training_seconds
    cells: tuple[Cell, ...] = (
        (number, float(number)),
        (run.name, run.name),
        (run.method or MISSING, run.method or ""),
        (run.settings.get("net", MISSING), run.settings.get("net", "")),
        (run.radius or MISSING, radius_value(run.eps)),
        (count(c.samples - c.open if c else None), float(c.samples - c.open) if c else None),
        (percent(c.natural if c else None), c.natural if c else None),
        (percent(c.adversarial if c else None), c.adversarial if c else None),
        (percent(c.certified if c else None), c.certified if c else None),
        (count(c.unknown if c else None), float(c.unknown) if c else None),
        (duration(seconds), seconds),
        (duration(c.seconds if c else None), c.seconds if c else None),
    )
    return tag(
        "tr",
        each(_cell(name, *cell) for name, cell in zip(COLUMNS, cells, strict=True)),
    )


def _cell(name: str, content: Content, value: float | str | None) -> Markup:
    plain = "" if value is None else value if isinstance(value, str) else repr(value)
    class_ = None if name in TEXT else "number"
    if name == "Run":
        return tag("th", content, scope="row", data_value=plain)
    return tag("td", content, class_=class_, data_value=plain)


def radius_value(text: str | None) -> float | None:
    """Return the number behind `0.1` or `8/255`, or None."""
    above, slash, below = (text or "").partition("/")
    try:
        return float(above) / (float(below) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        return None
