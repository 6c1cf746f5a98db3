"""Strict mode against exact arithmetic: no tolerance, in float32 as well as in float64.

Bounds with `rounding` claim to contain the exact real-number values. Here these are computed as
fractions, for random networks and for networks made to lose digits.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from exact import exact_values, fractions, inside
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, dense, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATIONS = [op for op in ops.ALL_OPS if op is not ops.Input]
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def digits(dtype: torch.dtype) -> int:
    """Return the number of bits after which the dtype rounds: 24 or 53."""
    return 1 - int(torch.tensor(eps(dtype)).log2().item())


def strict_bounds(graph: Graph, box: Box) -> dict[int, Box]:
    everything = range(len(graph.nodes))
    rounding = eps(box.lower.dtype)
    with torch.no_grad():
        return interval.bounds(graph, box, keep=everything, rounding=rounding)[1]


def assert_exactly_inside(graph: Graph, box: Box, points: Tensor) -> None:
    """Check every node's exact value at each point against its strict bounds (batch of one)."""
    bounds = strict_bounds(graph, box)
    for point in points:
        for i, exact in exact_values(graph, point).items():
            assert inside(bounds[i], exact), f"node {i}, {graph.nodes[i].op}"


def assert_exact_margins(graph: Graph, box: Box, points: Tensor) -> None:
    """Check the strict margins for every label against exact differences of outputs."""
    last, classes = len(graph.nodes) - 1, graph.output_shape[0]
    outputs = [exact_values(graph, point)[last] for point in points]
    repeated = box.map(lambda t: t.expand(classes, *t.shape[1:]))
    with torch.no_grad():
        lower, _ = interval.margins(
            graph, repeated, torch.arange(classes), rounding=eps(box.lower.dtype)
        )
    for label, row in enumerate(fractions(lower)):
        assert row[label] == 0
        for output in outputs:
            assert (output[label] - output >= row).all(), f"label {label}"


# --- random networks --------------------------------------------------------------------------


def check_random(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    module = data.draw(networks(containing=op, classes=3)).to(dtype)
    if data.draw(st.booleans()):  # no linear layer at the end to merge the margins with
        module.append(nn.ReLU(), (len(module.steps),))
    graph = trace(module, module.input_shape).detach()
    box = data.draw(boxes(module.input_shape, batch=1, dtype=dtype))
    points = points_in(box, 4, seed=data.draw(st.integers(0, 99)))
    assert_exactly_inside(graph, box, points)
    assert_exact_margins(graph, box, points)


@BOTH
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=3)
@given(data=st.data())
def test_random_networks(op: type[ops.Op], dtype: torch.dtype, data: st.DataObject) -> None:
    check_random(op, dtype, data)


@BOTH
@settings(max_examples=20)
@given(data=st.data())
def test_convolutions_as_matrices(dtype: torch.dtype, data: st.DataObject) -> None:
    """Small convolutions of large batches are dense products: their bounds are as strict."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "SMALLEST_PRODUCT", 0)
        check_random(ops.Conv2d, dtype, data)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("op", OPERATIONS)
@settings(max_examples=80)
@given(data=st.data())
def test_random_networks_at_length(
    op: type[ops.Op], dtype: torch.dtype, data: st.DataObject
) -> None:
    check_random(op, dtype, data)


# --- networks that lose digits ----------------------------------------------------------------


@st.composite
def cancelling(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Graph, Box]:
    """Draw a dense network and a box whose numbers are powers of two of very different size.

    Sums of those lose bits beyond 24 (53) all the time. Rows come in pairs that are opposite
    but for small entries, so that the next layer brings large parts to cancel.
    """
    reach = digits(dtype) + 4
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def powers(*shape: int) -> Tensor:
        exponents = torch.randint(-reach, reach + 1, shape, generator=generator)
        signs = torch.randint(-1, 2, shape, generator=generator)
        return (signs * 2.0 ** exponents.double()).to(dtype)

    def linear(inputs: int, outputs: int) -> nn.Linear:
        layer = nn.Linear(inputs, outputs).to(dtype)
        rows, small = powers(outputs, inputs), powers(outputs, inputs).clamp(-1, 1)
        rows[1::2] = small[1::2] - rows[: 2 * (outputs // 2) : 2]
        layer.weight, layer.bias = nn.Parameter(rows), nn.Parameter(powers(outputs))
        return layer

    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(linear(inputs, outputs))
        layers.append(draw(st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.3), nn.Identity()])))
    graph = trace(nn.Sequential(*layers, linear(widths[-1], 3)), (widths[0],)).detach()
    corners = powers(2, widths[0])
    return graph, Box(corners.amin(0, keepdim=True), corners.amax(0, keepdim=True))


def check_cancelling(dtype: torch.dtype, data: st.DataObject) -> None:
    graph, box = data.draw(cancelling(dtype))
    points = points_in(box, 6)
    assert_exactly_inside(graph, box, points)
    assert_exact_margins(graph, box, points)


@BOTH
@settings(max_examples=20)
@given(data=st.data())
def test_cancellation(dtype: torch.dtype, data: st.DataObject) -> None:
    check_cancelling(dtype, data)


@pytest.mark.slow
@BOTH
@settings(max_examples=600)
@given(data=st.data())
def test_cancellation_at_length(dtype: torch.dtype, data: st.DataObject) -> None:
    check_cancelling(dtype, data)


def losing_linear(dtype: torch.dtype) -> nn.Module:
    """`x` by way of `x + 2^24`, where float32 has no odd numbers any more (2^53 in float64)."""
    big = 2.0 ** digits(dtype)
    up, down = nn.Linear(1, 1).to(dtype), nn.Linear(1, 2).to(dtype)
    with torch.no_grad():
        up.weight.fill_(1.0)
        up.bias.fill_(big)
        down.weight.copy_(torch.tensor([[1.0], [0.0]]))
        down.bias.copy_(torch.tensor([-big, 0.0], dtype=dtype))
    return nn.Sequential(up, nn.ReLU(), down)


class LosingShift(nn.Module):
    """The same with constants."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.big = 2.0 ** digits(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.big - self.big


@BOTH
@pytest.mark.parametrize("build", [losing_linear, LosingShift])
def test_plain_bounds_are_violated_and_strict_ones_are_not(build: type, dtype: torch.dtype) -> None:
    """The reason for strict mode, and the proof that these tests would notice without it."""
    graph = trace(build(dtype), (1,)).detach()
    # 2^24 + 3 is rounded up to 2^24 + 4, 2^24 + 1 down to 2^24.
    for value in (3.0, 1.0):
        point = torch.tensor([[value]], dtype=dtype)
        box = Box(point, point)
        exact = exact_values(graph, point[0])[len(graph.nodes) - 1]
        assert exact[0] == Fraction(value)
        plain, _ = interval.bounds(graph, box)
        assert not inside(plain, exact)
        assert_exactly_inside(graph, box, point)


@BOTH
def test_plain_margins_are_violated_and_strict_ones_are_not(dtype: torch.dtype) -> None:
    graph = trace(losing_linear(dtype), (1,)).detach()
    point = torch.tensor([[3.0]], dtype=dtype)
    plain, _ = interval.margins(graph, Box(point, point), torch.tensor([0]))
    assert plain[0, 1].item() == 4.0  # but the margin is 3
    strict, _ = interval.margins(graph, Box(point, point), torch.tensor([0]), rounding=eps(dtype))
    assert strict[0, 1].item() <= 3.0
    assert_exact_margins(graph, Box(point, point), point)


@BOTH
def test_margins_of_nearly_equal_rows(dtype: torch.dtype) -> None:
    """Rows that agree but for one bit: the merged layer keeps the bit, strictly."""
    big = 2.0 ** digits(dtype)
    layer = nn.Linear(2, 3, bias=False).to(dtype)
    rows = [[big, 1.0], [big, 0.0], [-big, 1.0]]
    layer.weight = nn.Parameter(torch.tensor(rows, dtype=dtype))
    graph = trace(nn.Sequential(layer), (2,)).detach()
    box = Box(torch.tensor([[1.0, 1.0]], dtype=dtype), torch.tensor([[3.0, 2.0]], dtype=dtype))
    lower, _ = interval.margins(graph, box, torch.tensor([0]), rounding=eps(dtype))
    assert 0.999 < lower[0, 1].item() <= 1.0  # o_0 - o_1 = x_1 lies in [1, 2]
    assert_exact_margins(graph, box, points_in(box, 6))


@BOTH
def test_margins_of_one_layer_that_cancels(dtype: torch.dtype) -> None:
    """Nothing but the merged layer itself rounds, and loses all but a few bits."""
    generator = torch.Generator().manual_seed(0)
    big = 2.0 ** digits(dtype)
    violated = 0
    for _ in range(20):
        layer = nn.Linear(12, 4).to(dtype)
        small = torch.randint(-9, 10, (4, 12), generator=generator).to(dtype)
        small[:, :4] = torch.randint(-4, 5, (4, 4), generator=generator) * big
        order = torch.randperm(12, generator=generator)
        layer.weight = nn.Parameter(torch.cat((small[:, :6], -small[:, :6]), 1)[:, order])
        layer.bias = nn.Parameter(small[:, 7].clone())
        x = torch.randint(1, 9, (1, 12), generator=generator).to(dtype)
        graph = trace(nn.Sequential(layer), (12,)).detach()
        assert_exact_margins(graph, Box(x, x), x)
        plain, _ = interval.margins(graph, Box(x, x), torch.tensor([0]))
        exact = exact_values(graph, x[0])[1]
        violated += bool((exact[0] - exact < fractions(plain[0])).any())
    assert violated > 0, "plain margins are wrong for some of these"


@BOTH
def test_margins_without_a_linear_layer_round_down(dtype: torch.dtype) -> None:
    graph = trace(nn.Sequential(nn.ReLU()), (2,)).detach()
    x = torch.tensor([[1.0, 2.0 ** -(digits(dtype) + 2)]], dtype=dtype)
    assert x[0, 0] - x[0, 1] == 1.0  # rounded up
    assert_exact_margins(graph, Box(x, x), x)


# --- long sums, as in real layers -------------------------------------------------------------


@BOTH
def test_long_dot_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3000, 4).to(dtype)
    scales = 2.0 ** torch.randint(-20, 20, (3000,))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 3000) * scales)
        layer.weight[1].copy_(-layer.weight[0])
    graph = trace(nn.Sequential(layer), (3000,)).detach()
    x = (torch.randn(1, 3000) / scales).to(dtype)
    box = Box(x, x + x.abs() * 1e-6)
    points = points_in(box, 4)
    assert_exactly_inside(graph, box, points)
    assert_exact_margins(graph, box, points)


@BOTH
@pytest.mark.parametrize("stride", [1, 2])
def test_wide_convolutions(dtype: torch.dtype, stride: int) -> None:
    """Large enough for the blocked kernels of the convolution library."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(32, 16, 3, stride, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
    graph = trace(module.to(dtype), (32, 6, 6)).detach()
    x = torch.randn(1, 32, 6, 6, dtype=dtype) * 100
    box = Box(x, x)
    assert_exactly_inside(graph, box, x)


@BOTH
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_products_that_a_large_bias_swallows(kind: str, dtype: torch.dtype) -> None:
    """Each product is below the last bit of the bias, all of them together are not."""
    count = 64
    layer = nn.Linear(count, 2) if kind == "linear" else nn.Conv2d(count, 2, 1)
    layer = layer.to(dtype)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.copy_(torch.tensor([1.0, -1.0]) * 2.0 ** digits(dtype))
    shape = (count,) if kind == "linear" else (count, 2, 2)
    graph = trace(nn.Sequential(layer), shape).detach()
    for value in (0.9, -0.9, 1.0, -1.0, 0.1):
        x = torch.full((1, *shape), value, dtype=dtype)
        assert_exactly_inside(graph, Box(x, x), x)


# Thousands of values at once: rules with too little slack fail on a few of them. Each operation
# gets values at which it loses most.


def many(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Values of both signs and all magnitudes from 2^-20 to 2^20."""
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** (40 * torch.rand(shape, generator=generator, dtype=torch.float64) - 20)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (size * sign).to(dtype)


def many_norms(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Inputs near the mean and biases of the size of the result: everything cancels."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(1500).to(dtype)
    norm.running_mean = many(dtype, (1500,))
    norm.running_var = torch.rand(1500, dtype=dtype) * 10
    norm.weight = nn.Parameter(torch.randn(1500, dtype=dtype))
    x = norm.running_mean * (1 + torch.randn(1500, dtype=dtype) * 1e-3)
    norm.bias = nn.Parameter(torch.zeros(1500, dtype=dtype))
    with torch.no_grad():
        norm.bias.copy_(-norm.eval()(x[None])[0] * (1 + 1e-3 * torch.randn(1500)))
    return norm, x


@BOTH
def test_many_values_of_batchnorm(dtype: torch.dtype) -> None:
    norm, x = many_norms(dtype)
    graph = trace(nn.Sequential(norm.eval()), (1500,)).detach()
    assert_exactly_inside(graph, Box(x[None], x[None]), x[None])


@BOTH
@pytest.mark.parametrize(
    "layer",
    [
        nn.LeakyReLU(0.3),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d((3, 5), count_include_pad=False),
    ],
)
def test_many_values(layer: nn.Module, dtype: torch.dtype) -> None:
    shape = (1, 40, 50)
    graph = trace(nn.Sequential(layer), shape).detach()
    x = many(dtype, (1, *shape))
    for scale in (1.0, 1e-4):  # activations are interesting below 20, pools anywhere
        assert_exactly_inside(graph, Box(x * scale, x * scale), x * scale)


class TwoConstants(nn.Module):
    """`x * a + b - c / d` with constants of all magnitudes, and sums of its parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, row in zip("abcd", many(dtype, (4, 500)), strict=True):
            self.register_buffer(name, row)

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.a + self.b - self.c) / self.d
        return (x + y) - (y - x) * 0.3


@BOTH
def test_many_values_of_arithmetic(dtype: torch.dtype) -> None:
    graph = trace(TwoConstants(dtype), (500,)).detach()
    x = many(dtype, (5, 500))[4:]
    assert_exactly_inside(graph, Box(x, x), x)


# --- the edges of the number range ------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("large", [False, True])
def test_boxes_thinner_than_the_smallest_normal_number(large: bool, dtype: torch.dtype) -> None:
    """The centre of such a box is itself rounded, and a large weight magnifies that."""
    smallest = torch.finfo(dtype).tiny * eps(dtype)
    layer = nn.Linear(1, 1, bias=False).to(dtype)
    norm = nn.BatchNorm1d(1, affine=False).to(dtype)
    norm.running_var.fill_(1.0)
    with torch.no_grad():
        layer.weight.fill_(2.0 ** (digits(dtype) + 16) if large else 1.0)
    for module in (nn.Sequential(layer), nn.Sequential(norm, layer), nn.Sequential(layer, norm)):
        graph = trace(module, (1,)).detach()
        for steps in (1, 3):
            lower = torch.zeros(1, 1, dtype=dtype)
            box = Box(lower, lower + steps * smallest)
            assert_exactly_inside(graph, box, points_in(box, 2))


@BOTH
def test_margins_of_boxes_thinner_than_the_smallest_normal_number(dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).tiny * eps(dtype)
    layer = nn.Linear(1, 2, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-1.0], [1.0]]) * 2.0 ** (digits(dtype) + 16))
    graph = trace(nn.Sequential(layer), (1,)).detach()
    lower = torch.zeros(1, 1, dtype=dtype)
    box = Box(lower, lower + smallest)
    assert_exact_margins(graph, box, points_in(box, 2))


@BOTH
def test_products_that_underflow(dtype: torch.dtype) -> None:
    layer = nn.Linear(2, 1, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.fill_(1e-30 if dtype == torch.float32 else 1e-200)
    graph = trace(nn.Sequential(layer, nn.LeakyReLU(0.3)), (2,)).detach()
    x = layer.weight.detach().clone() * torch.tensor([[1.0, 3.0]], dtype=dtype)
    box = Box(-x, x)
    assert_exactly_inside(graph, box, points_in(box, 6))


@BOTH
@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.LeakyReLU(0.3), nn.Tanh(), nn.Sigmoid(), nn.MaxPool2d(1)]
)
def test_box_given_by_centre_and_radius(module: nn.Module, dtype: torch.dtype) -> None:
    """The true corners of such a box need not be floating-point numbers; they count, too."""
    center = torch.full((1, 1, 1, 1), 1.0, dtype=dtype)
    box = Box.around(center, center * eps(dtype) / 8)
    graph = trace(nn.Sequential(module), (1, 1, 1)).detach()
    out, _ = interval.bounds(graph, box, rounding=eps(dtype))
    exact_upper = 1 + Fraction(eps(dtype)) / 8
    if isinstance(module, nn.ReLU | nn.LeakyReLU | nn.MaxPool2d):
        assert Fraction(out.upper.item()) >= exact_upper
        assert Fraction(out.lower.item()) <= 2 - exact_upper
    assert out.lower < out.upper


@BOTH
def test_saturated_activations_stay_in_their_range(dtype: torch.dtype) -> None:
    x = torch.tensor([[-1e4, -800.0, -100.0, -1e-30, 0.0, 1e-30, 20.0, 1e4]], dtype=dtype)
    for layer, floor in ((nn.Sigmoid(), 0.0), (nn.Tanh(), -1.0)):
        graph = trace(nn.Sequential(layer), (8,))
        assert_exactly_inside(graph, Box(x, x), x)
        out = strict_bounds(graph, Box(x, x))[1]
        assert (out.lower >= floor).all() and (out.upper <= 1.0).all()
