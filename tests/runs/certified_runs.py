"""Certifying a small run, and its results without the times."""

from __future__ import annotations

import json
from typing import Any

import tightrope as tr
from tightrope.runs import Run

EXPECTED = {
    0: ("verified", "ibp"),
    1: ("falsified", "natural"),
    2: ("falsified", "attack"),
    3: ("unknown", "attack"),
    4: ("verified", "ibp"),
    5: ("falsified", "attack"),
    6: ("falsified", "natural"),
    7: ("unknown", "attack"),
    8: ("falsified", "attack"),
    9: ("verified", "ibp"),
}


def certify(run: Run, **options: Any) -> tr.Certification:
    defaults = {"stages": ("ibp", "attack"), "steps": 10, "restarts": 2}
    return tr.certify(run, **{**defaults, **options})


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.journal.read_text().splitlines()]


def files(run: Run) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in run.folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_ino) for path in paths}
