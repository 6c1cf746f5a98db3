"""Settings of the documentation, built by `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

from tightrope.version import __version__

project = "Tightrope"
author = "The Tightrope authors"
project_copyright = author
version = release = __version__
language = "en-GB"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_click",
    "sphinx_copybutton",
    "known_choices",
    "offline_math",
    "plain_docstrings",
    "recorded_results",
    "result_role",
]
# What lies in the folders below docs/results is data; recorded_results shows it.
exclude_patterns = ["_build", "results/*/**"]
results_dir = "results"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# A documented command is copied whole, without what it prints.
copybutton_exclude = ".linenos, .gp, .go"

smartquotes = False  # they would turn --out into a dash
highlight_language = "text"
default_role = "literal"  # docstrings write code in single backticks
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88

# Links to other projects would need the network; within Tightrope every name must resolve.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!tightrope\.).*"),
    (
        r"py:class",
        r".*\.(onnx\.check\.Item|parallel\.task\.Item|parallel\.scheduler\.Worker|found\.T|pooled\.P"
        r"|distributed\.T)",
    ),
]

html_theme = "furo"
html_title = f"Tightrope {release}"
html_static_path = ["_static"]
html_css_files = ["tightrope.css"]
html_copy_source = False
html_show_sphinx = False
