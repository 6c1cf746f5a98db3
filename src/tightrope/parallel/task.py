"""What is common to all engines: a task, and who watches over it.

A task is a picklable function without arguments. Each worker calls it once; it sets up whatever is
needed and returns the work: a function of one item and of `send`, by which it tells the parent
anything picklable while it is still at it. What the work returns is the result of the item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Send = Callable[[Any], None]
Work = Callable[[Item, Send], Any]
Prepare = Callable[[], Work[Item]]


@dataclass(frozen=True)
class Shared(Generic[Item]):
    """A message: a worker gives away a part of its item, as items for others.

    It sends such messages only when that was wished of it (`wishes.py`).
    """

    items: list[Item]


class Watcher(Generic[Item]):
    """The parent's side of a task; what raises here ends the whole of it.

    `str(item)` is what messages for people call an item.
    """

    def give(self, item: Item) -> Item:
        """Return an item as a worker shall get it; asked again if that worker dies."""
        return item

    def message(self, item: Item, message: Any) -> None:
        """Take what the work on an item has sent; a worker that took over sends it again."""

    def shared(self, item: Item, parts: list[Item]) -> None:
        """Note that a worker gives away parts of its item; they are items from now on."""

    def size(self, item: Item) -> float:
        """Return how much of an item is left, as far as is known; the largest is shared first."""
        return 1.0

    def wanted(self, item: Item) -> bool:
        """Return whether anybody still waits for an item."""
        return True

    def finished(self, item: Item, result: Any) -> None:
        """Take the result of an item."""

    def failed(self, item: Item, error: Exception) -> None:
        """Take the error that the work on an item ended with."""
        raise error


def run_here(prepare: Prepare[Item], items: Iterable[Item], watcher: Watcher[Item]) -> None:
    """Do the work in this process, one item after the other."""
    work = prepare()
    for item in items:
        try:
            result = work(watcher.give(item), partial(watcher.message, item))
        except Exception as error:
            watcher.failed(item, error)
        else:
            watcher.finished(item, result)
