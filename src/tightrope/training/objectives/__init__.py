"""Training methods, one short file each, and the table that names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

from tightrope.errors import unknown_name
from tightrope.training.objectives.arow import ARoW
from tightrope.training.objectives.base import Guarantee, Loss, Objective, Stage
from tightrope.training.objectives.cap import CAP
from tightrope.training.objectives.colt import COLT
from tightrope.training.objectives.crown_ibp import CROWNIBP
from tightrope.training.objectives.diffai import DiffAI
from tightrope.training.objectives.distillation import ADCERT, CCDist
from tightrope.training.objectives.expressive import CCIBP, EXPIBP, MTLIBP
from tightrope.training.objectives.ibp import IBP
from tightrope.training.objectives.ibp_r import IBPR
from tightrope.training.objectives.mart import MART
from tightrope.training.objectives.multi_pgd import MultiPGD
from tightrope.training.objectives.noise import Noise
from tightrope.training.objectives.pgd import PGD
from tightrope.training.objectives.sabr import SABR
from tightrope.training.objectives.sortnet import SortNet
from tightrope.training.objectives.standard import Standard
from tightrope.training.objectives.staps import STAPS
from tightrope.training.objectives.taps import TAPS

_ALL = (
    *(Standard, PGD, MultiPGD, IBP, SABR, TAPS, STAPS, MTLIBP, CCIBP, EXPIBP, IBPR, CROWNIBP),
    *(ADCERT, CCDist, ARoW, MART, COLT, DiffAI, CAP, SortNet, Noise),
)
METHODS: dict[str, type[Objective]] = {method.name: method for method in _ALL}


def find_method(name: str) -> type[Objective]:
    """Return the class of a method by name."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def method_options(name: str) -> Mapping[str, Field[Any]]:
    """Return the hyperparameters of a method: its dataclass fields by name."""
    return find_method(name).hyperparameters()


def section(name: str) -> str:
    """Return the name under which a method's options appear in the settings: mtl.alpha."""
    return find_method(name).section


__all__ = [
    "ADCERT",
    "CAP",
    "CCIBP",
    "COLT",
    "CROWNIBP",
    "EXPIBP",
    "IBP",
    "IBPR",
    "MART",
    "METHODS",
    "MTLIBP",
    "PGD",
    "SABR",
    "STAPS",
    "TAPS",
    "ARoW",
    "CCDist",
    "DiffAI",
    "Guarantee",
    "Loss",
    "MultiPGD",
    "Noise",
    "Objective",
    "SortNet",
    "Stage",
    "Standard",
    "find_method",
    "method_options",
    "section",
]
