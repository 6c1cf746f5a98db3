"""Attacks in the middle of a search: what takes long to prove may be false.

An attack that climbs from a random point ends in one of few local maxima, and more of them end
there, too. Those that begin where one output, or a random combination of them, has been pushed as
far as it goes with a step or two find others. A raid begins at many of these and takes part of the
time of the search, which tells by its own questions what is worth attacking.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tightrope.attacks import attack_goal, diversified
from tightrope.certification.refutation import Refute, Refuter
from tightrope.deadline import Deadline, OutOfTimeError, time_left
from tightrope.devices import forked_random

SHARE, LATER = 0.2, 0.05  # of the time since the first question, and once raids took a second
LEAST = 0.2  # seconds of a raid, which so comes after a second at the earliest
FIRST, MOST = 16, 256  # points at once
STEPS = 30
QUESTIONS = 8  # the last so many say what is worth attacking
# How starts are pushed: steps, their size, and whether a single output is meant.
PUSHES = ((2, 1.0, True), (2, 1.0, False), (10, 0.5, True), (10, 0.5, False))


@dataclass
class Raids:
    """Answers the questions of a search by a refuter, and raids the property now and then."""

    refuter: Refuter
    asked: deque[Tensor] = field(default_factory=lambda: deque(maxlen=QUESTIONS))
    began: float | None = None
    spent: float = 0.0
    least: float = LEAST
    count: int = FIRST
    number: int = 0

    def __call__(self, points: Tensor, groups: Tensor) -> Tensor | None:
        """Return a counterexample near some points (flat) of a group each, or from elsewhere."""
        if self.began is None:
            self.began = time.monotonic()
        self.asked.append(groups.unique())
        found = self.refuter(points, groups)
        if found is not None or not self.due:
            return found
        started = time.monotonic()
        groups = torch.cat(tuple(self.asked)).unique()
        with forked_random(points.device):  # a search does not depend on what the clock said
            found = self.raid(groups, Deadline.after(min(self._credit, time_left())))
        self.spent += time.monotonic() - started
        return found

    @property
    def due(self) -> bool:
        """Whether the next question is followed by a raid."""
        return self._credit >= self.least

    @property
    def _credit(self) -> float:
        """The seconds that a raid may take now."""
        if self.began is None:
            return 0.0
        passed = time.monotonic() - self.began
        return min(SHARE * passed, 1.0 + LATER * passed) - self.spent

    def raid(self, groups: Tensor, deadline: Deadline) -> Tensor | None:
        """Attack groups from as many points as there is time for."""
        try:
            while True:
                started, left = time.monotonic(), deadline.left
                found = self._attack(groups, deadline)
                took = time.monotonic() - started
                if found is not None or left < 2 * took:
                    return found
                if left > 4 * took:
                    self.count = min(2 * self.count, MOST, self.refuter.subject.points_at_once)
        except OutOfTimeError:  # next time fewer, or later
            self.count, self.least = max(1, self.count // 2), self.least * (1 + (self.count == 1))
            return None

    def _attack(self, groups: Tensor, deadline: Deadline) -> Tensor | None:
        """Attack groups from the next points."""
        refuter = self.refuter

        def network(x: Tensor) -> Tensor:
            deadline.check()
            return refuter.subject.attacked(x)

        torch.manual_seed(self.number)
        steps, size, single = PUSHES[self.number % len(PUSHES)]
        first = self.number * self.count  # all groups in turn
        self.number += 1
        turns = torch.arange(first, first + self.count, device=groups.device) % len(groups)
        goal = refuter.unsafe.goal(groups[turns], refuter.inner.lower.dtype)
        box = refuter.inner.repeat(self.count)
        start = diversified(network, box, steps=steps, size=size, single=single)
        points = attack_goal(network, box, goal, steps=STEPS, start=start)
        with torch.no_grad():
            return refuter.confirm_best(points, goal(network(points)))


def raid_is_due(refute: Refute) -> bool:
    """Return whether a search should ask what it asks now and then, for a raid to follow."""
    return isinstance(refute, Raids) and refute.due


def seconds_of_raids(refute: Refute) -> float:
    """Return the seconds that raids took so far."""
    return refute.spent if isinstance(refute, Raids) else 0.0
