"""Attacks: under-approximations of the worst case, and the source of counterexamples."""

from tightrope.attacks.ensemble import strong_attack
from tightrope.attacks.goals import (
    CrossEntropy,
    Goal,
    Margin,
    Targeted,
    misclassified,
    worst_margin,
)
from tightrope.attacks.pgd import Steps, pgd

__all__ = [
    "CrossEntropy",
    "Goal",
    "Margin",
    "Steps",
    "Targeted",
    "misclassified",
    "pgd",
    "strong_attack",
    "worst_margin",
]
