"""Messages: one line, and nothing in them that a terminal would obey."""

import pytest

from tightrope.errors import UserError, printable, shorten, unknown_name


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("\x1b[2J\a\b") == r"\x1b[2J\x07\x08"
    assert printable("\x9b31m\x7f") == r"\x9b31m\x7f"
    assert printable("a\nb\r\tc\u2028") == r"a\nb\r\tc\u2028"
    assert printable("\u202egnp.exe\u2066") == r"\u202egnp.exe\u2066"
    assert printable("\udcff") == r"\udcff"


def test_what_people_write_is_kept() -> None:
    text = r"ε = 8/255 ± 0.1 %, Straße, 猫, كلب, क्‍ष, C:\data, é 'quoted' [bracket]"
    assert printable(text) == text


def test_an_error_is_one_printable_line() -> None:
    error = UserError("cannot read \x1b]0;title\x07:\n  line two\r\n\n line three\n")
    assert str(error) == r"cannot read \x1b]0;title\x07: line two line three"


LONG: dict[str, object] = {
    "positive": 10**5000,
    "negative": -(10**5000),
    "text": "9" * 10**6,
    "list": [10**5000],
    "table": {"a": [10**5000]},
    "bytes": b"\x1b" * 5000,
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_long_values_are_shortened(value: object) -> None:
    assert len(shorten(value)) < 70


def test_deep_values_are_shortened() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert len(shorten(value)) < 70


def test_short_values_are_quoted() -> None:
    assert shorten("a b") == "'a b'"
    assert shorten(7) == "7"
    assert shorten("x" * 70) == f"'{'x' * 59}..."


def test_an_unknown_name_is_shortened() -> None:
    error = unknown_name("setting", "x" * 10**6, ["width", "depth"])
    assert len(str(error)) < 200
