"""The rules of rounding: nothing that a network computes lies outside, and not much fits inside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import smooth_moves
import torch
from networks import magnitudes
from other_arithmetic import evaluations
from torch import Tensor

from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import Graph, ops, steps
from tightrope.graph.evaluate import ROUNDED_RULES as RULES
from tightrope.graph.graph import Node
from tightrope.graph.rounding import Rounded, growth

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
IMAGE, FLAT = (3, 5, 5), (40,)
TINY = torch.finfo(torch.float32).tiny


class Numbers:
    """Draws tensors of one kind."""

    def __init__(self, kind: str, seed: int, dtype: torch.dtype) -> None:
        self.kind, self.dtype = kind, dtype
        self.draw = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        normal = torch.randn(shape, generator=self.draw, dtype=torch.float64)
        uniform = torch.rand(shape, generator=self.draw, dtype=torch.float64)
        return KINDS[self.kind](normal, uniform).to(self.dtype)


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normal": lambda n, u: n,
    "positive": lambda n, u: 1 + u,
    "integers": lambda n, u: (16 * n).round(),
    "cancelling": lambda n, u: torch.where(u < 0.5, -1, 1) * (1 + 1e-3 * n),
    "mixed": lambda n, u: n * 10 ** (12 * u - 6),
    "huge": lambda n, u: n * 1e15,
    "nearly subnormal": lambda n, u: n * TINY * 4,
    "subnormal": lambda n, u: n * TINY / 64,
    "zeros": lambda n, u: torch.where(u < 0.7, 0, n),
}


def _operations(numbers: Numbers) -> dict[str, tuple[ops.Op, int, tuple[int, ...]]]:
    """Return operations by name, with the number of their inputs and the shape of these."""
    norm = ops.BatchNorm(
        numbers(3), numbers(3), numbers(3), numbers(3).abs().clamp(max=1e30), 1e-5, 0.1, None
    )
    plain = ops.BatchNorm(None, None, numbers(3), numbers(3).abs().clamp(max=1e30), 1e-3, 0.1, None)
    divisor = numbers(5)
    divisor = torch.where(divisor.abs() < TINY, torch.ones_like(divisor), divisor)
    tenth, shares = torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.6, 0.3, 0.1])
    return {
        "linear": (ops.Linear(numbers(4, 40), numbers(4)), 1, FLAT),
        "linear without bias": (ops.Linear(numbers(4, 40), None), 1, FLAT),
        "convolution": (
            ops.Conv2d(numbers(2, 3, 3, 2), numbers(2), (2, 1), (1, 0), (1, 2), 1), 1, IMAGE,
        ),
        "transposed convolution": (
            ops.ConvTranspose2d(numbers(3, 2, 3, 2), numbers(2), (2, 1), (1, 0), (1, 0), (1, 2), 1),
            1, IMAGE,
        ),
        "average": (ops.AvgPool((3, 2), (1, 2), (1, 1), False, True), 1, IMAGE),
        "batch norm": (norm, 1, IMAGE),
        "batch norm, not affine": (plain, 1, IMAGE),
        "shift": (ops.Shift(numbers(5)), 1, IMAGE),
        "shift by a number": (ops.Shift(tenth), 1, IMAGE),
        "shift back": (ops.Shift(numbers(5, 1), subtract=True), 1, IMAGE),
        "scale": (ops.Scale(numbers(5)), 1, IMAGE),
        "scale by a number": (ops.Scale(tenth), 1, IMAGE),
        "divide": (ops.Scale(divisor, divide=True), 1, IMAGE),
        "add": (ops.Add(), 2, IMAGE),
        "sub": (ops.Sub(), 2, IMAGE),
        "maximum": (ops.MaxPool((2, 3), (1, 2), (1, 1), (1, 2), True), 1, IMAGE),
        "pad": (ops.Pad((1, 0, 2, -1), 0.1), 1, IMAGE),
        "reshape": (ops.Reshape((15, 5)), 1, IMAGE),
        "permute": (ops.Permute((0, 3, 1, 2)), 1, IMAGE),
        "slice": (ops.Slice((slice(1, 3), 2)), 1, IMAGE),
        "take": (ops.Take(torch.arange(20).view(4, 5) % 7), 1, IMAGE),
        **{f"step {kind}": (ops.Step(kind), 1, IMAGE) for kind in steps.STEPS},
        "choice": (ops.Where(), 3, IMAGE),
        "place": (ops.ArgMax(), 1, IMAGE),
        "last place": (ops.ArgMax(last=True), 1, IMAGE),
        "concat": (ops.Concat(1), 2, IMAGE),
        "rectifier": (ops.Relu(), 1, IMAGE),
        "leaky rectifier": (ops.LeakyRelu(0.3), 1, IMAGE),
        "steep rectifier": (ops.LeakyRelu(3.0), 1, IMAGE),
        "sigmoid": (ops.Sigmoid(), 1, IMAGE),
        "tanh": (ops.Tanh(), 1, IMAGE),
        "distance": (ops.Distance(numbers(4, 40), torch.ones(1, dtype=numbers.dtype)), 1, FLAT),
        "sorted distances": (ops.Distance(numbers(4, 40), shares.to(numbers.dtype)), 1, FLAT),
    }  # fmt: skip


NAMES = list(_operations(Numbers("normal", 0, torch.float32)))
# How many units of rounding an error may be, relative to the sum of absolute values: those of the
# sum, twice, and a few. Rearranging rounds nothing.
UNITS = {
    "linear": 92, "linear without bias": 92, "convolution": 48, "average": 24,
    "transposed convolution": 48,
    "batch norm": 36, "batch norm, not affine": 36, "sigmoid": 36, "tanh": 36,
    "distance": 24, "sorted distances": 24,
}  # fmt: skip
EXACT = {"maximum", "reshape", "permute", "slice", "take", "concat", "rectifier"}
EXACT |= {"choice", "place", "last place", *(f"step {kind}" for kind in steps.STEPS)}
COPIED = EXACT | {"pad"}


def test_every_operation_has_a_rule_and_a_case() -> None:
    kinds = {type(op) for op, _, _ in _operations(Numbers("normal", 0, torch.float32)).values()}
    # The others are in test_graph_smooth.
    assert set(RULES) == kinds | set(smooth_moves.MOVES) == set(ops.ALL_OPS) - {ops.Input}


def _single(op: ops.Op, count: int, shape: tuple[int, ...]) -> Graph:
    """A graph of one operation, whose inputs (if two) are the same."""
    return Graph((Node("input", ops.Input(), (), shape), Node("op", op, (0,) * count, ())))


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_other_evaluations_lie_within(name: str, kind: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        numbers = Numbers(kind, seed, dtype)
        op, count, shape = _operations(numbers)[name]
        xs = [numbers(4, *shape) for _ in range(count)]
        rounded = RULES[type(op)](op, *(Rounded.known(x) for x in xs))
        assert not rounded.error.isnan().any()
        for other in evaluations(op, xs, numbers.draw):
            difference = (other.double() - rounded.value.double()).abs()
            ok = (difference <= rounded.error.double()) | (other == rounded.value)
            assert ok.all(), (difference[~ok], rounded.error[~ok])


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_errors_of_inputs_are_carried(name: str, kind: str, dtype: torch.dtype) -> None:
    numbers = Numbers(kind, 7, dtype)
    op, count, shape = _operations(numbers)[name]
    xs = [numbers(4, *shape) for _ in range(count)]
    others = [x * (1 + 0.1 * Numbers("normal", 8, dtype)(*x.shape)) for x in xs]
    slack = 1 + 4 * torch.finfo(dtype).eps
    known = [Rounded(x, (y - x).abs() * slack) for x, y in zip(xs, others, strict=True)]
    rounded = RULES[type(op)](op, *known)
    for other in evaluations(op, others, numbers.draw):
        difference = (other.double() - rounded.value.double()).abs()
        ok = (difference <= rounded.error.double()) | (other == rounded.value)
        assert ok.all(), (difference[~ok], rounded.error[~ok])


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_not_loose(name: str, kind: str, dtype: torch.dtype) -> None:
    """Relative to the sum of the absolute values of what is added up, and to underflow."""
    numbers = Numbers(kind, 3, dtype)
    op, count, shape = _operations(numbers)[name]
    xs = [numbers(4, *shape) for _ in range(count)]
    rounded = RULES[type(op)](op, *(Rounded.known(x) for x in xs))
    largest = torch.stack(xs).abs().amax(0)
    scale = magnitudes(_single(op, count, shape), Box(largest, largest))[1]
    info = torch.finfo(dtype)
    units = 0 if name in EXACT else UNITS.get(name, 8) / 2
    underflow = 0 if name in EXACT else 200 * info.tiny * (1 + _factor(op))
    assert (rounded.error.double() <= units * info.eps * scale + underflow).all()


def _factor(op: ops.Op) -> Tensor | float:
    if not isinstance(op, ops.BatchNorm):
        return 0.0
    factor = torch.rsqrt(op.variance.double() + op.epsilon)
    factor = factor if op.weight is None else factor * op.weight.double().abs()
    return factor.view(-1, 1, 1)


# --- sums that are as wrong as they can be ----------------------------------------------------


COUNT = 900
EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (ops.Linear(torch.ones(1, COUNT), None), (COUNT,)),
        (ops.Conv2d(torch.ones(1, 1, 30, 30), None, (1, 1), (0, 0), (1, 1), 1), (1, 30, 30)),
        (ops.AvgPool((30, 30), (1, 1), (0, 0), False, True), (1, 30, 30)),
    ],
    ids=["linear", "convolution", "average"],
)
def test_a_sum_that_always_rounds_up(op: ops.Op, shape: tuple[int, ...]) -> None:
    """Each addition is off by nearly half a unit, in the same direction."""
    x = torch.full((1, COUNT), 0.51 * EPS)
    x[0, 0] = 1.0
    x = x.view(1, *shape)
    rounded = RULES[type(op)](op, Rounded.known(x))
    others = torch.stack(list(evaluations(op, [x], torch.Generator())))
    spread = float(others.max() - others.min())
    assert float((others - rounded.value).abs().max()) <= float(rounded.error)
    assert float(rounded.error) < 3 * spread
    if not isinstance(op, ops.AvgPool):
        assert spread > 0.4 * COUNT * EPS


def test_a_long_sum_of_numbers_that_are_not_known() -> None:
    """What is carried is rounded, too, by one who adds it up in a row."""
    count = 1 << 19
    theirs = torch.full((1, count), 0.51 * EPS)
    theirs[0, 0] = 1.0
    op = ops.Linear(torch.ones(1, count), None)
    rounded = RULES[ops.Linear](op, Rounded(torch.zeros(1, count), theirs))
    found = float(np.cumsum(theirs.numpy()[0], dtype=np.float32)[-1])
    assert 1 + 0.99 * count * EPS < found <= float(rounded.error)


def test_a_sum_with_a_number_that_is_not_known() -> None:
    """What the network adds is rounded in proportion to its own number, of which we know little."""
    theirs, half = torch.full((1, 1), 1 + EPS), torch.full((1,), EPS / 2)
    op = ops.Shift(half)
    rounded = RULES[ops.Shift](op, Rounded(torch.zeros(1, 1), theirs))
    found = theirs + half
    assert float(found) == 1 + 2 * EPS and float(rounded.value) == EPS / 2
    assert float(found - rounded.value) <= float(rounded.error)


def test_growth() -> None:
    assert growth(1, torch.float64) == pytest.approx(2**-52)
    assert growth(1 << 20, torch.float32) == pytest.approx(0.125 / 0.875)


@pytest.mark.parametrize(("dtype", "terms"), [(torch.float32, 1 << 22), (torch.bfloat16, 64)])
def test_a_sum_too_long_to_be_bounded_is_refused(dtype: torch.dtype, terms: int) -> None:
    """A bound that says nothing would let every conversion pass."""
    op = ops.Linear(torch.ones(1, terms, dtype=dtype), None)
    with pytest.raises(UserError, match="cannot be checked"):
        RULES[ops.Linear](op, Rounded.known(torch.ones(1, terms, dtype=dtype)))


# --- underflow --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COPIED])
def test_results_may_be_flushed_to_zero(name: str) -> None:
    """Products, sums and results that are subnormal may be zero for the network."""
    numbers = Numbers("nearly subnormal", 5, torch.float32)
    op, count, shape = _operations(Numbers("normal", 6, torch.float32))[name]
    xs = [numbers(4, *shape) for _ in range(count)]
    rounded = RULES[type(op)](op, *(Rounded.known(x) for x in xs))
    for other in evaluations(op, xs, numbers.draw):
        flushed = torch.where(other.abs() < TINY, torch.zeros_like(other), other)
        assert ((flushed - rounded.value).abs() <= rounded.error).all()


def test_a_difference_flushed_to_zero_before_it_is_scaled() -> None:
    """Of a BatchNorm of hardly any variance."""
    op = ops.BatchNorm(None, None, torch.tensor([TINY]), torch.zeros(1), 1e-36, 0.1, None)
    x = torch.tensor([[1.75 * TINY]])
    rounded = RULES[ops.BatchNorm](op, Rounded.known(x))
    assert abs(float(rounded.value)) > 0.5 * TINY * 1e18
    assert abs(float(rounded.value)) <= float(rounded.error), "the network may say zero"


# --- constants and functions ------------------------------------------------------------------


def test_the_constant_of_a_padding_is_copied() -> None:
    """It is a number of the network's own precision: tracing has rounded it as PyTorch does."""
    constant = float(torch.tensor(0.1))
    known = Rounded(torch.ones(1, 1), torch.full((1, 1), 0.5))
    rounded = RULES[ops.Pad](ops.Pad((1, 0), constant), known)
    assert rounded.value.tolist() == [[constant, 1.0]] and rounded.error.tolist() == [[0.0, 0.5]]


def test_tanh_is_relative() -> None:
    rounded = RULES[ops.Tanh](ops.Tanh(), Rounded.known(torch.tensor([[1e-20, -1e-10]])))
    assert (rounded.error <= 40 * EPS * rounded.value.abs()).all()
