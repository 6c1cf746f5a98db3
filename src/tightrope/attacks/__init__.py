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
from tightrope.attacks.pgd import Network, Steps, pgd
from tightrope.attacks.points import for_points

__all__ = [
    "CrossEntropy",
    "Goal",
    "Margin",
    "Network",
    "Steps",
    "Targeted",
    "for_points",
    "misclassified",
    "pgd",
    "strong_attack",
    "worst_margin",
]
