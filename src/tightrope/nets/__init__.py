"""Architectures by name; a network to and from a folder; ONNX export."""

from tightrope.nets.normalize import Normalize
from tightrope.nets.onnx.exporting import export_onnx
from tightrope.nets.registry import NETS, NetSpec, NetSummary, build, describe, find, net_names
from tightrope.nets.storage import (
    ARCHITECTURE_FILE,
    WEIGHTS_FILE,
    Architecture,
    load,
    load_architecture,
    save,
)

__all__ = [
    "ARCHITECTURE_FILE",
    "NETS",
    "WEIGHTS_FILE",
    "Architecture",
    "NetSpec",
    "NetSummary",
    "Normalize",
    "build",
    "describe",
    "export_onnx",
    "find",
    "load",
    "load_architecture",
    "net_names",
    "save",
]
