"""Every command as a Python call."""

from tightrope.api.attack import AttackResult, attack
from tightrope.api.certify import certify
from tightrope.api.export import export
from tightrope.api.train import train

__all__ = ["AttackResult", "attack", "certify", "export", "train"]
