"""What `smoothing.json` says, for the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightrope.page.content import Votes
from tightrope.runs.found import read_result


def read_votes(path: Path) -> tuple[Votes | None, list[str]]:
    """Return what votes say of a run's network, and what of the file cannot be read."""
    if not path.exists():
        return None, []
    found = read_result(path, "a result")
    if found.damage is not None:
        return None, found.notices
    try:
        return _votes(found.content), found.notices
    except (AttributeError, KeyError, TypeError, ValueError):
        return None, [*found.notices, f"{path.name} is damaged: its numbers are missing"]


def _votes(found: Mapping[str, Any]) -> Votes:
    said = found["settings"]
    return Votes(
        samples=_count(found["samples"]),
        accuracy=_share(found["accuracy"]),
        abstained=_share(found["abstained"]),
        sigma=_positive(said["sigma"]),
        draws=_count(said["draws"]),
        alpha=_share(said["alpha"]),
        certified={str(radius): _share(v) for radius, v in found["certified"].items()},
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("not a count")
    return value


def _share(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError("not a share")
    return float(value)


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError("not a positive number")
    return float(value)
