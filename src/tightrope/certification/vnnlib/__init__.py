"""VNN-LIB: properties of networks as text files, and counterexamples as text."""

from tightrope.certification.vnnlib.counterexamples import (
    format_counterexample,
    parse_counterexample,
)
from tightrope.certification.vnnlib.files import parse_vnnlib, read_vnnlib
from tightrope.certification.vnnlib.specification import (
    Case,
    Conjunction,
    Row,
    Specification,
    floats,
)

__all__ = [
    "Case",
    "Conjunction",
    "Row",
    "Specification",
    "floats",
    "format_counterexample",
    "parse_counterexample",
    "parse_vnnlib",
    "read_vnnlib",
]
