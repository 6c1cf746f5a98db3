"""Lines of activations where one part of their construction matters and no other does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adverse import DIRECTIONS, adverse
from exact import exact_values, fractions
from test_relaxations import BENT, CURVED, assert_encloses_exactly, one_node
from torch import Tensor

from tightrope.box import Box
from tightrope.domains.linear.relaxations import _CURVES, _clearance, lines, unstable
from tightrope.graph import ops

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.mark.parametrize("op", BENT, ids=str)
def test_bent_lines_whichever_way_they_are_rounded(op: ops.Op) -> None:
    """Among them those of the smallest numbers there are, whose products underflow."""
    unit = torch.finfo(torch.float64)
    ends = [unit.tiny * unit.eps * k for k in (1, 2, 3, 7, 100)] + [0.1, 0.7, 1.0, 3.3, 1e6]
    lower, upper = torch.cartesian_prod(*(torch.tensor(ends, dtype=torch.float64),) * 2).T
    box = Box(-lower[None], upper[None])
    points = torch.cat((*box.corners, torch.zeros_like(box.lower)))
    for direction in DIRECTIONS:
        with adverse(direction):
            found = lines(op, box, rounding=unit.eps)
        assert_encloses_exactly(op, found, points)


def around(critical: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return points of intervals, [points, n]: where a slope is met, both ends, and between."""
    shares = torch.linspace(0, 1, 9, dtype=torch.float64)[:, None]
    even = lower + shares * (upper - lower)
    near = torch.stack([critical + d for d in (-0.5, -0.05, 0.0, 0.05, 0.5)])
    met = torch.cat((near, -near))
    return torch.cat((even, torch.zeros_like(lower)[None], met)).clamp(lower, upper)


@BOTH
@pytest.mark.parametrize("op", CURVED, ids=str)
def test_any_slope_is_cleared(op: ops.Op, dtype: torch.dtype) -> None:
    """Slopes that no line would choose, down to those that the function has far out only."""
    ends = torch.tensor([-800.0, -40.0, -7.0, -0.3, 0.0, 0.3, 7.0, 40.0, 800.0])
    small = 1e-16 if dtype == torch.float64 else 1e-8
    slopes = torch.tensor([0.0, small / 3, small, 10 * small, 1e-4, 0.05, 0.2, 0.6, 1.0, 3.0])
    lower, upper, slope = torch.cartesian_prod(ends, ends, slopes).T.double()
    lower, upper, slope = (t[lower <= upper].to(dtype) for t in (lower, upper, slope))
    bound = _clearance(_CURVES[type(op)], slope, lower, upper, torch.finfo(dtype).eps)
    # Far out both functions are multiples of exp(h), up to factors that `around` looks around.
    critical = torch.log(slope.double().clamp(1e-300, 0.2))
    critical = critical if isinstance(op, ops.Sigmoid) else critical / 2
    least = fractions(bound.double())
    for points in around(critical, lower.double(), upper.double()):
        exact = exact_values(one_node(op, len(points)), points)[1]
        assert np.all(least <= exact - fractions(slope.double()) * fractions(points))


def test_a_neuron_is_unstable_however_little_it_crosses_zero() -> None:
    least = 5e-324
    lower = torch.tensor([[-least, -1.0, -least, 0.0, -1.0]], dtype=torch.float64)
    upper = torch.tensor([[least, least, 1.0, 1.0, 0.0]], dtype=torch.float64)
    assert unstable(Box(lower, upper)).tolist() == [[True, True, True, False, False]]
