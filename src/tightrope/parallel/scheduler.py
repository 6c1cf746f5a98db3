"""Who works on what: the decisions of an engine, without its machinery.

A scheduler knows neither processes nor messages, and its clock is passed in: the class that runs on
a cluster is the one whose behaviour `benchmarks/scaling.py` simulates.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tightrope.parallel.task import Item

# So many workers may die of the same item, or before they began.
ATTEMPTS = 3
# An item is worth sharing when it has been worked on for so many seconds: asking costs little, but
# what has just begun is likely to end by itself.
SETTLED_SECONDS = 0.5

Worker = TypeVar("Worker", bound=Hashable)


@dataclass
class Turn(Generic[Item]):
    """An item, and how many workers have been given it."""

    item: Item
    attempts: int = 0
    began: float = 0.0
    asked: bool = False  # to share, without an answer so far

    @property
    def is_lost(self) -> bool:
        """Whether as many workers have died of it as may."""
        return self.attempts >= ATTEMPTS


class Waiting(Generic[Item]):
    """Items that wait for a worker: those whose worker died first, then what others gave away."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = iter(items)
        self.again: list[Turn[Item]] = []
        self.given: deque[Turn[Item]] = deque()

    def next(self) -> Turn[Item] | None:
        """Take out the next one."""
        if self.again:
            return self.again.pop()
        if self.given:
            return self.given.popleft()
        return next((Turn(item) for item in self.items), None)

    def __bool__(self) -> bool:
        if not self.again and not self.given and (turn := self.next()) is not None:
            self.given.append(turn)
        return bool(self.again or self.given)


class Scheduler(Generic[Worker, Item]):
    """Gives items to workers, again if one is lost, and finds who should share with the idle.

    `size` says how much of an item is left, as far as anybody knows; the largest is shared first,
    and of equal ones that which has been worked on for longest. Items that are not `wanted` any
    more are left out.
    """

    def __init__(
        self,
        items: Iterable[Item],
        *,
        size: Callable[[Item], float] = lambda item: 1.0,
        wanted: Callable[[Item], bool] = lambda item: True,
        clock: Callable[[], float] = time.monotonic,
        shares: bool = True,
    ) -> None:
        self.waiting = Waiting(items)
        self.size, self.wanted, self.clock, self.shares = size, wanted, clock, shares
        self.busy: dict[Worker, Turn[Item]] = {}
        self.idle: dict[Worker, None] = {}  # in the order in which they became so

    @property
    def is_over(self) -> bool:
        """Whether nothing is left, and nobody is at work."""
        return not self.busy and not self.waiting

    def free(self, worker: Worker) -> Turn[Item] | None:
        """Note that a worker can begin, or has ended its item; return what that was."""
        turn = self.busy.pop(worker, None)
        self.idle[worker] = None
        return turn

    def lost(self, worker: Worker) -> Turn[Item] | None:
        """Note that a worker is gone; return the item that nobody takes any more, if it is one."""
        self.idle.pop(worker, None)
        turn = self.busy.pop(worker, None)
        if turn is None or turn.is_lost:
            return turn
        turn.asked = False
        self.waiting.again.append(turn)
        return None

    def add(self, worker: Worker, items: Iterable[Item]) -> None:
        """Take what a worker gives away of its item."""
        if worker in self.busy:
            self.busy[worker].asked = False
        self.waiting.given.extend(Turn(item) for item in items)

    def assign(self) -> list[tuple[Worker, Turn[Item]]]:
        """Give waiting items to those who are idle."""
        found = []
        while self.idle and self.waiting:
            turn = self.waiting.next()
            assert turn is not None
            if self.wanted(turn.item):
                worker = next(iter(self.idle))
                del self.idle[worker]
                turn.attempts, turn.began = turn.attempts + 1, self.clock()
                self.busy[worker] = turn
                found.append((worker, turn))
        return found

    def ask(self) -> list[Worker]:
        """Return those who should share: one for each idle worker that is left."""
        if not self.shares or not self.idle or self.waiting:
            return []
        missing = len(self.idle) - sum(turn.asked for turn in self.busy.values())
        if missing <= 0:
            return []
        soonest = self.clock() - SETTLED_SECONDS
        several = [
            (self.size(turn.item), -turn.began, worker)
            for worker, turn in self.busy.items()
            if not turn.asked and turn.began <= soonest
        ]
        several.sort(key=lambda one: one[:2], reverse=True)
        chosen = [worker for *_, worker in several[:missing]]
        for worker in chosen:
            self.busy[worker].asked = True
        return chosen

    def unwanted(self) -> list[Worker]:
        """Return those who work on what nobody waits for any more."""
        return [worker for worker, turn in self.busy.items() if not self.wanted(turn.item)]
