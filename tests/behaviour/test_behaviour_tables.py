"""Tables on terminals of any width, and in files."""

import io

import pytest
from rich.console import Console

from tightrope.cli import output, reproduce
from tightrope.study.experiment import Column, Table

TABLE = Table(
    "accuracies",
    "Accuracies",
    (
        Column("method", "trained by"),
        Column("certified", "certified accuracy"),
        Column("paper_certified", "certified by the authors"),
    ),
    ({"method": "TAPS", "certified": 88.47, "paper_certified": 87.14},),
)


def shown(monkeypatch: pytest.MonkeyPatch, *, width: int, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, no_color=True)
    monkeypatch.setattr(output, "console", console)
    monkeypatch.setattr(reproduce, "console", console)
    reproduce._print(TABLE)
    return console.file.getvalue()


def test_a_wide_terminal_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, width=100, terminal=True)
    assert "88.47" in text and "87.14" in text and "table.md" not in text


def test_a_narrow_terminal_shows_our_numbers_and_says_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = shown(monkeypatch, width=44, terminal=True)
    assert "88.47" in text and "87.14" not in text and "table.md" in text


def test_a_file_has_every_row_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, width=20, terminal=False)
    (row,) = [line for line in text.splitlines() if "TAPS" in line]
    assert row.split() == ["TAPS", "88.47", "87.14"]
