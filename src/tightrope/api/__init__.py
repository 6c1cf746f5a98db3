"""Every command as a Python call; each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightrope.api.attacking import AttackResult, attack
    from tightrope.api.bounding import bounds
    from tightrope.api.certifying import certify
    from tightrope.api.comparing import Comparison, Entry, compare
    from tightrope.api.estimating import Estimate, estimate
    from tightrope.api.exporting import export
    from tightrope.api.reporting import Report, report
    from tightrope.api.reproducing import reproduce
    from tightrope.api.training import train
    from tightrope.api.verifying import Verification, verify, verify_file

_HOMES = {
    "attacking": ("AttackResult", "attack"),
    "bounding": ("bounds",),
    "certifying": ("certify",),
    "comparing": ("Comparison", "Entry", "compare"),
    "estimating": ("Estimate", "estimate"),
    "exporting": ("export",),
    "reporting": ("Report", "report"),
    "reproducing": ("reproduce",),
    "training": ("train",),
    "verifying": ("Verification", "verify", "verify_file"),
}

__all__ = [
    "AttackResult",
    "Comparison",
    "Entry",
    "Estimate",
    "Report",
    "Verification",
    "attack",
    "bounds",
    "certify",
    "compare",
    "estimate",
    "export",
    "report",
    "reproduce",
    "train",
    "verify",
    "verify_file",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"tightrope.api.{home}"), name)
    raise AttributeError(f"module 'tightrope.api' has no attribute {name!r}")
