"""Docstrings and help are plain text with code in single backticks: nothing else is markup."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(`+[^`]*`+)")
MARKUP = re.compile(r"[*|]|_\b")


def escape(text: str) -> str:
    """Escape what reStructuredText would take for markup, outside of code."""
    parts = CODE.split(text)
    parts[::2] = [MARKUP.sub(lambda match: "\\" + match[0], part) for part in parts[::2]]
    return "".join(parts)


def process(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Escape a docstring; code may go over the end of a line."""
    lines[:] = escape("\n".join(lines)).split("\n")


def process_help(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Escape the help of a command, whose verbatim lines begin with a bar by now."""
    for i, line in enumerate(lines):
        start = "| " if line.startswith("| ") else ""
        lines[i] = start + escape(line.removeprefix(start))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", process)
    app.connect("sphinx-click-process-description", process_help)
    app.connect("sphinx-click-process-epilog", process_help)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
