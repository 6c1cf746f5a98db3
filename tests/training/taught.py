"""Teachers for tests of methods that learn from one."""

from __future__ import annotations

from typing import Any

import torch
import training_reference as reference

from tightrope.graph import Graph
from tightrope.training.objectives import METHODS
from tightrope.training.teachers import frozen_teacher


def teacher(name: str = "norm", seed: int = 9) -> Graph:
    """Return a frozen network of the same architecture as a network to train."""
    return frozen_teacher(reference.NETS[name](seed), reference.SHAPE, torch.device("cpu"))


def teaching(method: Any, name: str = "norm") -> dict[str, Graph]:
    """Return the options of a step by a method, given by its name or as an object."""
    chosen = METHODS.get(method) if isinstance(method, str) else method
    return {"teacher": teacher(name)} if getattr(chosen, "needs_teacher", False) else {}
