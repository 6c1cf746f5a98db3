"""Attacks: under-approximations of the worst case, and the source of counterexamples."""

from tightrope.attacks.ensemble import attack_goal, diversified, strong_attack
from tightrope.attacks.goals import (
    CrossEntropy,
    Divergence,
    Goal,
    Margin,
    Rows,
    Targeted,
    misclassified,
    worst_margin,
)
from tightrope.attacks.latent import attack_loss, attack_margins, latent_steps, wrong_classes
from tightrope.attacks.pgd import Network, Steps, pgd
from tightrope.attacks.points import for_points

__all__ = [
    "CrossEntropy",
    "Divergence",
    "Goal",
    "Margin",
    "Network",
    "Rows",
    "Steps",
    "Targeted",
    "attack_goal",
    "attack_loss",
    "attack_margins",
    "diversified",
    "for_points",
    "latent_steps",
    "misclassified",
    "pgd",
    "strong_attack",
    "worst_margin",
    "wrong_classes",
]
