"""Text from files stays text, whatever it is."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightrope.page.markup import Markup, data_block, escape, join, page_file, tag

HOSTILE = "</script><script>alert(1)</script><!--\"'&<img src=x onerror=alert(2)>"


class Reader(HTMLParser):
    """Collects elements, their attributes and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


visible = st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"])


@given(st.text(visible | st.just("\n")))
def test_text_comes_back_as_text(text: str) -> None:
    reader = Reader(tag("p", text, title=text))
    assert reader.found == [("p", [("title", text)])]
    assert reader.text == text


@given(st.text())
def test_any_text_can_be_written(text: str) -> None:
    assert tag("p", text).encode("utf-8").count(b"<") == 2


def test_what_cannot_be_seen_is_written_out() -> None:
    text = "a\x1b[31m\0\r\x9b\u202e\udc80\n\tb"
    written = r"a\x1b[31m\x00\r\x9b\u202e\udc80" + "\n" + r"\tb"
    assert tag("p", text, title=text) == f'<p title="{written}">{written}</p>'


def test_markup_is_not_escaped_twice() -> None:
    inner = tag("b", "a & b")
    assert tag("p", inner, " < c") == "<p><b>a &amp; b</b> &lt; c</p>"
    assert join("<", Markup("<br>"), None, 3) == "&lt;<br>3"
    assert escape(None) == ""


def test_attributes_that_are_off_are_left_out() -> None:
    made = tag("button", "x", hidden=True, title=None, disabled=False, aria_label="a", class_="c")
    assert made == '<button hidden aria-label="a" class="c">x</button>'
    assert tag("img", alt="", width=1.50) == '<img alt="" width="1.5">'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values | st.just([HOSTILE, {HOSTILE: HOSTILE}]))
def test_data_cannot_leave_its_element(value: object) -> None:
    block = data_block(value)
    start, end = '<script type="application/json">', "</script>"
    assert block.startswith(start) and block.endswith(end)
    inside = block[len(start) : -len(end)]
    assert not set("<>&") & set(inside)
    assert json.loads(inside) == value


def test_data_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError):
        data_block({"x": float("nan")})


@pytest.mark.parametrize("name", ["style.css", "script.js", "template.html"])
def test_our_own_files_ask_for_nothing(name: str) -> None:
    text = page_file(name)
    assert text
    for outside in (
        "http:",
        "https:",
        "//cdn",
        "@import",
        "fetch(",
        "XMLHttp",
        "innerHTML",
        "eval(",
    ):
        assert outside not in text
    if name != "template.html":
        assert "</" not in text
