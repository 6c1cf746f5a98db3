"""What proofs are computed with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tightrope as tr
from tightrope.errors import UserError
from tightrope.precision import ROUNDING, flushes, full_precision, provable


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


@pytest.mark.usefixtures("restored")
def test_full_precision_works_where_the_newer_interface_was_used() -> None:
    """Reading the older one raises then."""
    matmul, on_cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = matmul.fp32_precision, on_cpu.fp32_precision
    try:
        matmul.fp32_precision, on_cpu.fp32_precision = "tf32", "bf16"
        with pytest.raises(RuntimeError, match="mix"):
            settings()
        with full_precision():
            inside = matmul.fp32_precision, on_cpu.fp32_precision
        assert inside == ("ieee", "ieee")
        assert (matmul.fp32_precision, on_cpu.fp32_precision) == ("tf32", "bf16")
    finally:
        matmul.fp32_precision, on_cpu.fp32_precision = before


def test_the_unit_of_rounding_is_the_gap_above_one() -> None:
    """Whichever way an operation on float64 is rounded, it is off by less than this share."""
    one = torch.ones((), dtype=torch.float64)
    assert torch.nextafter(one, 2 * one) - one == ROUNDING


@pytest.fixture
def flushing(one_thread: None) -> Iterator[None]:
    """Threads that torch starts now would go on like that for ever."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushing")
def test_nothing_is_proved_where_small_numbers_count_as_zero() -> None:
    """`3e-11 - 1e-310 |1e300 (x - y)|` is negative for x - y = 0.4, and positive without it."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    for layer, weight, bias in (
        (module[0], [[1e300, -1e300], [-1e300, 1e300]], [0.0, 0.0]),
        (module[2], [[-1e-310, -1e-310], [0.0, 0.0]], [3e-11, 0.0]),
    ):
        layer.weight.data = torch.tensor(weight, dtype=torch.float64)
        layer.bias.data = torch.tensor(bias, dtype=torch.float64)
    x = torch.full((2,), 0.5, dtype=torch.float64)
    assert flushes()
    with pytest.raises(UserError, match="set_flush_denormal"):
        tr.verify(module, x, 0, eps=0.2)
    with pytest.raises(UserError, match="set_flush_denormal"), provable():
        pass
    torch.set_flush_denormal(False)
    assert not flushes()
    assert not tr.verify(module, x, 0, eps=0.2)
