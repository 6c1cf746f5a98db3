"""What rounding does to smooth functions, products and what is composed of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from function_values import FUNCTIONS
from torch import Tensor

from tightrope.graph import ops
from tightrope.graph.evaluate import ROUNDED_RULES, RULES
from tightrope.graph.functions import curve
from tightrope.graph.rounding import Rounded

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def numbers(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def within(rounded: Rounded, other: Tensor) -> None:
    difference = (other.double() - rounded.value.double()).abs()
    ok = (difference <= rounded.error.double()) | (other == rounded.value)
    assert ok.all(), (difference[~ok], rounded.error[~ok])
    assert not rounded.error.isnan().any()


@DTYPES
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, scale: float, dtype: torch.dtype) -> None:
    op = FUNCTIONS[name]
    parameters = torch.tensor(op.parameters, dtype=torch.float32).tolist()
    op = ops.Function(op.name, tuple(parameters))
    x = numbers(200, seed=0, dtype=dtype, scale=scale)
    if curve(op).floor == 0:
        x = x.abs()
    rounded = ROUNDED_RULES[ops.Function](op, Rounded.known(x))
    within(rounded, RULES[ops.Function](op, x.double()).to(dtype))
    other = x * (1 + 0.1 * numbers(200, seed=1, dtype=dtype))
    slack = 1 + 4 * torch.finfo(dtype).eps
    carried = ROUNDED_RULES[ops.Function](op, Rounded(x, (other - x).abs() * slack))
    if curve(op).floor == 0:
        other = other.abs()
    within(carried, RULES[ops.Function](op, other))
    assert bool((carried.error >= rounded.error).all())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_of_functions_are_small(name: str) -> None:
    op = FUNCTIONS[name]
    x = numbers(200, seed=0, dtype=torch.float64).abs() + 0.1
    found = ROUNDED_RULES[ops.Function](op, Rounded.known(x))
    allowed = 1e-13 * (1 + found.value.abs() + x.abs()) + 3 * curve(op).defect
    assert bool((found.error <= allowed).all())


@DTYPES
@pytest.mark.parametrize("op", [ops.Mul(), ops.MatMul()], ids=["product", "matrices"])
def test_products(op: ops.Op, dtype: torch.dtype) -> None:
    a, b = (numbers(4, 2, 5, 5, seed=i, dtype=dtype, scale=10.0**i) for i in (0, 3))
    rounded = ROUNDED_RULES[type(op)](op, Rounded.known(a), Rounded.known(b))
    within(rounded, RULES[type(op)](op, a.double(), b.double()).to(dtype))
    near = [x * (1 + 0.01 * numbers(*x.shape, seed=7, dtype=dtype)) for x in (a, b)]
    pairs = zip((a, b), near, strict=True)
    known = [Rounded(x, (y - x).abs() * (1 + 1e-6)) for x, y in pairs]
    within(ROUNDED_RULES[type(op)](op, *known), RULES[type(op)](op, *near))
    assert float((rounded.error / rounded.value.abs().mean()).max()) < 200 * torch.finfo(dtype).eps


def softmaxes(x: Tensor) -> Iterator[Tensor]:
    """Yield the softmax in other forms."""
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    yield powers / powers.sum(-1, keepdim=True)
    yield powers * (1 / powers.flip(-1).cumsum(-1)[..., -1:])
    yield torch.exp(x - torch.logsumexp(x, -1, keepdim=True))
    yield torch.softmax(x.double(), -1).to(x.dtype)


@DTYPES
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_softmax(scale: float, dtype: torch.dtype) -> None:
    x = numbers(20, 3, 17, seed=0, dtype=dtype, scale=scale)
    rounded = ROUNDED_RULES[ops.Softmax](ops.Softmax(), Rounded.known(x))
    for other in softmaxes(x):
        within(rounded, other)
    assert bool((rounded.error <= 1e-2 if dtype == torch.float32 else rounded.error < 1e-9).all())
    logarithm = ROUNDED_RULES[ops.Softmax](ops.Softmax(logarithm=True), Rounded.known(x))
    within(logarithm, torch.log_softmax(x.double(), -1).to(dtype))
    within(logarithm, x - torch.logsumexp(x, -1, keepdim=True))
    other = x * (1 + 0.01 * numbers(*x.shape, seed=1, dtype=dtype))
    known = Rounded(x, (other - x).abs() * (1 + 1e-6))
    within(ROUNDED_RULES[ops.Softmax](ops.Softmax(), known), torch.softmax(other, -1))
    carried = ROUNDED_RULES[ops.Softmax](ops.Softmax(logarithm=True), known)
    within(carried, torch.log_softmax(other, -1))


def standardized(x: Tensor, op: ops.Standardize) -> Iterator[Tensor]:
    """Yield the standardisation in other forms."""
    mean = x.mean(-1, keepdim=True) if op.center else torch.zeros_like(x[..., :1])
    centered = x - mean
    squares = (x * x).mean(-1, keepdim=True) - mean * mean
    yield centered / torch.sqrt(squares.clamp(min=0) + op.epsilon)
    yield centered / torch.sqrt((centered**2).flip(-1).mean(-1, keepdim=True) + op.epsilon)
    factor = 1 / torch.sqrt((centered**2).mean(-1, keepdim=True) + op.epsilon)
    yield x * factor - mean * factor
    yield RULES[ops.Standardize](op, x.double()).to(x.dtype)


@DTYPES
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3])
def test_standardisation(offset: float, center: bool, dtype: torch.dtype) -> None:
    op = ops.Standardize(1e-5, center)
    x = numbers(20, 3, 17, seed=0, dtype=dtype) + offset
    x[0] = offset  # all the same
    rounded = ROUNDED_RULES[ops.Standardize](op, Rounded.known(x))
    for other in standardized(x, op):
        within(rounded, other)
    near = x * (1 + 1e-3 * numbers(*x.shape, seed=1, dtype=dtype))
    known = Rounded(x, (near - x).abs() * (1 + 1e-6))
    within(ROUNDED_RULES[ops.Standardize](op, known), RULES[ops.Standardize](op, near))
    if offset == 0:
        assert float(rounded.error[1:].max()) < 1e4 * torch.finfo(dtype).eps


LAYERS: dict[str, tuple[ops.Op, Callable[[Tensor], Tensor]]] = {
    "softmax": (ops.Softmax(), lambda x: torch.softmax(x, -1)),
    "layer norm": (ops.Standardize(1e-5), lambda x: torch.layer_norm(x, x.shape[-1:])),
    "differences": (ops.Differences(), lambda x: x.unsqueeze(-2) - x.unsqueeze(-1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_torch_computes_the_same(name: str) -> None:
    op, layer = LAYERS[name]
    x = numbers(20, 3, 17, seed=0, dtype=torch.float32)
    within(ROUNDED_RULES[type(op)](op, Rounded.known(x)), layer(x))
