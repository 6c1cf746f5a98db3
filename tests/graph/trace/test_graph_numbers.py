"""Python numbers in a module are what PyTorch makes of them: rounded to the tensor's precision.

A proof in float64 with the number as it was written would be about another network.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from handmade_modules import Call
from torch import Tensor, nn

import tightrope as tr
from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import ops, trace

WRITTEN = 0.1
USED = float(np.float32(WRITTEN))
WIDE = torch.tensor(WRITTEN, dtype=torch.float64)  # without a dimension: does not promote

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * WRITTEN,
    "product from the left": lambda x: WRITTEN * x,
    "quotient": lambda x: x / WRITTEN,
    "sum": lambda x: x + WRITTEN,
    "difference": lambda x: x - WRITTEN,
    "difference from the left": lambda x: WRITTEN - x,
    "in place": lambda x: x.clone().mul_(WRITTEN),
    "leaky relu": lambda x: F.leaky_relu(x, WRITTEN),
    "padding": lambda x: F.pad(x, (1, 1), value=WRITTEN),
    "wide tensor as factor": lambda x: x * WIDE,
    "wide tensor as divisor": lambda x: x / WIDE,
    "wide tensor as summand": lambda x: x + WIDE,
    "an integer": lambda x: x * ((1 << 24) + 1),
    "an integer that rounding twice gets wrong": lambda x: x + ((1 << 60) + (1 << 36) + 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_one_operator_to_the_last_bit(name: str) -> None:
    """Rounded once, the graph's exact result is PyTorch's, at every one of many points."""
    module = Call(lambda self, x: OPERATORS[name](x))
    x = torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    exact = trace(module, (7,)).to(torch.float64)(x.double())
    assert torch.equal(exact.float(), module(x))


def test_epsilon() -> None:
    """With this variance one unit in epsilon's last place is all there is."""
    norm = nn.BatchNorm1d(1, eps=float((1 << 24) + 1)).eval()
    assert norm.running_var is not None
    norm.running_var.fill_(-float(1 << 24) + 1)
    (op,) = (n.op for n in trace(norm, (1,)).nodes if isinstance(n.op, ops.BatchNorm))
    assert op.epsilon == 1 << 24
    assert norm(torch.ones(1, 1)).item() == 1.0


TENTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "factor": lambda x: x * WRITTEN,
    "slope": lambda x: -F.leaky_relu(-x, WRITTEN),
    "summand": lambda x: x - 1 + WRITTEN,
    "padding": lambda x: F.pad(x, (0, 1), value=WRITTEN)[:, 1:],
}


BEFORE = 13421772 / 2**27  # the float32 below 0.1


def amplified(name: str) -> nn.Module:
    """Scaled up, 0.1 and its float32 are 0.8 and 1; the other class has 0.9 all the time."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        high = (TENTHS[name](x) - BEFORE) * 2**27
        return torch.cat([high, x * 0.0 + 0.9], 1)

    return Call(forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TENTHS)
def test_the_number_decides_a_verdict(name: str, dtype: torch.dtype) -> None:
    used = {torch.float32: USED, torch.float64: WRITTEN}[dtype]
    exact = (Fraction(used) - Fraction(BEFORE)) * 2**27
    winner = int(exact < Fraction(9, 10))
    module, x = amplified(name), torch.ones(1, dtype=dtype)
    assert winner == int(module(x[None]).argmax()) == int(dtype == torch.float64)
    assert tr.verify(module, x, winner, eps="1e-10").verdict == "verified"
    assert tr.verify(module, x, 1 - winner, eps="1e-10").verdict == "falsified"


def test_a_verdict_that_was_wrong() -> None:
    """At 1 class 0 wins, which a proof with 0.1 as it is written does not see."""
    module, x = amplified("factor"), torch.ones(1) - 2**-24
    assert module(x[None]).argmax() == 1
    assert module(torch.ones(1, 1)).argmax() == 0
    assert tr.verify(module, x, 1, eps=2**-23).verdict == "falsified"


@pytest.mark.parametrize("method", ["ibp", "crown", "alpha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_are_of_the_precision_that_is_asked_for(method: str, dtype: torch.dtype) -> None:
    """A module without weights computes in the precision of its input."""
    x = torch.tensor([[-1.0], [-0.5]], dtype=dtype)
    used = -float(torch.tensor(WRITTEN, dtype=dtype))
    other = USED + WRITTEN + used
    for given in (x, Box(x, x)):
        radius = {} if isinstance(given, Box) else {"eps": "1e-20", "domain": None}
        box = tr.bounds(nn.LeakyReLU(WRITTEN), given, method=method, **radius)
        assert box.lower[0] <= used <= box.upper[0]
        assert not box.lower[0] <= -other <= box.upper[0]


HALF = {
    "factor": Call(lambda self, x: x * WRITTEN),
    "summand": Call(lambda self, x: x + WRITTEN),
    "slope": nn.LeakyReLU(0.01),
    "epsilon": nn.BatchNorm1d(3),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """There PyTorch's operators do not agree on what a number is, so only exact ones are taken."""
    module = nn.Sequential(nn.Linear(3, 3), HALF[name]).to(dtype).eval()
    with pytest.raises(UserError, match=r"a constant that is no number of .* use float32"):
        trace(module, (3,))
    trace(nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.25)).to(dtype), (3,))


class Wide(nn.Module):
    """A float32 network with a single number of more precision."""

    def __init__(self, number: Tensor) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(3, 3), number

    def forward(self, x: Tensor) -> Tensor:
        """Use that number."""
        return self.layer(x) * self.number


def test_a_wide_parameter_is_refused() -> None:
    """It could not be rounded and stay the module's own at the same time."""
    with pytest.raises(UserError, match=r"a parameter of type torch.float64 among torch.float32"):
        trace(Wide(nn.Parameter(WIDE)), (3,))


def test_a_narrow_parameter_is_live() -> None:
    number = nn.Parameter(torch.tensor(0.25, dtype=torch.bfloat16))
    graph = trace(Wide(number), (3,))
    (op,) = (n.op for n in graph.nodes if isinstance(n.op, ops.Scale))
    assert op.factor is number
