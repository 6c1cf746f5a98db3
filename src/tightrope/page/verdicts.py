"""Verdicts look the same everywhere: a colour, a sign and a pattern each."""

from __future__ import annotations

from tightrope.page.markup import Markup, tag

SIGNS = {"verified": "✓", "falsified": "✕", "unknown": "?"}


def badge(verdict: str) -> Markup:
    """Return a verdict as a small label."""
    sign = tag("span", SIGNS.get(verdict, "?"), aria_hidden="true")
    return tag("span", sign, f" {verdict}", class_=f"badge {verdict}")


def key(verdict: str, name: str | None = None) -> Markup:
    """Return the entry of a verdict in a legend."""
    swatch = tag(
        "svg",
        tag("rect", width=14.0, height=14.0, class_=f"fill {verdict}"),
        viewBox="0 0 14 14",
        class_="swatch",
        aria_hidden="true",
    )
    return tag("span", swatch, name or verdict, class_="legend")


def patterns() -> Markup:
    """Return the patterns that tell verdicts apart without colour; once per page."""

    def pattern(name: str, size: float, *content: Markup) -> Markup:
        return tag(
            "pattern",
            tag("rect", width=size, height=size, class_=f"ground {name}"),
            *content,
            id=f"pattern-{name}",
            width=size,
            height=size,
            patternUnits="userSpaceOnUse",
            patternTransform="rotate(45)" if name == "falsified" else None,
        )

    stripe = tag("rect", width=2.0, height=6.0, class_="mark")
    spot = tag("circle", cx=3.0, cy=3.0, r=1.2, class_="mark")
    definitions = tag("defs", pattern("falsified", 6.0, stripe), pattern("unknown", 6.0, spot))
    return tag("svg", definitions, class_="patterns", width=0.0, height=0.0, aria_hidden="true")
