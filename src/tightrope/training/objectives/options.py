"""Hyperparameters that several methods have in common, declared once."""

from __future__ import annotations

from typing import Any

from tightrope.training.parsing import choice, number, optional, setting, whole, within

HALF_WIDTHS = "step in half-widths of the ball (none: max(0.25, 2 / steps))"
FULL_WIDTHS = "step in full widths of the box (none: max(0.2, 2 / steps))"

share = within(number(0, maximum=1), "between 0 and 1")
positive_share = within(number(0, strict=True, maximum=1), "above 0 and at most 1")
positive = within(number(0, strict=True), "positive")
not_negative = within(number(0), "at least 0")
count = within(whole(1), "at least 1", whole())
count_or_none = within(whole(0), "at least 0", whole())
weight = within(number(0, infinite=True), "at least 0 (inf is allowed)")


def steps(default: int, what: str = "the attack") -> Any:
    """Declare the number of steps of an attack."""
    return setting(default, count, f"steps of {what}")


def restarts(default: int = 1, what: str = "the attack") -> Any:
    """Declare the number of random starts of an attack."""
    return setting(default, count, f"random starts of {what}")


def start(what: str = "the attack") -> Any:
    """Declare where an attack begins."""
    meaning = f"where {what} begins: anywhere in the ball, or around the input (as published)"
    return setting("ball", choice("ball", "input"), meaning)


def step_size(default: float | None, meaning: str) -> Any:
    """Declare the size of an attack's steps; where it may be derived, None does that."""
    return setting(default, optional(positive) if default is None else positive, meaning)


def step_decay(default: float, meaning: str) -> Any:
    """Declare the factor by which steps shrink."""
    return setting(default, positive_share, meaning)


def shrink(default: float = 1.0) -> Any:
    """Declare SABR's ReLU shrinkage."""
    meaning = "factor of the upper bounds of ReLUs that cross zero (SABR; 1: none)"
    return setting(default, positive_share, meaning)
