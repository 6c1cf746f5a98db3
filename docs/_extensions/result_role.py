"""The role `{result}`: a measured number, read from a committed file when the page is built.

    {result}`demo/taps-0/certification.json certified .2%`

is the value `certified` of `docs/results/demo/taps-0/certification.json`, written with Python's
format `.2%`. A path such as `stages.bab.verified` or `tables.0.rows.3.certified` goes deeper.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole


def look_up(folder: Path, text: str) -> str:
    """Return the text that stands for a role's content; raises ValueError if there is none."""
    parts = text.split()
    if len(parts) not in (2, 3):
        raise ValueError(f"expected 'FILE KEY [FORMAT]', got {text!r}")
    file, key, *form = parts
    value: Any = json.loads((folder / file).read_text(encoding="utf-8"))
    for step in key.split("."):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"{file} has no {key}: nothing at {step!r}") from None
    if isinstance(value, (dict, list)):
        raise ValueError(f"{key} of {file} is no single value")
    return format(value, *form)


class ResultRole(SphinxRole):
    """Replaces a reference to a measurement by its number."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the number, or an error that stops the build."""
        folder = Path(self.env.app.confdir) / self.config.results_dir
        file = folder / self.text.partition(" ")[0]
        try:
            self.env.note_dependency(str(file))
            return [nodes.inline("", look_up(folder, self.text), classes=["result"])], []
        except (OSError, ValueError) as error:
            message = self.inliner.reporter.error(f"result: {error}", line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_role("result", ResultRole())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
