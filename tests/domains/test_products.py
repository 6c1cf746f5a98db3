"""Products of two values: boxes and planes against fractions, without tolerance."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from exact import exact_values, fractions, inside
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import interval, products
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, CROWN_FORMS, CROWN_IBP, relax
from tightrope.graph import Graph, Node, ops

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = torch.finfo(torch.float64).eps
SCALES = (1.0, 1e-8, 1e8, 1e-160)


def drawn(*shape: int, seed: int, scale: float) -> Box:
    generator = torch.Generator().manual_seed(seed)
    center, radius = torch.randn(2, 1, *shape, generator=generator, dtype=torch.float64)
    radius = radius.abs() * (torch.rand(1, *shape, generator=generator) < 0.7)
    return Box((center - radius) * scale, (center + radius) * scale)


def corners(box: Box, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    pick = torch.rand(box.lower.shape, generator=generator) < 0.5
    return torch.where(pick, box.lower, box.upper)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 1), (3, 4)), ((1, 4), (3, 1))])
def test_boxes_of_products_are_exact(shapes: tuple, scale: float) -> None:
    a, b = (drawn(*s, seed=i, scale=scale) for i, s in enumerate(shapes))
    found = interval.RULES[ops.Mul](ops.Mul(), a, b, rounding=EPS)
    ends = [fractions(x[0]) * fractions(y[0]) for x in a.corners for y in b.corners]
    least, greatest = np.minimum.reduce(ends), np.maximum.reduce(ends)
    assert inside(found, least) and inside(found, greatest)
    width = fractions(found.upper[0] - found.lower[0]) - (greatest - least)
    size = np.maximum(abs(least), abs(greatest))
    assert np.all(width <= Fraction(1, 2**50) * size + Fraction(1, 10**300))


@pytest.mark.parametrize("most", [products.MOST_PRODUCTS, 0], ids=["exact", "around"])
@pytest.mark.parametrize("scale", SCALES)
def test_boxes_of_matrices_hold(scale: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "MOST_PRODUCTS", most)
    a, b = drawn(2, 3, 5, seed=0, scale=scale), drawn(2, 5, 4, seed=1, scale=scale)
    found = interval.RULES[ops.MatMul](ops.MatMul(), a, b, rounding=EPS)
    for seed in range(40):
        x, y = (fractions(corners(box, seed + i)[0]) for i, box in ((0, a), (100, b)))
        assert inside(found, np.stack([x[h] @ y[h] for h in range(2)]))
    if most:  # every entry reaches its ends, up to rounding
        pairs = [(x, y) for x in a.corners for y in b.corners]
        each = torch.stack([x.unsqueeze(-1) * y.unsqueeze(-3) for x, y in pairs])
        exact = each.amin(0).sum(-2), each.amax(0).sum(-2)
        off = 1e-12 * each.abs().amax(0).sum(-2) + 1e-300
        assert bool(((found.lower - exact[0]).abs() <= off).all())
        assert bool(((found.upper - exact[1]).abs() <= off).all())


def test_infinite_factors_say_nothing_wrong() -> None:
    inf = torch.inf
    a = Box(*(torch.tensor([[v]], dtype=torch.float64) for v in (0.0, 1.0)))
    b = Box(*(torch.tensor([[v]], dtype=torch.float64) for v in (-inf, inf)))
    for op in (ops.Mul(), ops.MatMul()):
        left, right = (Box(*(t[None] for t in box.corners)) for box in (a, b))
        found = interval.RULES[type(op)](op, left, right, rounding=EPS)
        assert float(found.lower) == -inf and float(found.upper) == inf


def test_a_limit_is_a_limit() -> None:
    a = drawn(4, seed=0, scale=100.0)
    found = interval.RULES[ops.Mul](ops.Mul(2.0), a, a, rounding=EPS)
    assert float(found.upper.max()) <= 2 + 1e-12 and float(found.lower.min()) >= -2 - 1e-12


def graph(kind: str) -> Graph:
    """A product of two affine functions of the input, and a sum of its numbers."""
    generator = torch.Generator().manual_seed(5)

    def linear(out: int, inputs: int) -> ops.Linear:
        sizes = ((out, inputs), (out,))
        return ops.Linear(*(torch.randn(s, generator=generator).double() for s in sizes))

    shapes = {"product": ((6,), (6,)), "repeated": ((6,), (1,)), "matrices": ((2, 3), (3, 2))}[kind]
    op = ops.MatMul() if kind == "matrices" else ops.Mul()
    nodes = [Node("input", ops.Input(), (), (3,))]
    places = []
    for shape in shapes:
        size = torch.Size(shape).numel()
        nodes.append(Node("linear", linear(size, 3), (0,), (size,)))
        nodes.append(Node("shape", ops.Reshape(shape), (len(nodes) - 1,), shape))
        places.append(len(nodes) - 1)
    after = (2, 2) if kind == "matrices" else (6,)
    size = torch.Size(after).numel()
    nodes.append(Node("product", op, tuple(places), after))
    nodes.append(Node("flat", ops.Reshape((size,)), (len(nodes) - 1,), (size,)))
    nodes.append(Node("sum", linear(2, size), (len(nodes) - 1,), (2,)))
    return Graph(tuple(nodes))


@pytest.mark.parametrize("effort", [CROWN, CROWN_FORMS, CROWN_IBP], ids=["crown", "forms", "ibp"])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("kind", ["product", "repeated", "matrices"])
def test_planes_hold_exactly(kind: str, scale: float, effort: object) -> None:
    network, box = graph(kind), drawn(3, seed=7, scale=scale)
    found = relax(network, box, effort=effort, rounding=EPS)  # type: ignore[arg-type]
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    bounds = fractions(found.lower(found.output, Coefficients(rows, None)))
    generator = torch.Generator().manual_seed(1)
    for seed in range(30):
        share = torch.rand(1, 3, generator=generator, dtype=torch.float64)
        within = (box.lower + share * (box.upper - box.lower)).clamp(box.lower, box.upper)
        point = corners(box, seed) if seed % 2 else within
        values = exact_values(network, point[0])
        assert np.all(bounds <= fractions(rows) @ values[found.output])
        for i, exact in values.items():
            assert inside(found.boxes[i], exact)


def test_planes_shrink_with_the_square_of_the_radius() -> None:
    network, middle = graph("matrices"), drawn(3, seed=7, scale=1.0).center
    value = network(middle)[0]
    gaps = []
    for radius in (1e-2, 1e-3):
        found = relax(network, Box(middle - radius, middle + radius), effort=CROWN, rounding=EPS)
        form = found.pull(found.output, Coefficients(torch.eye(2, dtype=torch.float64), None))
        at_middle = form.coefficients.dot(middle) + form.constant
        gaps.append(float((value - at_middle).max()))
    assert 0 < gaps[1] < gaps[0] / 50
