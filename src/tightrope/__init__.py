"""Tightrope: train, attack and certify neural networks that are provably robust.

    import tightrope as tr

    run = tr.train(data="mnist", net="cnn3", method=tr.TAPS(), eps=0.1, out="runs/a")
    print(tr.certify(run, samples=1000))

Every command of the command line has a function of the same name here. Names are imported when
they are first used, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tightrope.version import __version__

if TYPE_CHECKING:
    from tightrope.api import (
        AttackResult,
        Comparison,
        Estimate,
        Report,
        Verification,
        attack,
        bounds,
        certify,
        compare,
        estimate,
        export,
        report,
        reproduce,
        train,
        verify,
        verify_file,
    )
    from tightrope.attacks import pgd
    from tightrope.box import Box
    from tightrope.certification import Certification, Verdict
    from tightrope.errors import UserError
    from tightrope.graph import Graph, trace
    from tightrope.runs import Run
    from tightrope.training.objectives import (
        CCIBP,
        EXPIBP,
        IBP,
        IBPR,
        MTLIBP,
        PGD,
        SABR,
        STAPS,
        TAPS,
        Loss,
        MultiPGD,
        Objective,
        Standard,
    )

_HOMES = {
    "tightrope.api": (
        "AttackResult",
        "Comparison",
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
    ),
    "tightrope.attacks": ("pgd",),
    "tightrope.box": ("Box",),
    "tightrope.certification": ("Certification", "Verdict"),
    "tightrope.errors": ("UserError",),
    "tightrope.graph": ("Graph", "trace"),
    "tightrope.runs": ("Run",),
    "tightrope.training.objectives": (
        "CCIBP",
        "EXPIBP",
        "IBP",
        "IBPR",
        "MTLIBP",
        "PGD",
        "SABR",
        "STAPS",
        "TAPS",
        "Loss",
        "MultiPGD",
        "Objective",
        "Standard",
    ),
}

__all__ = [
    "CCIBP",
    "EXPIBP",
    "IBP",
    "IBPR",
    "MTLIBP",
    "PGD",
    "SABR",
    "STAPS",
    "TAPS",
    "AttackResult",
    "Box",
    "Certification",
    "Comparison",
    "Estimate",
    "Graph",
    "Loss",
    "MultiPGD",
    "Objective",
    "Report",
    "Run",
    "Standard",
    "UserError",
    "Verdict",
    "Verification",
    "__version__",
    "attack",
    "bounds",
    "certify",
    "compare",
    "estimate",
    "export",
    "pgd",
    "report",
    "reproduce",
    "trace",
    "train",
    "verify",
    "verify_file",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'tightrope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `tr.report` a function: importing the package `tightrope.report` would replace it."""

    @property
    def report(self) -> Any:
        """The function, as for every other name in `__all__`."""
        return __getattr__("report")

    @report.setter
    def report(self, module: ModuleType) -> None:
        """Ignore what the import system sets; it finds the package by `sys.modules`."""


sys.modules[__name__].__class__ = _Package
