"""The page: one HTML file that holds everything and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Template

from tightrope.page.cascade import draw_cascade
from tightrope.page.content import Contents, Skipped
from tightrope.page.curves import draw_curves
from tightrope.page.gallery import draw_gallery
from tightrope.page.margins import draw_margins
from tightrope.page.markup import Markup, each, escape, join, page_file, tag
from tightrope.page.numbers import count
from tightrope.page.overview import best_run, comparable, draw_cards, draw_tables
from tightrope.page.radii import draw_radii
from tightrope.page.repeating import draw_settings
from tightrope.page.tradeoff import draw_tradeoff
from tightrope.page.verdicts import patterns
from tightrope.page.votes import draw_votes

Draw = Callable[[Contents], Markup | None]


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    anchor: str
    title: str
    intro: str
    content: Markup


def render(runs: Sequence[Contents], skipped: Sequence[Skipped], *, version: str, made: str) -> str:
    """Return the page of some runs; there is at least one."""
    assert runs
    sections = _sections(runs, skipped)
    names = ", ".join(run.name for run in runs[:3]) + (" …" if len(runs) > 3 else "")
    style, script = page_file("style.css"), page_file("script.js")
    return Template(page_file("template.html")).substitute(
        title=escape(f"{names} · Tightrope report"),
        policy=escape(_policy(style, script)),
        style=style,
        script=script,
        patterns=patterns(),
        heading=escape(names if len(runs) == 1 else f"{count(len(runs))} runs"),
        subtitle=_subtitle(runs),
        contents=each(_link(section) for section in sections),
        sections=each(_draw(section) for section in sections),
        footer=escape(f"Made by Tightrope {version} on {made}."),
    )


def _policy(style: str, script: str) -> str:
    """Return a policy under which the page can load nothing and run only our own script."""
    digests = []
    for text in (style, script):
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        digests.append(f"'sha256-{base64.b64encode(digest).decode('ascii')}'")
    return (
        f"default-src 'none'; img-src data:; style-src {digests[0]}; script-src {digests[1]}; "
        "base-uri 'none'; form-action 'none'"
    )


def _sections(runs: Sequence[Contents], skipped: Sequence[Skipped]) -> list[Section]:
    return [
        Section("summary", "Summary", "", _summary(runs, skipped)),
        Section(
            "training",
            "Training",
            "Point at a chart, or focus it and use the arrow keys, to read off an epoch.",
            _by_run(runs, draw_curves, "No epoch has been trained yet."),
        ),
        Section(
            "certification",
            "Certification",
            "Cheap stages go first; each decides what it can and leaves the rest to the next.",
            _by_run(runs, _cascade, _UNCERTIFIED),
        ),
        Section(
            "tradeoff",
            "Natural versus certified",
            "",
            draw_tradeoff(runs) or _nothing(_UNCERTIFIED),
        ),
        Section(
            "margins",
            "Margins",
            "A proved margin is a lower bound over the whole ball; a counterexample's margin is "
            "the network's own output there. Cheap stages prove less than the network deserves.",
            _by_run(runs, draw_margins, _UNCERTIFIED),
        ),
        Section("gallery", "Gallery", "", _by_run(runs, draw_gallery, _UNCERTIFIED, fold=True)),
        Section("settings", "Settings", "", _by_run(runs, draw_settings, "", fold=True)),
    ]


_UNCERTIFIED = "Nothing is certified yet: `tightrope certify` does that."


def _cascade(run: Contents) -> Markup | None:
    if run.certificate is None:
        return None
    return join(draw_cascade(run.certificate), draw_radii(run.certificate))


def _summary(runs: Sequence[Contents], skipped: Sequence[Skipped]) -> Markup:
    best = best_run(runs)
    lead, table = None, None
    if len(runs) > 1:
        first = "the first run that is certified" if best.certificate else "the first run"
        reason = "the highest certified accuracy" if comparable(runs) else first
        lead = tag("p", tag("b", best.name), f", {reason}:", class_="lead")
        table = draw_tables(runs)
    notices = [(run.name, notice) for run in runs for notice in run.notices]
    notices += [(path.folder, path.reason) for path in skipped]
    return join(_notices(notices), lead, draw_cards(best), table, draw_votes(runs))


def _notices(notices: Sequence[tuple[str, str]]) -> Markup | None:
    if not notices:
        return None
    lines = each(tag("li", tag("b", name), ": ", text) for name, text in notices)
    title = tag("p", tag("strong", "Please note"), class_="notice-title")
    return tag("div", title, tag("ul", lines), class_="notice", role="note")


def _by_run(runs: Sequence[Contents], draw: Draw, nothing: str, *, fold: bool = False) -> Markup:
    """Return one block per run; with `fold`, all but the first can be opened."""
    blocks = []
    for number, run in enumerate(runs, start=1):
        content = draw(run) or _nothing(nothing)
        if len(runs) == 1:
            blocks.append(tag("div", content, class_="run"))
            continue
        title = tag("h3", tag("span", f"{number} ", class_="run-number"), run.name)
        if fold:
            summary = tag("summary", title)
            blocks.append(tag("details", summary, content, class_="run", open=number == 1))
        else:
            blocks.append(tag("article", title, content, class_="run"))
    return each(blocks)


def _nothing(text: str) -> Markup:
    return tag("p", text, class_="nothing")


def _subtitle(runs: Sequence[Contents]) -> Markup:
    if len(runs) > 1:
        return escape(" · ".join(dict.fromkeys(run.method or "unknown" for run in runs)))
    run = runs[0]
    parts = (run.method, run.settings.get("net"), run.settings.get("data"))
    known = [part for part in parts if part] + ([f"ε = {run.radius}"] if run.radius else [])
    return escape(" · ".join(known) or run.folder)


def _link(section: Section) -> Markup:
    return tag("li", tag("a", section.title, href=f"#{section.anchor}"))


def _draw(section: Section) -> Markup:
    heading = tag("h2", section.title, id=f"{section.anchor}-title")
    intro = tag("p", section.intro, class_="intro") if section.intro else None
    return tag(
        "section",
        heading,
        intro,
        section.content,
        id=section.anchor,
        aria_labelledby=f"{section.anchor}-title",
    )
