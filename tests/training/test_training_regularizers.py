"""The regularisers of Shi et al., and the L1 norm."""

import pytest
import torch
import training_reference as reference
from torch import nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import trace
from tightrope.training import regularizers

pytestmark = pytest.mark.usefixtures("one_thread")


def box(lower, upper, dtype=torch.float64):
    return Box(torch.tensor(lower, dtype=dtype), torch.tensor(upper, dtype=dtype))


# Centres 2, -2, 3, 1 with mean 1; two active, one inactive, one undecided neuron.
# a = (5/4) / (2/4) = 2.5, so 0.5 - 0.4 = 0.1; b = (1 + 4) / 9 > 0.5, so 0. Mean radius 5/4.
FIRST = box([[1.0, -3.0], [2.0, -1.0]], [[3.0, -1.0], [4.0, 3.0]])
# Centres 1, 0, -3 with mean -2/3. a = 1/3, so 1/6; b = 25/49 > 0.5, so 0. Mean radius 2/3.
SECOND = box([[0.5, -0.5, -4.0]], [[1.5, 0.5, -2.0]])
# Centres 3, 3, 3, -1 with mean 2. a = 9, so 1/2 - 1/9; b = 3/9, so 1/6: 5/9 in total.
THIRD = box([[2.0, 2.5], [1.0, -1.5]], [[4.0, 3.5], [5.0, -0.5]])
INPUT = box([[0.0, 0.25, 0.5]], [[0.8, 1.25, 1.7]])  # radii 0.4, 0.5, 0.6


@pytest.mark.parametrize(
    "boxes,expected",
    [
        ([FIRST], 0.1 / 0.5),
        ([SECOND], (1 / 6) / 0.5),
        ([THIRD], (5 / 9) / 0.5),
        ([FIRST, SECOND], (0.1 + 1 / 6) / 2 / 0.5),
        ([FIRST, SECOND, THIRD], (0.1 + 1 / 6 + 5 / 9) / 3 / 0.5),
    ],
)
def test_balance_by_hand(boxes, expected):
    assert float(regularizers.relu_balance(boxes)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "boxes,expected",
    [
        ([FIRST], (0.5 - 0.5 / 1.25) / 0.5),
        ([SECOND], 0.0),  # 0.5 / (2/3) is above tau
        ([FIRST, SECOND], (0.5 - 0.4) / 2 / 0.5),
        ([box([[-5.0]], [[5.0]])], (0.5 - 0.1) / 0.5),
    ],
)
def test_tightness_by_hand(boxes, expected):
    assert float(regularizers.tightness(INPUT, boxes)) == pytest.approx(expected, rel=1e-12)


def test_the_regularizer_is_the_sum_of_both():
    expected = (0.1 + 0.1 + 1 / 6) / 2 / 0.5
    value = regularizers.fast_regularizer(INPUT, [FIRST, SECOND])
    assert float(value) == pytest.approx(expected, rel=1e-12)


def test_boxes_held_as_centre_and_radius_are_the_same_boxes():
    centered = [Box.around(*b.middle) for b in (FIRST, SECOND, THIRD)]
    value = regularizers.fast_regularizer(Box.around(*INPUT.middle), centered)
    expected = regularizers.fast_regularizer(INPUT, [FIRST, SECOND, THIRD])
    assert float(value) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", reference.NETS)
@pytest.mark.parametrize("radius", [1e-6, 0.02, 0.1])
def test_values_and_gradients_on_real_bounds(name, radius):
    net = reference.NETS[name]()
    x, _ = reference.batch(16)
    for _ in range(30):
        net(x)  # in training mode: lets the running statistics settle
    net.eval()
    ball = ((x - radius).clamp(min=0), (x + radius).clamp(max=1))
    graph = trace(net, reference.SHAPE)
    positions = [graph.nodes[i].inputs[0] for i in graph.relus]
    normalized = 2 if name != "odd" else 0  # behind the shift and the scale
    _, kept = interval.bounds(graph, Box(*ball), keep=[normalized, *positions])
    value = regularizers.fast_regularizer(kept[normalized], [kept[i] for i in positions])
    value.backward()
    found = reference.gradients(net)
    net.zero_grad()

    running = reference.Reference(net, x)
    for layer in running.statistics:
        running.statistics[layer] = (layer.running_mean, layer.running_var)
    _, first, layers = running.bounds(*ball)
    expected = reference.regularizer(first, layers)
    assert len(layers) == len(positions) >= 2
    assert torch.isfinite(expected) and expected > 0
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)
    for parameter, gradient in reference.gradients(net).items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-6, atol=1e-9)
    assert any(g.abs().max() > 1e-6 for g in found.values())


ACTIVE = ([[1.0, 2.0, 3.5]], [[2.0, 5.0, 4.0]])
INACTIVE = ([[-2.0, -5.0, -4.0]], [[-1.0, -2.0, -3.5]])
UNDECIDED = ([[-1.0, -2.0, -0.5]], [[1.0, 0.5, 3.0]])
ONE_ACTIVE = ([[1.0, -2.0, -0.5]], [[2.0, 0.5, 3.0]])
LONELY = ([[1.0]], [[3.0]])  # its centre is the mean: both variances are zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "corners,expected",
    [
        (ACTIVE, 2.0),  # complete imbalance, in mean and in variance
        (INACTIVE, 2.0),
        (ONE_ACTIVE, 2.0),
        (LONELY, 2.0),
        (UNDECIDED, 0.0),  # neither active nor inactive: nothing to compare
    ],
)
def test_a_layer_without_one_kind_of_neuron(corners, expected, dtype):
    healthy = box([[0.5, -0.5, -4.0]], [[1.5, 0.5, -2.0]], dtype)
    for order in ("d", "dh", "hd"):
        degenerate = Box(*(torch.tensor(c, dtype=dtype, requires_grad=True) for c in corners))
        boxes = [degenerate if letter == "d" else healthy for letter in order]
        value = regularizers.relu_balance(boxes)
        others = (1 / 3) * (len(boxes) - 1)
        assert value.item() == pytest.approx((expected + others) / len(boxes), rel=1e-6)
        total = value + regularizers.tightness(box([[0.0]], [[0.1]], dtype), boxes)
        for gradient in torch.autograd.grad(total, degenerate.corners):
            assert torch.isfinite(gradient).all()


def test_boxes_without_width_are_finite():
    point = torch.tensor([[1.0, -2.0]], requires_grad=True)
    nothing = Box(torch.zeros(1, 2), torch.zeros(1, 2))
    value = regularizers.fast_regularizer(nothing, [Box(point, point)])
    (gradient,) = torch.autograd.grad(value, point)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ["balance", "tightness"])
@pytest.mark.parametrize(
    "corners", [tuple(b.corners) for b in (FIRST, SECOND, THIRD)] + [ACTIVE, INACTIVE, UNDECIDED]
)
def test_gradcheck(kind, corners):
    # Off the kinks: generic numbers instead of round ones.
    torch.manual_seed(0)
    ends = [torch.as_tensor(c, dtype=torch.float64) for c in corners]
    inputs = [(e + 0.05 * torch.rand_like(e)).requires_grad_() for e in ends]
    radius = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)

    def function(lower, upper, r):
        boxes = [Box(lower, upper), THIRD]
        if kind == "balance":
            return regularizers.relu_balance(boxes)
        return regularizers.tightness(Box(-r, r), boxes)

    assert torch.autograd.gradcheck(function, (*inputs, radius))


def test_l1_counts_weights_of_linear_and_convolution_layers_only():
    net = nn.Sequential(
        nn.Conv2d(1, 1, 2),
        nn.BatchNorm2d(1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1, 2),
    )
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[[[1.0, -2.0], [0.5, 0.0]]]]))
        net[4].weight.copy_(torch.tensor([[-3.0], [0.25]]))
        for bias in (net[0].bias, net[4].bias, net[1].weight, net[1].bias):
            bias.fill_(100.0)
    assert regularizers.l1(trace(net, (1, 2, 2))).item() == 6.75
