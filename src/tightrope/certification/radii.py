"""`tightrope.largest_radius`: how far around an input a network is robust."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from tightrope.answer import Answer, Verdict
from tightrope.certification.arguments import Network, check_network
from tightrope.certification.cascade import solve
from tightrope.certification.problem import Choices, check_choices, check_timeout
from tightrope.certification.properties import (
    PIXELS,
    Domain,
    parse_norm,
    radius_limit,
)
from tightrope.certification.questions import Question, check_question
from tightrope.certification.regions import Region, around, distance
from tightrope.certification.specs import Spec
from tightrope.certification.subjects import Subject
from tightrope.certification.verifying import evaluating, examine
from tightrope.deadline import Deadline
from tightrope.errors import UserError, shorten
from tightrope.radius import SMALLEST, Radius, format_radius, parse_radius
from tightrope.runs.examination import check_seed

# Of the time that is left, one radius gets so much: those that cannot be decided come late.
SHARE = 0.3
MOST_STEPS = 200


@dataclass(frozen=True)
class Step:
    """A radius that was tried, and the answer."""

    eps: Fraction
    answer: Answer

    def __repr__(self) -> str:
        said = self.answer
        return (
            f"Step({format_radius(self.eps)}: {said.verdict} by {said.stage}, {said.seconds:.2f} s)"
        )


@dataclass(frozen=True)
class LargestRadius:
    """What is known of the largest radius: it is at least `lower` and less than `upper`.

    `lower` is proved (0: nothing is). At distance `upper` from the input lies `counterexample`;
    both are None if none was found. `steps` are the radii that were tried.
    """

    lower: Fraction
    upper: Fraction | None
    counterexample: Tensor | None
    steps: tuple[Step, ...] = ()

    def __repr__(self) -> str:
        above = "?" if self.upper is None else f"{float(self.upper):.6g}"
        return f"LargestRadius({float(self.lower):.6g} to {above}, {len(self.steps)} steps)"


def largest_radius(
    network: Network | str | Path,
    x: Tensor,
    label: int | None = None,
    *,
    spec: Spec | None = None,
    largest: Radius = 1,
    tolerance: float = 0.01,
    norm: float | str = math.inf,
    domain: Domain = PIXELS,
    timeout: float = 60.0,
    split: str = "auto",
    branching: str = "intercept",
    cuts: str = "auto",
    seed: int = 0,
) -> LargestRadius:
    """Find the largest radius around `x` at which class `label` wins, or `spec` holds.

    The radius is proved from below and attacked from above, by bisection, until both ends differ by
    less than the `tolerance`, relative to the upper one, or `timeout` seconds have passed in all.
    Radii beyond `largest` are not tried. Other arguments are those of `verify`.
    """
    check_timeout(timeout)
    check_seed(seed)
    if not 0 < tolerance < 1:
        raise UserError(f"tolerance must lie between 0 and 1, got {shorten(tolerance)}")
    number = parse_norm(norm)
    most = parse_radius(largest, "largest", largest=radius_limit(domain, number))
    choices = check_choices(split, branching, cuts)
    deadline = Deadline.after(timeout)
    question = check_question(x, most, None, label, spec)
    network = check_network(network)
    with evaluating(network):
        subject, region = examine(network, around(x, most, domain, number))
        search = _Bisection(subject, question, region, (domain, number), seed, choices)
        return search.run(most, tolerance, deadline)


class _Bisection:
    """The search between what is proved and what is refuted."""

    def __init__(
        self,
        subject: Subject,
        question: Question,
        region: Region,
        limits: tuple[Domain, float],
        seed: int,
        choices: Choices,
    ) -> None:
        assert region.center is not None
        self.subject, self.question, self.x = subject, question, region.center
        self.limits, self.seed, self.choices = limits, seed, choices
        self.steps: list[Step] = []
        self.hard: list[Fraction] = []  # radii without an answer
        self.lower = Fraction(0)
        self.upper: Fraction | None = None
        self.counterexample: Tensor | None = None

    def run(self, most: Fraction, tolerance: float, deadline: Deadline) -> LargestRadius:
        """Try the largest radius, then halve what is open."""
        start = self.question.problem(self.subject, around(self.x, most, *self.limits))
        if not isinstance(start, Answer) and start.fails(self.x):
            return LargestRadius(Fraction(0), Fraction(0), self.x)
        eps: Fraction | None = most
        while eps is not None and len(self.steps) < MOST_STEPS and deadline.left > 0:
            self._try(eps, deadline)
            eps = self._next(most, Fraction(tolerance))
        return LargestRadius(self.lower, self.upper, self.counterexample, tuple(self.steps))

    def _next(self, most: Fraction, tolerance: Fraction) -> Fraction | None:
        """Return the middle of the wider gap: below what was too hard, or above it."""
        end = most if self.upper is None else self.upper
        hard = [r for r in self.hard if self.lower < r < end]
        gaps = [(self.lower, min(hard, default=end))]
        if hard and self.upper is not None:
            gaps.append((max(hard), end))
        low, high = max(gaps, key=lambda gap: gap[1] - gap[0])
        middle = Fraction(float((low + high) / 2))
        wide = high - low > tolerance * end and low < middle < high and middle > SMALLEST
        return middle if wide else None

    def _try(self, eps: Fraction, deadline: Deadline) -> None:
        """Decide one radius."""
        problem = self.question.problem(self.subject, around(self.x, eps, *self.limits))
        seconds = max(SHARE * deadline.left, 1e-3) if self.steps else deadline.left / 2
        answer = (
            problem
            if isinstance(problem, Answer)
            else solve(self.subject, problem, timeout=seconds, seed=self.seed, choices=self.choices)
        )
        self.steps.append(Step(eps, answer))
        if answer.verdict is Verdict.VERIFIED:
            self.lower = max(self.lower, eps)
        elif answer.counterexample is not None:
            self.upper = distance(self.x, answer.counterexample, self.limits[1])
            self.counterexample = answer.counterexample
        else:
            self.hard.append(eps)
