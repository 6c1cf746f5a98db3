"""Architectures by name; a network to and from a folder; ONNX export.

Names are imported when they are first used: the list of networks needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tightrope.nets.summaries import NetSummary, describe, net_names

if TYPE_CHECKING:  # the table below, for those who read types
    from tightrope.nets.normalize import Normalize as Normalize
    from tightrope.nets.onnx.exporting import export_onnx as export_onnx
    from tightrope.nets.registry import NETS as NETS
    from tightrope.nets.registry import NetSpec as NetSpec
    from tightrope.nets.registry import build as build
    from tightrope.nets.registry import find as find
    from tightrope.nets.storage import ARCHITECTURE_FILE as ARCHITECTURE_FILE
    from tightrope.nets.storage import WEIGHTS_FILE as WEIGHTS_FILE
    from tightrope.nets.storage import Architecture as Architecture
    from tightrope.nets.storage import load as load
    from tightrope.nets.storage import load_architecture as load_architecture
    from tightrope.nets.storage import save as save

# Where the names live that need torch.
_HOMES = {
    "normalize": ("Normalize",),
    "onnx.exporting": ("export_onnx",),
    "registry": ("NETS", "NetSpec", "build", "find"),
    "storage": (
        *("ARCHITECTURE_FILE", "WEIGHTS_FILE", "Architecture"),
        *("load", "load_architecture", "save"),
    ),
}

__all__ = ["NetSummary", "describe", "net_names"]
__all__ += [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"tightrope.nets.{home}"), name)
    raise AttributeError(f"module 'tightrope.nets' has no attribute {name!r}")
