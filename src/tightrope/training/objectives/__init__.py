"""Training methods, one short file each, and the table that names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tightrope.errors import unknown_name
from tightrope.training.objectives.base import Loss, Objective
from tightrope.training.objectives.ibp import IBP
from tightrope.training.objectives.pgd import PGD
from tightrope.training.objectives.standard import Standard

METHODS: dict[str, type[Any]] = {method.name: method for method in (Standard, PGD, IBP)}


def find_method(name: str) -> type[Any]:
    """Return the class of a method by name."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


def method_options(name: str) -> Mapping[str, dataclasses.Field[Any]]:
    """Return the hyperparameters of a method: its dataclass fields by name."""
    return {field.name: field for field in dataclasses.fields(find_method(name))}


__all__ = [
    "IBP",
    "METHODS",
    "PGD",
    "Loss",
    "Objective",
    "Standard",
    "find_method",
    "method_options",
]
