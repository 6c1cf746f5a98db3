"""Every command as a Python call."""

from tightrope.api.attacking import AttackResult, attack
from tightrope.api.certifying import certify
from tightrope.api.exporting import export
from tightrope.api.training import train

__all__ = ["AttackResult", "attack", "certify", "export", "train"]
