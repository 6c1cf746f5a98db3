"""Tables and other pieces of a page as docutils nodes: their texts are never read as markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from docutils import nodes

Cell = str | nodes.Node


def table(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], numeric: Sequence[int] = ()
) -> nodes.table:
    """Return a table; the columns in `numeric` are aligned to the right."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    group += nodes.thead("", _row(header, numeric))
    group += nodes.tbody("", *(_row(row, numeric) for row in rows))
    return nodes.table("", group, classes=["colwidths-auto"])


def _row(cells: Sequence[Cell], numeric: Sequence[int]) -> nodes.row:
    row = nodes.row()
    for i, cell in enumerate(cells):
        content = nodes.Text(cell) if isinstance(cell, str) else cell
        classes = ["number"] if i in numeric else []
        row += nodes.entry("", nodes.paragraph("", "", content), classes=classes)
    return row


def section(title: str, name: str, *content: nodes.Node) -> nodes.section:
    """Return a section whose address is `name`."""
    return nodes.section("", nodes.title("", title), *content, ids=[name], names=[name])


def paragraph(*parts: str | nodes.Node) -> nodes.paragraph:
    """Return a paragraph of texts and inline nodes."""
    inline = [nodes.Text(part) if isinstance(part, str) else part for part in parts]
    return nodes.paragraph("", "", *inline)


def code(content: str) -> nodes.literal:
    """Return inline code."""
    return nodes.literal("", content)


def text(line: str) -> nodes.inline:
    """Return a line in which code is in backticks."""
    parts = line.split("`")
    return nodes.inline("", "", *(code(p) if i % 2 else nodes.Text(p) for i, p in enumerate(parts)))


def block(content: str, language: str = "text") -> nodes.literal_block:
    """Return a block of code."""
    return nodes.literal_block(content, content, language=language)


def folded(summary: str, *content: nodes.Node) -> list[nodes.Node]:
    """Return content that a reader can unfold."""
    before = f'<details class="record"><summary>{escape(summary)}</summary>'
    return [
        nodes.raw("", before, format="html"),
        *content,
        nodes.raw("", "</details>", format="html"),
    ]
