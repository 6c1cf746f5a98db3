"""A run folder with samples of every verdict, small enough to certify in milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from handmade import blind_spot, write_run

from tightrope.runs import Run

# x, y and label; the comments are the verdicts at radius 1/10.
SAMPLES = [
    (0.875, 0.0, 0),  # verified
    (0.25, 0.0, 0),  # falsified: wrong from the start
    (0.5625, 0.0, 0),  # falsified by the attack
    (0.875, 1.0, 0),  # unknown: robust, but interval bounds cannot see it
    (0.125, 0.25, 1),  # verified
    (0.4375, 1.0, 1),  # falsified by the attack
    (0.75, 1.0, 1),  # falsified: wrong from the start
    (0.25, 1.0, 1),  # unknown
    (0.53125, 0.0, 0),  # falsified by the attack
    (0.0, 0.125, 1),  # verified
]


@pytest.fixture
def certifiable(tmp_path: Path) -> Run:
    """A run of `blind_spot` with ten test samples, to be certified at 1/10."""
    x = np.array([sample[:2] for sample in SAMPLES], np.float32)
    return write_run(tmp_path / "run", blind_spot(), x, [sample[2] for sample in SAMPLES])
