"""What the page reads of `smoothing.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightrope.page.content import Votes
from tightrope.page.contents.votes import read_votes

WHOLE: dict[str, Any] = {
    "samples": 20,
    "accuracy": 0.9,
    "abstained": 0.05,
    "certified": {"0.25": 0.8, "1": 0},
    "settings": {"norm": "l2", "sigma": 0.25, "draws": 1000, "alpha": 0.001},
}


def read(folder: Path, found: Any) -> tuple[Votes | None, list[str]]:
    path = folder / "smoothing.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return read_votes(path)


def test_what_is_there(tmp_path: Path) -> None:
    assert read_votes(tmp_path / "smoothing.json") == (None, [])
    votes, notices = read(tmp_path, WHOLE)
    assert votes == Votes(20, 0.9, 0.05, 0.25, 1000, 0.001, {"0.25": 0.8, "1": 0.0})
    assert notices == []


@pytest.mark.parametrize(
    "found",
    [
        "[]",
        "{",
        {},
        {**WHOLE, "samples": "many"},
        {**WHOLE, "accuracy": 1.5},
        {**WHOLE, "accuracy": True},
        {**WHOLE, "certified": [0.8]},
        {**WHOLE, "certified": {"0.25": None}},
        {**WHOLE, "settings": "none"},
        {**WHOLE, "settings": {**WHOLE["settings"], "sigma": -1}},
        {**WHOLE, "settings": {**WHOLE["settings"], "draws": 0}},
    ],
)
def test_damage_is_said_and_shows_nothing(tmp_path: Path, found: Any) -> None:
    votes, notices = read(tmp_path, found)
    assert votes is None and len(notices) == 1
    assert "smoothing.json" in notices[0]
