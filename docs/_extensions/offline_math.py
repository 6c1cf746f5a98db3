"""Formulas without the network: MathJax is copied into the site, one file of it."""

from __future__ import annotations

import shutil
from importlib.metadata import files
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

# With SVG output, MathJax needs no fonts and no further files.
SCRIPT = "tex-svg.js"


def set_path(app: Sphinx, config: Any) -> None:
    """Let pages load the copy."""
    config.mathjax_path = f"mathjax/{SCRIPT}"


def copy_script(app: Sphinx, error: Exception | None) -> None:
    """Copy MathJax out of the package that carries it."""
    if error is not None or app.builder.format != "html":
        return
    (source,) = [f for f in files("sphinx-mathjax-offline") or () if f.name == SCRIPT]
    target = Path(app.outdir) / "_static" / "mathjax" / SCRIPT
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(str(source.locate()), target)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("config-inited", set_path)
    app.connect("build-finished", copy_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
