"""The gallery: samples that were broken, and those that were hardest to prove."""

from __future__ import annotations

from tightrope.page.content import Contents, Exhibit
from tightrope.page.markup import Markup, each, tag
from tightrope.page.numbers import MISSING, significant
from tightrope.page.verdicts import badge


def draw_gallery(run: Contents) -> Markup | None:
    """Return both rows of the gallery, or None if no sample is certified."""
    if not run.samples:
        return None
    gallery = run.gallery
    problem = tag("p", gallery.problem, class_="notice") if gallery.problem else None
    broken = _row(
        "Falsified",
        "Counterexamples that the network itself confirms, the clearest first. The change is "
        f"amplified: full colour is {_full_colour(run)}, orange lighter, blue darker "
        "(colour images: around middle grey).",
        [_falsified(exhibit) for exhibit in gallery.falsified],
        "No sample was falsified.",
    )
    hardest = _row(
        "Hardest verified",
        "Verified samples with the smallest proved margins.",
        [_verified(exhibit) for exhibit in gallery.hardest],
        "No sample was verified.",
    )
    return tag("div", problem, broken, hardest)


def _full_colour(run: Contents) -> str:
    other = run.certificate is not None and run.certificate.norm is not None
    return "its largest pixel" if other else "the radius"


def _row(title: str, hint: str, cards: list[Markup], nothing: str) -> Markup:
    content = tag("ul", each(cards), class_="gallery") if cards else None
    intro = tag("p", hint if cards else nothing, class_="hint")
    return tag("div", tag("h4", title), intro, content, class_="exhibits")


def _falsified(exhibit: Exhibit) -> Markup:
    pictures = (
        ("original", exhibit.original, f"reads {exhibit.prediction}"),
        ("change", exhibit.perturbation, _size(exhibit)),
        ("adversarial", exhibit.adversarial, f"reads {exhibit.alias or MISSING}"),
    )
    shown = [entry for entry in pictures if entry[1] is not None]
    if exhibit.sample.counterexample is None:
        told = f"{exhibit.label} read as {exhibit.prediction} without any change"
    else:
        told = f"{exhibit.label} → {exhibit.alias or MISSING}"
    return tag(
        "li",
        tag("div", each(_picture(exhibit, *entry) for entry in shown), class_="pictures")
        if shown
        else None,
        _caption(exhibit, told),
        class_="exhibit broken",
    )


def _verified(exhibit: Exhibit) -> Markup:
    shown = exhibit.original is not None
    return tag(
        "li",
        tag("div", _picture(exhibit, "original", exhibit.original, None), class_="pictures")
        if shown
        else None,
        _caption(exhibit, f"label {exhibit.label}"),
        class_="exhibit",
    )


def _caption(exhibit: Exhibit, told: str) -> Markup:
    sample = exhibit.sample
    return tag(
        "p",
        tag("b", told),
        badge(sample.verdict),
        tag("span", f"margin {significant(sample.margin)}", class_="facts"),
        tag("span", f"#{sample.index} · {sample.stage}", class_="facts"),
        class_="about",
    )


def _picture(exhibit: Exhibit, kind: str, source: str | None, below: str | None) -> Markup:
    alternative = f"{kind} of test sample {exhibit.sample.index}, label {exhibit.label}"
    return tag(
        "figure",
        tag("img", src=source, alt=alternative, width=84.0, height=84.0),
        tag("figcaption", tag("b", below), f" {kind}") if below else None,
    )


def _size(exhibit: Exhibit) -> str | None:
    return None if exhibit.size is None else f"± {significant(exhibit.size)}"
