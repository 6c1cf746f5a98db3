"""Quadratic functions as squares, and networks with products in the compiled loop."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from test_boxes import check_rows
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.boxes.bounding import CompiledBounder, box_bounder
from tightrope.domains.boxes.quadratic import as_squares
from tightrope.graph import trace
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")


def exactly(numbers: np.ndarray) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(numbers)


@pytest.mark.parametrize("seed", range(20))
def test_squares_are_the_function_but_for_their_error(seed: int) -> None:
    generator = np.random.default_rng(seed)
    products, size = generator.integers(1, 6, 2)
    left, right = generator.normal(size=(2, products, size)) * 10.0 ** generator.integers(-3, 3)
    weight, radius = generator.normal(size=products), generator.uniform(0, 2, size)
    if seed % 3 == 0:
        right = left  # squares already
    if seed % 4 == 0:
        radius[0] = 0.0
    found = as_squares(weight, left, right, radius, ROUNDING)
    for point in generator.normal(size=(5, size)):
        z = exactly(point)
        true = exactly(weight) @ ((exactly(left) @ z) * (exactly(right) @ z))
        squares = exactly(found.sign) @ (exactly(found.rows) @ z) ** 2
        assert abs(true - squares) <= abs(z) @ exactly(found.error) @ abs(z)


def test_a_convex_function_loses_nothing_from_below() -> None:
    generator = np.random.default_rng(0)
    root = generator.normal(size=(4, 4))
    matrix = root @ root.T
    found = as_squares(np.ones(4), np.eye(4), matrix, np.ones(4), ROUNDING)
    assert len(found.sign) == 4 and (found.sign > 0).all()
    assert found.loss(np.ones(4)) == 0


def test_factors_that_vary_little_stay_apart() -> None:
    """A product loses the product of the radii, and no more."""
    left, right = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    radius = np.array([1e-3, 10.0])
    found = as_squares(np.ones(1), left, right, radius, ROUNDING)
    assert found.loss(radius) <= 1e-2 * 1.001


class Lyapunov(nn.Module):
    """A step of a controlled system, and how a quadratic function changes in it."""

    def __init__(self, inputs: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.step = nn.Sequential(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, inputs)).double()
        root = torch.randn(inputs, inputs, dtype=torch.float64)
        self.register_buffer("form", root @ root.T + torch.eye(inputs).double())

    def forward(self, x: Tensor) -> Tensor:
        after = 0.9 * x + 0.1 * self.step(x)
        before, later = ((t * (t @ self.form)).sum(1, keepdim=True) for t in (x, after))
        return torch.cat((later - before, before, after), 1)


class Nested(nn.Module):
    """Products of products, ReLUs of products, and factors that are broadcast."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x)) * self.first(x)
        bent = torch.relu(hidden - 0.1) * x[:, :1]
        return self.second(bent * hidden)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("module", [Lyapunov, Nested])
@pytest.mark.parametrize("wide", [0.02, 1.0])
def test_networks_with_products_are_compiled(
    module: type[nn.Module], wide: float, seed: int
) -> None:
    graph = trace(module(seed=seed), (3,)).detach()
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    box = Box(center - wide, center + wide)
    count = graph.output_shape[0]
    matrix = torch.cat((torch.eye(count), -torch.eye(count), torch.ones(1, count))).double()
    offset = torch.randn(len(matrix), generator=generator, dtype=torch.float64)
    bounder = box_bounder(graph, box, matrix, offset)
    assert isinstance(bounder, CompiledBounder)
    found = check_rows(graph, box, bounder, matrix, offset, seed=seed, points=6)
    assert torch.isfinite(found.lower).all()


def test_a_convex_row_is_tight_in_the_middle() -> None:
    graph = trace(Lyapunov(), (3,)).detach()
    center = torch.tensor([[0.3, -0.4, 0.2]], dtype=torch.float64)
    box = Box(center - 0.2, center + 0.2)
    matrix = torch.eye(5, dtype=torch.float64)[1:2]
    # A positive bound is left as it is.
    found = box_bounder(graph, box, matrix, torch.full((1,), 9.0).double())(*box.corners)
    value = float(graph(center)[0, 1]) + 9
    line = float(found.slope[0, 0] @ center[0] + found.constant[0, 0])
    assert line == pytest.approx(value, abs=1e-9)


def test_too_many_products_stay_on_the_graph() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.repeat(1, 100)
            return (wide * (wide + 1)).sum(1, keepdim=True)

    graph = trace(Wide(), (3,)).detach().to(torch.float64)
    box = Box(-torch.ones(1, 3).double(), torch.ones(1, 3).double())
    matrix, offset = torch.ones(1, 1).double(), torch.zeros(1).double()
    assert not isinstance(box_bounder(graph, box, matrix, offset), CompiledBounder)


def test_rows_that_are_not_wanted_say_nothing() -> None:
    graph = trace(Lyapunov(), (3,)).detach()
    box = Box(-torch.ones(1, 3).double(), torch.ones(1, 3).double())
    matrix, offset = torch.eye(5, dtype=torch.float64), torch.zeros(5).double()
    bounder = box_bounder(graph, box, matrix, offset)
    every = bounder(*box.corners)
    wanted = torch.tensor([[True, False, False, True, False]])
    some = bounder(*box.corners, wanted)
    assert torch.equal(every.lower[wanted], some.lower[wanted])
    assert torch.equal(every.slope[wanted], some.slope[wanted])
    assert (some.lower[~wanted] == -torch.inf).all()
    assert (some.constant[~wanted] == -torch.inf).all()


def test_factors_that_hardly_vary_may_be_off() -> None:
    """An input that is no variable is its middle, and off by its width in all that it meets."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1] * x[:, 1:] - x[:, 1:]

    graph = trace(Product(), (2,)).detach().to(torch.float64)
    thin = 1 + 2.0**-41
    corners = (torch.tensor([c], dtype=torch.float64) for c in ([1.0, 1.0], [thin, 2.0]))
    box = Box(*corners)
    matrix, offset = -torch.ones(1, 1).double(), torch.zeros(1).double()
    bounder = box_bounder(graph, box, matrix, offset)
    assert isinstance(bounder, CompiledBounder) and bounder.varying.tolist() == [1]
    found = bounder(torch.ones(1, 1).double(), torch.full((1, 1), 2.0).double())
    assert float(found.lower[0, 0]) <= -(2.0**-40)
    assert float(found.slope[0, 0, 0] * 2 + found.constant[0, 0]) <= -(2.0**-40)
