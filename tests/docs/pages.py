"""The hand-written pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = ("_build", "results")
PAGES = {
    str(page.relative_to(DOCS)): page.read_text(encoding="utf-8")
    for page in sorted(DOCS.rglob("*.md"))
    if page.relative_to(DOCS).parts[0] not in GENERATED
}
FENCE = re.compile(
    r"^(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=fence)\s*$", re.M | re.S
)


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [m["code"] for m in FENCE.finditer(PAGES[page]) if m["info"].strip() == language]


def without_blocks(text: str) -> str:
    """Return a page's text with every code block empty, on the same lines."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
