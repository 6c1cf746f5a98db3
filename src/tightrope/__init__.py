"""Tightrope: train, attack and certify neural networks that are provably robust.

    import tightrope as tr

    run = tr.train(data="mnist", net="cnn3", method=tr.TAPS(), eps=0.1, out="runs/a")
    print(tr.certify(run, samples=1000))

Every command of the command line has a function of the same name here. Names are imported when
they are first used, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tightrope.version import __version__ as __version__

if TYPE_CHECKING:  # the table below, for those who read types
    from tightrope.answer import Answer as Answer
    from tightrope.answer import Verdict as Verdict
    from tightrope.answer import Verification as Verification
    from tightrope.attacks import pgd as pgd
    from tightrope.box import Box as Box
    from tightrope.certification.attacking import AttackResult as AttackResult
    from tightrope.certification.attacking import attack as attack
    from tightrope.certification.bounding import bounds as bounds
    from tightrope.certification.certifying import certify as certify
    from tightrope.certification.radii import LargestRadius as LargestRadius
    from tightrope.certification.radii import largest_radius as largest_radius
    from tightrope.certification.smoothing.smoothing import Smoothing as Smoothing
    from tightrope.certification.smoothing.smoothing import smooth as smooth
    from tightrope.certification.specs import Spec as Spec
    from tightrope.certification.specs import argmax as argmax
    from tightrope.certification.specs import linear as linear
    from tightrope.certification.specs import within as within
    from tightrope.certification.verifying import verify as verify
    from tightrope.certification.verifying import verify_file as verify_file
    from tightrope.errors import UserError as UserError
    from tightrope.graph import Graph as Graph
    from tightrope.graph import trace as trace
    from tightrope.page.contents.reporting import Report as Report
    from tightrope.page.contents.reporting import report as report
    from tightrope.runs import Run as Run
    from tightrope.runs.exporting import export as export
    from tightrope.runs.merging import merge as merge
    from tightrope.runs.summary import Certification as Certification
    from tightrope.study.comparing import Comparison as Comparison
    from tightrope.study.comparing import compare as compare
    from tightrope.study.reproducing import reproduce as reproduce
    from tightrope.training.estimating import Estimate as Estimate
    from tightrope.training.estimating import estimate as estimate
    from tightrope.training.objectives import ADCERT as ADCERT
    from tightrope.training.objectives import CAP as CAP
    from tightrope.training.objectives import CCIBP as CCIBP
    from tightrope.training.objectives import COLT as COLT
    from tightrope.training.objectives import CROWNIBP as CROWNIBP
    from tightrope.training.objectives import EXPIBP as EXPIBP
    from tightrope.training.objectives import IBP as IBP
    from tightrope.training.objectives import IBPR as IBPR
    from tightrope.training.objectives import MART as MART
    from tightrope.training.objectives import MTLIBP as MTLIBP
    from tightrope.training.objectives import PGD as PGD
    from tightrope.training.objectives import SABR as SABR
    from tightrope.training.objectives import STAPS as STAPS
    from tightrope.training.objectives import TAPS as TAPS
    from tightrope.training.objectives import ARoW as ARoW
    from tightrope.training.objectives import CCDist as CCDist
    from tightrope.training.objectives import DiffAI as DiffAI
    from tightrope.training.objectives import Loss as Loss
    from tightrope.training.objectives import MultiPGD as MultiPGD
    from tightrope.training.objectives import Noise as Noise
    from tightrope.training.objectives import Objective as Objective
    from tightrope.training.objectives import SortNet as SortNet
    from tightrope.training.objectives import Standard as Standard
    from tightrope.training.training import train as train

# Where each public name lives.
_HOMES = {
    "answer": ("Answer", "Verdict", "Verification"),
    "attacks": ("pgd",),
    "box": ("Box",),
    "certification.attacking": ("AttackResult", "attack"),
    "certification.bounding": ("bounds",),
    "certification.certifying": ("certify",),
    "certification.radii": ("LargestRadius", "largest_radius"),
    "certification.smoothing.smoothing": ("Smoothing", "smooth"),
    "certification.specs": ("Spec", "argmax", "linear", "within"),
    "certification.verifying": ("verify", "verify_file"),
    "errors": ("UserError",),
    "graph": ("Graph", "trace"),
    "page.contents.reporting": ("Report", "report"),
    "runs": ("Run",),
    "runs.exporting": ("export",),
    "runs.merging": ("merge",),
    "runs.summary": ("Certification",),
    "study.comparing": ("Comparison", "compare"),
    "study.reproducing": ("reproduce",),
    "training.estimating": ("Estimate", "estimate"),
    "training.objectives": (
        *("CCIBP", "CROWNIBP", "EXPIBP", "IBP", "IBPR", "MTLIBP", "PGD", "SABR", "STAPS", "TAPS"),
        *("ADCERT", "ARoW", "CAP", "CCDist", "COLT", "DiffAI", "Loss", "MART", "MultiPGD"),
        *("Noise", "Objective", "SortNet", "Standard"),
    ),
    "training.training": ("train",),
}

__all__ = [name for names in (*_HOMES.values(), ("__version__",)) for name in sorted(names)]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"tightrope.{home}"), name)
    raise AttributeError(f"module 'tightrope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
