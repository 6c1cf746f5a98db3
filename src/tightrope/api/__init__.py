"""Every command as a Python call."""

from tightrope.api.attacking import AttackResult, attack
from tightrope.api.certifying import certify
from tightrope.api.comparing import Comparison, Entry, compare
from tightrope.api.estimating import Estimate, estimate
from tightrope.api.exporting import export
from tightrope.api.training import train

__all__ = [
    "AttackResult",
    "Comparison",
    "Entry",
    "Estimate",
    "attack",
    "certify",
    "compare",
    "estimate",
    "export",
    "train",
]
