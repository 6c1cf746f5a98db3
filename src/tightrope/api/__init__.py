"""Every command as a Python call."""

from tightrope.api.attacking import AttackResult, attack
from tightrope.api.bounding import bounds
from tightrope.api.certifying import certify
from tightrope.api.comparing import Comparison, Entry, compare
from tightrope.api.estimating import Estimate, estimate
from tightrope.api.exporting import export
from tightrope.api.training import train
from tightrope.api.verifying import Verification, verify, verify_file

__all__ = [
    "AttackResult",
    "Comparison",
    "Entry",
    "Estimate",
    "Verification",
    "attack",
    "bounds",
    "certify",
    "compare",
    "estimate",
    "export",
    "train",
    "verify",
    "verify_file",
]
