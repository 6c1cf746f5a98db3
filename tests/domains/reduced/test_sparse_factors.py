"""Sparse factors give what dense ones give, and bounds made with them hold."""

from __future__ import annotations

import pytest
import torch
from linear_helpers import EPS, many_points
from reduced_problems import MATRIX, NETWORKS, OFFSET, neuron_values, random_problems, reduced

from tightrope.domains.reduced import factors
from tightrope.domains.reduced.factors import Factor
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sparse_matrix_is_held_sparse(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 400, generator=generator, dtype=dtype)
    assert Factor(matrix).turned is None
    matrix[torch.rand(300, 400, generator=generator) > 0.02] = 0.0
    factor = Factor(matrix)
    assert factor.turned is not None and factor.work < 0.5 * matrix.numel()
    rows = torch.randn(7, 350, generator=generator, dtype=dtype)[:, 50:]
    whole = torch.randn(7, 500, generator=generator, dtype=dtype)
    start = whole[:, :400]
    wanted = start + rows @ matrix
    assert torch.allclose(factor.added(rows, start), wanted, rtol=1e-4)
    assert torch.allclose(whole[:, :400], wanted, rtol=1e-4), "it is where the start was"
    matrix[0, 0] = torch.inf
    assert Factor(matrix).turned is None, "infinity times zero is no number"
    assert Factor(matrix[:10, :10]).turned is None


@NETWORKS
def test_bounds_with_sparse_factors_are_those_without(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, network = reduced(kind, "relu", radius=0.8, rounding=EPS)
    problems = random_problems(network, 50, splits=0.3, seed=1)
    wanted = strict_bounds(network, problems)
    rough = Bounder(network).improve(problems, iterations=3)[0]
    monkeypatch.setattr(factors, "SMALL", 0)
    monkeypatch.setattr(factors, "DENSE", 1.0)
    found, network = reduced(kind, "relu", radius=0.8, rounding=EPS)
    assert network.outer.turned is not None
    strict = strict_bounds(network, problems)
    assert torch.allclose(strict, wanted, rtol=1e-9, atol=1e-9)
    sparse = Bounder(network).improve(problems, iterations=3)[0]
    assert torch.allclose(sparse, rough, rtol=1e-6, atol=1e-6)
    points = many_points(found.box, 300)
    h = neuron_values(found, network, points)
    rows = found.graph(points) @ MATRIX.t() + OFFSET
    for k in range(len(problems)):
        sign = problems.sign[k]
        inside = ((sign * h >= 0) | (sign == 0)).all(1)
        assert (strict[k] <= rows[inside, problems.row[k]] + 1e-12).all()
