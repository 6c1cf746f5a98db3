"""What proofs are computed with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tightrope.precision import ROUNDING, full_precision


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def change(to: tuple[bool, bool]) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = to


@pytest.fixture
def restored() -> Iterator[None]:
    before = settings()
    yield
    change(before)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("before", [(True, True), (False, True), (True, False)])
def test_short_mantissas_are_off_inside_and_as_before_after(before: tuple[bool, bool]) -> None:
    change(before)
    with full_precision():
        assert settings() == (False, False)
    assert settings() == before
    with pytest.raises(ZeroDivisionError), full_precision():
        raise ZeroDivisionError
    assert settings() == before


def test_the_unit_of_rounding_is_the_gap_above_one() -> None:
    """Whichever way an operation on float64 is rounded, it is off by less than this share."""
    one = torch.ones((), dtype=torch.float64)
    assert torch.nextafter(one, 2 * one) - one == ROUNDING
