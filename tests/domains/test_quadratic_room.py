"""Networks with more squares than there is room for: places of activations stay theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.boxes.bounding import box_bounder
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.graph import trace
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")


class Behind(nn.Module):
    """ReLUs that each read a quadratic function of their own, and ReLUs behind them."""

    def __init__(self, products: int, wide: int) -> None:
        super().__init__()
        self.products = products
        self.first, self.second = nn.Linear(products, wide), nn.Linear(wide, wide)
        self.last = nn.Linear(wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        quadratic = x[:, : self.products] * x[:, self.products :]
        return self.last(torch.relu(self.second(torch.relu(self.first(quadratic)))))


@pytest.mark.parametrize(
    ("products", "wide"), [(1, 2), (1, 4), (1, 6), (2, 7), (2, 8), (3, 20), (4, 9), (4, 30)]
)
def test_bounds_hold_however_many_squares_there_are(products: int, wide: int) -> None:
    torch.manual_seed(10 * products + wide)
    inputs = 2 * products
    graph = trace(Behind(products, wide).double(), (inputs,)).detach()
    ones = torch.ones(1, inputs, dtype=torch.float64)
    box = Box(-ones, ones)
    known = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING).boxes
    row, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    bounder = box_bounder(graph, box, row, zero, dict(known))
    lower = torch.rand(200, inputs, dtype=torch.float64) * 2 - 1
    upper = lower + torch.rand(200, 1, dtype=torch.float64) * (1 - lower)
    found = bounder(lower, upper, torch.ones(200, 1, dtype=torch.bool)).lower[:, 0]
    for share in (0.0, 0.3, 0.5, 1.0, torch.rand(200, inputs, dtype=torch.float64)):
        assert (graph(lower + share * (upper - lower))[:, 0] >= found - 1e-12).all()
    assert torch.isfinite(found).all()
