"""A process that is told to end says so, whatever it was at."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tightrope.errors import UserError
from tightrope.training.meeting import ToldToEnd, told_to_end

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def test_being_told_to_end_is_no_damage_of_a_file() -> None:
    with pytest.raises(ToldToEnd), told_to_end():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:  # as where a checkpoint is read
            raise UserError("the checkpoint is damaged") from None


def test_what_was_interrupted_may_make_another_error_of_it() -> None:
    with pytest.raises(ToldToEnd), told_to_end():
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:  # as C++ does
            raise RuntimeError("a stream was not closed") from error


def test_other_errors_are_left_alone_and_nothing_disturbs_what_is_said_of_them() -> None:
    with pytest.raises(UserError, match="too small"), told_to_end():
        raise UserError("too small")
    assert [signal.getsignal(number) for number in NUMBERS] == [signal.SIG_IGN] * 2


def test_without_an_error_all_is_as_before() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with told_to_end():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in NUMBERS] == before
