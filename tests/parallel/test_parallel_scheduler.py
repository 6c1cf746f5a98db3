"""The scheduler of a cluster, by a pretended clock: who works on what, and who shares."""

from __future__ import annotations

from typing import Any

import pytest

from tightrope.parallel.scheduler import ATTEMPTS, SETTLED_SECONDS, Scheduler, Waiting


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def staffed(items: list[str], workers: str, **options: Any) -> Scheduler[str, str]:
    """Return a scheduler whose workers can begin, a letter each."""
    found: Scheduler[str, str] = Scheduler(items, **options)
    for worker in workers:
        found.free(worker)
    return found


def given(scheduler: Scheduler[str, str]) -> list[tuple[str, str]]:
    return [(worker, turn.item) for worker, turn in scheduler.assign()]


def test_items_go_to_whoever_is_free_until_nothing_is_left() -> None:
    scheduler = staffed(["one", "two", "three"], "ab")
    assert not scheduler.is_over
    assert given(scheduler) == [("a", "one"), ("b", "two")]
    assert given(scheduler) == []
    turn = scheduler.free("b")
    assert turn is not None and turn.item == "two"
    assert given(scheduler) == [("b", "three")]
    scheduler.free("a")
    assert not scheduler.is_over  # b is still at work
    scheduler.free("b")
    assert scheduler.is_over


def test_items_are_drawn_when_they_are_needed() -> None:
    drawn: list[int] = []

    def endless() -> Any:
        for number in range(1000):
            drawn.append(number)
            yield str(number)

    scheduler: Scheduler[str, str] = Scheduler(endless())
    scheduler.free("a")
    assert given(scheduler) == [("a", "0")] and drawn == [0]


def test_the_item_of_a_lost_worker_is_next_and_given_up_in_the_end() -> None:
    scheduler = staffed(["one", "two"], "abcd"[:1])
    for _ in range(ATTEMPTS - 1):
        assert given(scheduler) == [("a", "one")]
        assert scheduler.lost("a") is None
        scheduler.free("a")
    assert given(scheduler) == [("a", "one")]
    turn = scheduler.lost("a")
    assert turn is not None and turn.item == "one" and turn.attempts == ATTEMPTS
    scheduler.free("b")
    assert given(scheduler) == [("b", "two")]  # nobody dies of it again


def test_an_idle_worker_that_is_lost_gets_nothing() -> None:
    scheduler = staffed(["one"], "ab")
    assert scheduler.lost("a") is None
    assert given(scheduler) == [("b", "one")]


def test_the_largest_item_that_has_settled_is_shared() -> None:
    clock, sizes = Clock(), {"small": 1.0, "large": 9.0, "late": 99.0}
    scheduler = staffed(["small", "large"], "ab", size=sizes.__getitem__, clock=clock)
    assert given(scheduler) == [("a", "small"), ("b", "large")]
    scheduler.free("c")
    assert scheduler.ask() == []  # what has just begun may end by itself
    clock.now = SETTLED_SECONDS
    assert scheduler.ask() == ["b"]
    assert scheduler.ask() == []  # one question for one idle worker
    scheduler.free("d")
    assert scheduler.ask() == ["a"]  # one more is idle: ask the other one
    scheduler.add("b", ["late"])
    assert given(scheduler) == [("c", "late")]
    clock.now += SETTLED_SECONDS / 2
    assert scheduler.ask() == []  # d waits for a's answer


def test_of_equal_items_that_which_took_longest_is_shared() -> None:
    clock = Clock()
    scheduler = staffed(["first", "second"], "a", clock=clock)
    assert given(scheduler) == [("a", "first")]
    clock.now = 1.0
    scheduler.free("b")
    assert given(scheduler) == [("b", "second")]
    clock.now = 2.0
    scheduler.free("c")
    assert scheduler.ask() == ["a"]


def test_nobody_is_asked_while_items_wait_or_where_sharing_is_off() -> None:
    clock = Clock()
    scheduler = staffed(["one", "two"], "a", clock=clock)
    scheduler.assign()
    clock.now = 9.0
    scheduler.free("b")
    assert scheduler.ask() == []  # "two" waits for b
    alone = staffed(["one"], "a", clock=clock, shares=False)
    alone.assign()
    clock.now = 99.0
    alone.free("b")
    assert alone.ask() == []


def test_an_item_that_is_given_again_may_be_shared_again() -> None:
    clock = Clock()
    scheduler = staffed(["one"], "ab", clock=clock)
    scheduler.assign()
    clock.now = 1.0
    assert scheduler.ask() == ["a"]
    scheduler.lost("a")
    assert given(scheduler) == [("b", "one")]
    clock.now = 2.0
    scheduler.free("c")
    assert scheduler.ask() == ["b"]


def test_what_nobody_waits_for_is_left_out() -> None:
    gone: set[str] = set()
    scheduler = staffed(["one", "two", "three"], "a", wanted=lambda item: item not in gone)
    assert given(scheduler) == [("a", "one")]
    gone |= {"one", "two"}
    assert scheduler.unwanted() == ["a"]
    scheduler.free("a")
    assert given(scheduler) == [("a", "three")] and scheduler.unwanted() == []


def test_what_was_given_away_comes_before_new_items() -> None:
    scheduler = staffed(["one", "two"], "a")
    scheduler.assign()
    scheduler.add("a", ["half"])
    scheduler.free("b")
    assert given(scheduler) == [("b", "half")]


@pytest.mark.parametrize("items", [[], ["one"]])
def test_looking_whether_something_waits_takes_nothing_away(items: list[str]) -> None:
    waiting = Waiting(items)
    assert bool(waiting) == bool(items) and bool(waiting) == bool(items)
    turn = waiting.next()
    assert [turn.item if turn else None] == (items or [None])
    assert not waiting and waiting.next() is None
