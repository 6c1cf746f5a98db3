"""HTML from Python: text is escaped, always, and by one function.

Only a `Markup` passes unescaped, and only `tag`, `join` and `page_file` make one; whatever comes
from a file is a plain `str` and cannot become markup by accident.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tightrope.errors import printable

FILES = Path(__file__).parent / "static"
_VOID = frozenset({"br", "img", "input", "meta"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | int | None


def escape(content: Content) -> Markup:
    """Return content as HTML: a `Markup` as it is, anything else escaped."""
    if isinstance(content, Markup):
        return content
    text = "" if content is None else str(content)
    # What cannot be seen must not be there: no NUL, no lone surrogate, no reversed writing.
    lines = [printable(line) for line in text.split("\n")]
    return Markup(html.escape("\n".join(lines), quote=True))


def join(*parts: Content, by: str = "") -> Markup:
    """Return the parts one after the other, each escaped."""
    return Markup(escape(by).join(escape(part) for part in parts if part is not None))


def tag(name: str, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """Return an element; `class_` and `aria_label` become `class` and `aria-label`.

    An attribute that is None or False is left out, one that is True has no value.
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        text = number(value) if isinstance(value, float) else str(value)
        written.append(f" {key}" if value is True else f' {key}="{escape(text)}"')
    opening = f"<{name}{''.join(written)}>"
    if name in _VOID:
        return Markup(opening)
    return Markup(f"{opening}{join(*content)}</{name}>")


def number(value: float) -> str:
    """Return a coordinate for an attribute, rounded to what can be seen."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def each(parts: Iterable[Content]) -> Markup:
    """Return the elements of an iterable one after the other."""
    return join(*parts)


def scrolling(content: Markup, label: str, class_: str = "") -> Markup:
    """Return wide content that scrolls by itself, with keys as well as with fingers."""
    names = f"scroll {class_}".strip()
    return tag("div", content, class_=names, tabindex="0", role="region", aria_label=label)


def data_block(value: Any) -> Markup:
    """Return a script element that holds JSON for our script, whatever text is in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # no `</script>` and no `<!--` can end or change the element
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json">{text}</script>')


def page_file(name: str) -> Markup:
    """Return one of our own static files, which needs no escaping."""
    return Markup((FILES / name).read_text(encoding="utf-8").strip())
