"""Measured numbers in the documentation come from committed files, by the role `{result}`.

The rule: outside of code blocks, inline code, roles, formulas and links, a page must not contain a
percentage, a number with a unit of time or memory, "N times", or a decimal fraction that could be
an accuracy: anything but one digit, a point and one digit. Times spelled out ("two minutes") count,
too. Hyperparameters and versions are written as inline code or as a formula. Sections of a paper
("Section 4.2") and arXiv numbers are allowed.
"""

from __future__ import annotations

import re

import pytest
from pages import PAGES, without_blocks

NOT_PROSE = (
    re.compile(r"<!--.*?-->", re.S),
    re.compile(r"\$\$.*?\$\$", re.S),
    re.compile(r"(\{[\w:-]+\})?(`+)(?!`).+?(?<!`)\2(?!`)", re.S),  # roles and inline code
    re.compile(r"\$(?=\S)[^$\n]+\$"),
    re.compile(r"\]\([^)\n]*\)"),
    re.compile(r"https?://\S+"),
    re.compile(r"\barXiv[\s:]\d{4}\.\d{5}"),
    re.compile(r"\b(Sections?|Tables?|Figures?|Eqs?\.|Equations?|Appendix)\s[\d.,() and-]+"),
)
WORDS = "one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|sixty|half an?"
UNITS = r"ms|s|sec|seconds?|min|minutes?|h|hours?|days?|GB|MB|kB|GiB|MiB"
NUMBER = r"\b\d+(?:[.,]\d+)*"
MEASURED = re.compile(
    rf"""{NUMBER}\s*(?:%|per\s?cent\b|percentage\b|points?\b)
    | {NUMBER}\s*(?:{UNITS})\b
    | \b(?:{WORDS})\s(?:milliseconds?|seconds?|minutes?|hours?|days?|per\s?cent)\b
    | {NUMBER}\s*(?:times\b|-?fold\b|×)
    | (?<![\w.])(?:\d+\.\d\d+|\d\d+\.\d+)(?![\w.])
    """,
    re.X,
)


def measured(text: str) -> list[str]:
    """Return what looks measured in a page's prose, with line numbers."""
    prose = without_blocks(text)
    for pattern in NOT_PROSE:
        prose = pattern.sub(lambda match: "\n" * match[0].count("\n") or " ", prose)
    lines = enumerate(prose.splitlines(), start=1)
    return [f"line {i}: {match[0]!r}" for i, line in lines for match in MEASURED.finditer(line)]


@pytest.mark.parametrize("page", PAGES)
def test_no_measured_number_is_typed_by_hand(page: str) -> None:
    assert not measured(PAGES[page])


@pytest.mark.parametrize(
    "text",
    [
        "it certifies 88.47 % of them",
        "and 12% more",
        "training takes 31 s",
        "in about two minutes",
        "5 times slower",
        "an accuracy of 0.9312 there",
        "needs 3 GB",
    ],
)
def test_the_scan_sees(text: str) -> None:
    assert measured(f"# Title\n\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "{result}`demo/taps-0/certification.json certified .2%`",
        "a radius of `0.1` or $\\epsilon = 8/255$, and $w = 2.5$",
        "```sh\nsleep 10 s  # 50 %\n```",
        "`--timeout 60` has 60 as `1.5 s`",
        "see Section 4.2 and Table 10",
        "arXiv\n2305.04574, at 0.1 or 0.3",
        "six stages, two kinds of bounds, 10 classes",
    ],
)
def test_the_scan_lets_pass(text: str) -> None:
    assert not measured(f"# Title\n\n{text}\n")
