"""How much of the same a test does: some of it in `make test`, all of it in `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], quick: int) -> list[Any]:
    """Return values for `parametrize`, of which only the first few are for every run."""
    return [
        value if number < quick else pytest.param(value, marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]
