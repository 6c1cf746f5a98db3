"""Linear bounds of a batch, for training: against the plain linear domain, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from linear_helpers import Residual
from torch import nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.domains.linear import batch
from tightrope.domains.linear.bounded import relaxed
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import Effort, relax
from tightrope.graph import ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Pooled(nn.Module):
    """Max pools, an average, a channel-wise product of fixed numbers."""

    def __init__(self):
        super().__init__()
        self.conv, self.end = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(16, 3)

    def forward(self, x):
        return self.end(F.avg_pool2d(F.max_pool2d(self.conv(x).relu(), 2), 1).flatten(1))


def dense(activation):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(50, 7),
        activation,
        nn.Linear(7, 6, bias=False),
        activation,
        nn.Linear(6, 3),
    )


def strided(first):
    """Strided convolutions of one channel, whose transposes are pixel shuffles, and of many."""
    return nn.Sequential(
        first,
        nn.ReLU(),
        nn.Conv2d(6, 5, 2, 2, 1),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.LazyLinear(6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def softmax():
    return nn.Sequential(nn.Flatten(), nn.Linear(50, 4), nn.Softmax(1), nn.Linear(4, 3))


NETS = {
    "relu": (lambda: dense(nn.ReLU()), (2, 5, 5)),
    "leaky": (lambda: dense(nn.LeakyReLU(0.2)), (2, 5, 5)),
    "steep": (lambda: dense(nn.LeakyReLU(1.5)), (2, 5, 5)),
    "sigmoid": (lambda: dense(nn.Sigmoid()), (2, 5, 5)),
    "strided": (lambda: strided(nn.Conv2d(1, 6, 5, 2, 2)), (1, 9, 9)),
    "oblong": (lambda: strided(nn.Conv2d(2, 6, (3, 2), 3, (1, 0))), (2, 7, 8)),
    "residual": (lambda: Residual(nn.ReLU()), (2, 5, 5)),
    "residual tanh": (lambda: Residual(nn.Tanh()), (2, 5, 5)),
    "batchnorm": (
        lambda: nn.Sequential(nn.BatchNorm2d(2), *strided(nn.Conv2d(2, 6, 3, 2, 1))),
        (2, 6, 6),
    ),
    "pooled": (Pooled, (2, 4, 4)),
    "by intervals": (softmax, (2, 5, 5)),
}


def problem(name, *, samples=3, rows=4, radius=0.05, dtype=torch.float64):
    """Return a network, its graph, boxes of some inputs and rows of its outputs."""
    torch.manual_seed(len(name))
    build, shape = NETS[name]
    module = build()
    module(torch.rand(2, *shape))
    module = module.to(dtype).eval()
    graph = trace(module, shape).fold_batchnorm()
    x = torch.rand(samples, *shape, dtype=dtype)
    return module, graph, Box.ball(x, radius), torch.randn(samples, rows, 3, dtype=dtype)


def by_intervals(graph, box):
    _, boxes = interval.bounds(graph, box, keep=batch.read_by_activations(graph))
    return batch.relaxed_by_intervals(graph, box, boxes)


def plain_bounds(found, rows):
    """The same by the plain linear domain, whose rows have owners."""
    plain = relaxed(found.graph, found.boxes)
    owner = torch.arange(len(rows)).repeat_interleave(rows.shape[1])
    return plain.lower(plain.output, Coefficients(rows.flatten(0, 1), owner)).view(rows.shape[:2])


def gradients(value, module):
    """Return the gradients of a weighted sum of bounds."""
    weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
    parameters = list(module.parameters())
    total = (value * weights).sum()
    return torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)


def assert_same(found, expected, tolerance=1e-10):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# --- against the plain linear domain ----------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_values_and_gradients_are_those_of_the_linear_domain(name):
    module, graph, box, rows = problem(name)
    found = by_intervals(graph, box)
    values = batch.lower_bounds(found, found.output, rows)
    expected = plain_bounds(found, rows)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    assert_same(gradients(values, module), gradients(expected, module))


@pytest.mark.parametrize("name", NETS)
def test_the_torch_path_is_the_compiled_one(name, monkeypatch):
    module, graph, box, rows = problem(name)
    found = by_intervals(graph, box)
    values = batch.lower_bounds(found, found.output, rows)
    compiled = gradients(values, module)
    monkeypatch.setattr(batch, "is_compiled", lambda rows: False)
    monkeypatch.setattr(batch, "pull", None)
    plain = batch.lower_bounds(found := by_intervals(graph, box), found.output, rows)
    torch.testing.assert_close(plain, values, rtol=1e-12, atol=1e-12)
    assert_same(gradients(plain, module), compiled)


def test_which_rows_have_compiled_loops():
    single, half = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    assert batch.is_compiled(single) and batch.is_compiled(single.double())
    assert not batch.is_compiled(half) and not batch.is_compiled(torch.zeros(1, device="meta"))


def test_other_dtypes_take_the_torch_path():
    module, graph, box, rows = problem("relu", dtype=torch.bfloat16)
    found = by_intervals(graph, box)
    values = batch.lower_bounds(found, found.output, rows)
    assert values.dtype == torch.bfloat16
    values.sum().backward()
    wide = by_intervals(graph.to(torch.float64), box.map(torch.Tensor.double))
    expected = batch.lower_bounds(wide, wide.output, rows.double())
    assert (values - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", NETS)
def test_parts_of_the_batch_give_the_whole(name):
    module, graph, box, rows = problem(name, samples=5)
    found = by_intervals(graph, box)
    whole = batch.lower_bounds(found, found.output, rows)
    each = batch.bytes_kept(graph, found.output, rows)
    calls = []
    for memory in (1, 2 * each, 4.5 * each):
        parts = batch.lower_bounds(found, found.output, rows, memory=memory)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
        calls.append(gradients(parts, module))
    for found_again in calls:
        assert_same(found_again, gradients(whole, module))


def test_memory_decides_how_many_go_at_a_time(monkeypatch):
    _, graph, box, rows = problem("relu", samples=5)
    found, sizes = by_intervals(graph, box), []
    real = batch._pulled
    monkeypatch.setattr(
        batch, "_pulled", lambda r, t, rows: sizes.append(len(rows)) or real(r, t, rows)
    )
    each = batch.bytes_kept(graph, found.output, rows)
    assert each == 3 * 4 * 8 * sum(math.prod(n.shape) for n in graph.nodes[: found.output])
    for memory, expected in ((5 * each, [5]), (4 * each, [4, 1]), (1, [1] * 5)):
        sizes.clear()
        with torch.no_grad():
            batch.lower_bounds(found, found.output, rows, memory=memory)
        assert sizes == expected


def test_many_threads_give_the_same(monkeypatch):
    monkeypatch.setattr(batch, "SMALL", 0)
    module, graph, box, rows = problem("relu", samples=5)
    found = by_intervals(graph, box)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        values = batch.lower_bounds(found, found.output, rows)
        results.append((values, gradients(values, module)))
    for values, slopes in results[1:]:
        assert torch.equal(values, results[0][0])
        assert_same(slopes, results[0][1])


@pytest.mark.parametrize("name", ["relu", "leaky", "sigmoid", "strided", "residual"])
def test_gradients_by_finite_differences(name):
    module, graph, box, rows = problem(name, samples=2, rows=2, radius=0.03)

    def bounds():
        found = by_intervals(graph, box)
        return batch.lower_bounds(found, found.output, rows)

    slopes = gradients(bounds(), module)
    weights = torch.linspace(-1, 1, rows.shape[0] * rows.shape[1], dtype=rows.dtype)
    for parameter, slope in zip(module.parameters(), slopes, strict=True):
        place, step = slope.abs().argmax(), 1e-7
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.view(-1)[place] += sign * step
                ends.append((bounds().flatten() * weights).sum())
                parameter.view(-1)[place] -= sign * step
        measured = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(measured, slope.reshape(-1)[place], rtol=1e-5, atol=1e-6)


# --- by hand ----------------------------------------------------------------------------------


def one_neuron(low, high, left=0.0):
    """Return x -> f(x), -f(x) on [low, high], by numbers that pass unchanged."""
    module = nn.Sequential(
        nn.Linear(1, 1), nn.LeakyReLU(left) if left else nn.ReLU(), nn.Linear(1, 2)
    ).double()
    with torch.no_grad():
        module[0].weight.fill_(1.0)
        module[0].bias.zero_()
        module[2].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        module[2].bias.zero_()
    box = Box(*(torch.tensor([[float(t)]], dtype=torch.float64) for t in (low, high)))
    return module, trace(module, (1,)), box


@pytest.mark.parametrize(
    ("low", "high", "left", "bounds"),
    [
        (-1, 3, 0.0, (-1.0, -3.0)),  # above: 0.75 h + 0.75, below: h
        (-3, 1, 0.0, (0.0, -1.0)),  # above: 0.25 h + 0.75, below: 0
        (1, 3, 0.0, (1.0, -3.0)),
        (-3, -1, 0.0, (0.0, 0.0)),
        (-1, 3, 0.5, (-1.0, -3.0)),
        (-3, 1, 0.5, (-1.5, -1.0)),
        (-3, -1, 0.5, (-1.5, 0.5)),
    ],
)
def test_one_neuron(low, high, left, bounds):
    _, graph, box = one_neuron(low, high, left)
    found = by_intervals(graph, box)
    rows = torch.eye(2, dtype=torch.float64)[None]
    assert batch.lower_bounds(found, found.output, rows).tolist() == [list(bounds)]


def test_the_line_above_has_slope_and_intercept_three_quarters():
    rows = torch.tensor([[[-1.0], [2.0]]], dtype=torch.float64)
    low, high = torch.tensor([[-1.0]]).double(), torch.tensor([[3.0]]).double()
    bias = torch.zeros(1, dtype=torch.float64)
    values, constant = batch._Bend.apply(rows, low, high, bias, 0.0)
    assert values.flatten().tolist() == [-0.75, 2.0] and constant.tolist() == [[-0.75, 0.0]]
    bias.fill_(10.0)
    _, constant = batch._Bend.apply(rows, low, high, bias, 0.0)
    assert constant.tolist() == [[-0.75 - 7.5, 20.0]]


def test_gradients_of_the_line_above_by_formula():
    """ds/du = -l/w^2, ds/dl = u/w^2, dt/du = l^2/w^2, dt/dl = -u^2/w^2 with w = u - l."""
    low = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    high = torch.tensor([[3.0]], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([[[-1.0]]], dtype=torch.float64)
    values, constant = batch._Bend.apply(rows, low, high, torch.zeros(1).double(), 0.0)
    slope = [-float(g) for g in torch.autograd.grad(values.sum(), (low, high), retain_graph=True)]
    rise = [-float(g) for g in torch.autograd.grad(constant.sum(), (low, high))]
    assert slope == pytest.approx([3 / 16, 1 / 16]) and rise == pytest.approx([-9 / 16, 1 / 16])


def test_a_network_without_unstable_neurons_is_bounded_exactly():
    module, graph, _, rows = problem("relu")
    with torch.no_grad():
        module[1].bias.fill_(40.0)
        module[3].weight.abs_()
    x = torch.rand(3, 2, 5, 5, dtype=torch.float64)
    box = Box.ball(x, 0.1)
    found = by_intervals(graph, box)
    matrix = module[5].weight @ module[3].weight @ module[1].weight
    slopes = rows @ matrix
    value = (rows @ module(box.center).unsqueeze(2)).squeeze(2)
    worst = value - (slopes.abs() @ box.radius.flatten(1).unsqueeze(2)).squeeze(2)
    bounds = batch.lower_bounds(found, found.output, rows)
    torch.testing.assert_close(bounds, worst, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("name", NETS)
def test_a_point_has_its_own_value(name):
    module, graph, box, rows = problem(name, radius=0.0)
    found = by_intervals(graph, box)
    values = (rows @ module(box.center).unsqueeze(2)).squeeze(2)
    bounds = batch.lower_bounds(found, found.output, rows)
    torch.testing.assert_close(bounds, values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NETS)
def test_no_point_lies_below(name):
    module, graph, box, rows = problem(name, radius=0.2)
    found = by_intervals(graph, box)
    bounds = batch.lower_bounds(found, found.output, rows)
    tight = batch.relaxed_by_lines(graph, box)
    tighter = batch.lower_bounds(tight, tight.output, rows)
    for _ in range(200):
        values = (rows @ module(box.sample()).unsqueeze(2)).squeeze(2)
        assert (values >= bounds - 1e-9).all() and (values >= tighter - 1e-9).all()


@pytest.mark.parametrize("name", ["relu", "leaky", "sigmoid", "residual"])
def test_linear_bounds_of_every_layer_are_those_of_crown(name):
    _, graph, box, rows = problem(name, radius=0.1)
    found = batch.relaxed_by_lines(graph, box)
    values = batch.lower_bounds(found, found.output, rows)
    plain = relax(graph, box, effort=Effort(iterations=0, forms=False))
    expected = plain_bounds(plain, rows)
    assert (values >= expected - 1e-9).all()
    if name != "residual":  # whose sums have tighter intervals if stable neurons are bounded, too
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)
    loose = by_intervals(graph, box)
    assert (values >= batch.lower_bounds(loose, loose.output, rows) - 1e-9).all()


# --- transposed convolutions ------------------------------------------------------------------


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize("kernel", [(5, 5), (3, 3), (4, 2), (1, 3)])
@pytest.mark.parametrize("size", [(9, 9), (10, 13)])
def test_shuffled_pixels_are_a_transposed_convolution(stride, padding, kernel, size):
    torch.manual_seed(0)
    weight = torch.randn(6, 2, *kernel, dtype=torch.float64, requires_grad=True)
    op = ops.Conv2d(weight, None, (stride, stride), padding, (1, 1), 1)
    image = torch.zeros(1, 2, *size, dtype=torch.float64)
    values = torch.randn_like(F.conv2d(image.repeat(3, 1, 1, 1), weight, None, stride, padding))
    values.requires_grad_()
    found = batch.shuffled(values, op, (2, *size))
    # The padding is cut off; beyond the last window there may be inputs that none reaches.
    (top, side), (height, width) = padding, size
    whole = F.pad(F.conv_transpose2d(values, weight, None, stride), (0, width, 0, height))
    expected = whole[:, :, top : top + height, side : side + width]
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (values, weight), retain_graph=True),
        torch.autograd.grad((expected * weights).sum(), (values, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
