"""Interval bounds and margins by hand: values, gradients, corner cases."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from by_hand import DOUBLE, doubles, graph_of, linear
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_box(box: Box, lower: object, upper: object) -> None:
    torch.testing.assert_close(box.lower, doubles(lower), rtol=0, atol=1e-14)
    torch.testing.assert_close(box.upper, doubles(upper), rtol=0, atol=1e-14)


# --- single operations ------------------------------------------------------------------------


def test_linear() -> None:
    graph = graph_of(linear([[1.0, -2.0], [0.0, 3.0]], [0.5, -1.0]), shape=(2,))
    out, _ = interval.bounds(graph, Box(doubles([[0.0, 1.0]]), doubles([[2.0, 1.5]])))
    # row 1: 0 - 3 + .5 to 2 - 2 + .5; row 2: 3 - 1 to 4.5 - 1
    assert_box(out, [[-2.5, 2.0]], [[0.5, 3.5]])


def test_conv() -> None:
    conv = nn.Conv2d(1, 1, 2, padding=(0, 1)).double()
    conv.weight = nn.Parameter(doubles([[[[1.0, -1.0], [2.0, 0.5]]]]))
    conv.bias = nn.Parameter(doubles([10.0]))
    graph = graph_of(conv, shape=(1, 2, 2))
    lower = doubles([[[[0.0, 1.0], [-1.0, 2.0]]]])
    upper = doubles([[[[1.0, 1.0], [1.0, 4.0]]]])
    out, _ = interval.bounds(graph, Box(lower, upper))
    # windows: [0 a; 0 c], [a b; c d], [b 0; d 0] with a in [0,1], b = 1, c in [-1,1], d in [2,4]
    #   -a + c/2;  a - b + 2c + d/2;  b + 2d
    assert_box(out, [[[[8.5, 8.0, 15.0]]]], [[[[10.5, 14.0, 19.0]]]])


@pytest.mark.parametrize("rounding", [0.0, torch.finfo(DOUBLE).eps])
@pytest.mark.parametrize("centered", [False, True])
def test_relu_inactive_crossing_active(centered: bool, rounding: float) -> None:
    lower, upper = doubles([[-3.0, -1.0, 1.0, 0.0, -2.0]]), doubles([[-1.0, 2.0, 4.0, 5.0, 0.0]])
    box = Box(lower, upper)
    if centered:
        box = Box.around(box.center, box.radius)
    out, _ = interval.bounds(graph_of(nn.ReLU(), shape=(5,)), box, rounding=rounding)
    assert_box(out, [[0.0, 0.0, 1.0, 0.0, 0.0]], [[0.0, 2.0, 4.0, 5.0, 0.0]])


def test_leaky_relu() -> None:
    graph = graph_of(nn.LeakyReLU(0.25), shape=(3,))
    out, _ = interval.bounds(graph, Box(doubles([[-4.0, -4.0, 1.0]]), doubles([[-2.0, 3.0, 2.0]])))
    assert_box(out, [[-1.0, -1.0, 1.0]], [[-0.5, 3.0, 2.0]])


def test_batchnorm_with_a_negative_weight() -> None:
    norm = nn.BatchNorm1d(2, eps=0.0)
    norm.running_mean = torch.tensor([1.0, 0.0])
    norm.running_var = torch.tensor([4.0, 1.0])
    norm.weight = nn.Parameter(torch.tensor([-2.0, 3.0]))
    norm.bias = nn.Parameter(torch.tensor([0.5, 0.0]))
    graph = graph_of(norm, shape=(2,))
    out, _ = interval.bounds(graph, Box(doubles([[0.0, -1.0]]), doubles([[3.0, 1.0]])))
    assert_box(out, [[-1.5, -3.0]], [[1.5, 3.0]])  # -(x - 1) + .5 and 3 x


class Arithmetic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = 2 - 3 * x  # [-4, 5] for x in [-1, 2]
        b = x / -2  # [-1, 0.5]
        return torch.cat((a + b, a - b, x - x), 1)


def test_arithmetic_treats_operands_as_independent() -> None:
    graph = trace(Arithmetic(), (1,))
    out, _ = interval.bounds(graph, Box(doubles([[-1.0]]), doubles([[2.0]])))
    assert_box(out, [[-5.0, -4.5, -3.0]], [[5.5, 6.0, 3.0]])


@pytest.mark.parametrize(
    ("layer", "lower", "upper"),
    [
        (nn.AvgPool2d(2), [[[[0.5]]]], [[[[2.0]]]]),
        (nn.MaxPool2d(2), [[[[2.0]]]], [[[[4.0]]]]),
        (nn.AvgPool2d(2, 1, (0, 1), count_include_pad=False), None, None),
        (nn.ConstantPad2d((1, 0, 0, 0), 7.0), None, None),
    ],
)
def test_pools_and_padding(layer: nn.Module, lower: object, upper: object) -> None:
    low = doubles([[[[0.0, 1.0], [-1.0, 2.0]]]])
    high = doubles([[[[1.0, 2.0], [1.0, 4.0]]]])
    out, _ = interval.bounds(graph_of(layer, shape=(1, 2, 2)), Box(low, high))
    if lower is None:  # increasing in each input, so that corners go to corners
        lower, upper = layer(low).tolist(), layer(high).tolist()
    assert_box(out, lower, upper)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.ReLU(),
        nn.LeakyReLU(0.25),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.MaxPool2d(2, 1, 1),
        nn.AvgPool2d(2, 1, 1),
        nn.ConstantPad2d(1, 3.0),
        nn.Flatten(),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.MaxPool2d(2), nn.ZeroPad2d(1), nn.AvgPool2d(2)),
    ],
)
def test_increasing_operations_lose_nothing(layer: nn.Module, centered: bool) -> None:
    """Their bounds are the values at the two corners, however the box is held."""
    torch.manual_seed(0)
    if isinstance(layer, nn.Sequential):
        nn.init.constant_(layer[0].weight, 2.0)
    center = torch.randn(3, 1, 4, 4, dtype=DOUBLE)
    box = Box.around(center, torch.rand(3, 1, 4, 4, dtype=DOUBLE))
    if not centered:
        box = Box(box.lower, box.upper)
    out, _ = interval.bounds(graph_of(layer, shape=(1, 4, 4)), box)
    layer.double()
    torch.testing.assert_close(out.lower, layer(box.lower), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(out.upper, layer(box.upper), rtol=1e-13, atol=1e-13)


def test_kept_boxes_are_those_of_the_nodes() -> None:
    graph = graph_of(linear([[1.0, 1.0]]), nn.ReLU(), linear([[2.0], [-1.0]]), shape=(2,))
    box = Box(doubles([[-1.0, -1.0]]), doubles([[1.0, 3.0]]))
    out, kept = interval.bounds(graph, box, keep=[0, 1])
    assert set(kept) >= {0, 1, 3}
    assert kept[0] is box
    assert_box(kept[1], [[-2.0]], [[4.0]])
    assert_box(out, [[0.0, -4.0]], [[8.0, 0.0]])


def test_zero_width_box_has_the_value_as_bounds() -> None:
    torch.manual_seed(0)
    graph = graph_of(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), shape=(3,))
    x = torch.randn(5, 3, dtype=DOUBLE)
    out, _ = interval.bounds(graph, Box(x, x))
    torch.testing.assert_close(out.lower, graph(x), rtol=0, atol=1e-15)
    torch.testing.assert_close(out.upper, graph(x), rtol=0, atol=1e-15)


def test_box_by_centre_and_by_corners_is_the_same() -> None:
    torch.manual_seed(0)
    graph = graph_of(nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), shape=(3,))
    center, radius = torch.randn(5, 3, dtype=DOUBLE), torch.rand(5, 3, dtype=DOUBLE)
    a, _ = interval.bounds(graph, Box.around(center, radius))
    b, _ = interval.bounds(graph, Box(center - radius, center + radius))
    torch.testing.assert_close(a.lower, b.lower, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(a.upper, b.upper, rtol=1e-13, atol=1e-13)


# --- margins ----------------------------------------------------------------------------------


def test_margins_by_hand() -> None:
    # o = (x + y, x - y, -2x + 1), x in [0, 1], y in [1, 3]
    graph = graph_of(linear([[1.0, 1.0], [1.0, -1.0], [-2.0, 0.0]], [0.0, 0.0, 1.0]), shape=(2,))
    box = Box(doubles([[0.0, 1.0]]), doubles([[1.0, 3.0]]))
    both = box.map(lambda t: t.expand(3, 2))
    lower, _ = interval.margins(graph, both, torch.tensor([0, 1, 2]))
    expected = doubles(
        [
            [0.0, 2.0, 0.0],  # 2y >= 2; 3x + y - 1 >= 0
            [-6.0, 0.0, -4.0],  # -2y >= -6; 3x - y - 1 >= -4
            [-5.0, -1.0, 0.0],  # -3x - y + 1 >= -5; -3x + y + 1 >= -1
        ]
    )
    torch.testing.assert_close(lower, expected, rtol=0, atol=1e-14)
    # Without the merged layer, x is counted twice: o_0 in [1, 4], o_1 in [-3, 0], o_2 in [-1, 1].
    output, _ = interval.bounds(graph, box)
    apart = output.lower[0, 0] - output.upper[0]
    torch.testing.assert_close(apart[1:], doubles([1.0, 0.0]), rtol=0, atol=1e-14)
    assert (lower[0, 1:] >= apart[1:]).all() and lower[0, 1] > apart[1]


def test_merged_margins_equal_differences_where_classes_share_no_input() -> None:
    graph = graph_of(linear([[2.0, 0.0], [0.0, -1.0]], [1.0, 0.0]), shape=(2,))
    box = Box(doubles([[-1.0, 0.0]]), doubles([[1.0, 4.0]]))
    merged, _ = interval.margins(graph, box, torch.tensor([0]))
    output, _ = interval.bounds(graph, box)
    assert merged[0, 1] == output.lower[0, 0] - output.upper[0, 1] == -1.0


@pytest.mark.parametrize("rounding", [0.0, torch.finfo(DOUBLE).eps])
def test_margins_of_one_linear_layer_are_exact(rounding: float) -> None:
    """The minimum over a box is at a corner; there are few enough to try them all."""
    torch.manual_seed(0)
    graph = graph_of(nn.Linear(5, 4), shape=(5,))
    lower = torch.randn(6, 5, dtype=DOUBLE)
    upper = lower + torch.rand(6, 5, dtype=DOUBLE) * (torch.rand(6, 5) < 0.8)
    labels = torch.tensor([3, 0, 0, 2, 3, 3])  # class 1 never occurs
    choices = torch.tensor(list(product([False, True], repeat=5)))
    corners = torch.where(choices[:, None], upper, lower)  # [32, 6, 5]
    outputs = graph(corners.flatten(0, 1)).unflatten(0, (32, 6))
    margins = outputs.gather(2, labels.expand(32, 6)[:, :, None]) - outputs
    expected = margins.amin(0)
    actual, _ = interval.margins(graph, Box(lower, upper), labels, rounding=rounding)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("labels", [[0, 0, 0], [2, 2, 1], [1, 0, 2], [2, 1, 0]])
@pytest.mark.parametrize("rounding", [0.0, torch.finfo(DOUBLE).eps])
def test_each_sample_gets_its_own_label(labels: list[int], rounding: float) -> None:
    torch.manual_seed(0)
    graph = graph_of(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), shape=(4,))
    x = torch.randn(3, 4, dtype=DOUBLE)
    box = Box(x - 0.3, x + 0.3)
    together, _ = interval.margins(graph, box, torch.tensor(labels), rounding=rounding)
    for k, label in enumerate(labels):
        one, _ = interval.margins(graph, box[k : k + 1], torch.tensor([label]), rounding=rounding)
        torch.testing.assert_close(together[k], one[0], rtol=1e-14, atol=1e-14)
        assert together[k, label] == 0


def test_margins_without_a_final_linear_layer_are_differences() -> None:
    torch.manual_seed(0)
    graph = graph_of(nn.Linear(4, 3), nn.ReLU(), shape=(4,))
    x = torch.randn(3, 4, dtype=DOUBLE)
    box, labels = Box(x - 0.3, x + 0.3), torch.tensor([2, 0, 1])
    output, _ = interval.bounds(graph, box)
    expected = output.lower.gather(1, labels[:, None]) - output.upper
    expected = expected.scatter(1, labels[:, None], 0.0)
    actual, _ = interval.margins(graph, box, labels)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    assert (actual.gather(1, labels[:, None]) == 0).all()


@pytest.mark.parametrize("bias", [True, False])
def test_margins_keep_the_boxes_that_are_asked_for(bias: bool) -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3, bias=bias))
    graph = graph_of(*layers, shape=(4,))
    x = torch.randn(3, 4, dtype=DOUBLE)
    box, labels = Box(x - 0.3, x + 0.3), torch.tensor([2, 0, 1])
    everything = range(len(graph.nodes))
    _, expected = interval.bounds(graph, box, keep=everything)
    _, kept = interval.margins(graph, box, labels, keep=everything)
    assert set(kept) == set(everything)
    for i in everything:
        torch.testing.assert_close(kept[i].lower, expected[i].lower)
        torch.testing.assert_close(kept[i].upper, expected[i].upper)


def test_empty_batch() -> None:
    graph = graph_of(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), shape=(4,))
    empty = torch.zeros(0, 4, dtype=DOUBLE)
    labels = torch.zeros(0, dtype=torch.long)
    assert interval.bounds(graph, Box(empty, empty))[0].lower.shape == (0, 3)
    assert interval.margins(graph, Box(empty, empty), labels)[0].shape == (0, 3)


# --- the box itself ---------------------------------------------------------------------------


def test_box_views() -> None:
    box = Box(doubles([[0.0, 1.0]]), doubles([[2.0, 1.0]]))
    assert not box.centered
    assert box.center.tolist() == [[1.0, 1.0]] and box.radius.tolist() == [[1.0, 0.0]]
    same = Box.around(box.center, box.radius)
    assert same.centered
    assert torch.equal(same.lower, box.lower) and torch.equal(same.upper, box.upper)


def test_box_ball_is_clipped() -> None:
    box = Box.ball(doubles([[0.0, 0.05, 0.5, 1.0]]), 0.1)
    assert box.lower.tolist() == [[0.0, 0.0, 0.4, 0.9]]
    assert box.upper.tolist() == [[0.1, 0.05 + 0.1, 0.6, 1.0]]
    free = Box.ball(doubles([[0.5]]), 2.0, low=-1.0, high=float("inf"))
    assert free.lower.item() == -1.0 and free.upper.item() == 2.5


def test_box_project_contains_and_select() -> None:
    box = Box(doubles([[0.0, 0.0], [1.0, 1.0]]), doubles([[1.0, 1.0], [1.0, 2.0]]))
    points = doubles([[2.0, -1.0], [1.0, 1.5]])
    assert box.contains(points).tolist() == [False, True]
    projected = box.project(points)
    assert projected.tolist() == [[1.0, 0.0], [1.0, 1.5]]
    assert box.contains(projected).all()
    second = box[torch.tensor([1])]
    assert second.lower.tolist() == [[1.0, 1.0]] and second.upper.tolist() == [[1.0, 2.0]]


def test_box_samples_fill_the_box() -> None:
    torch.manual_seed(0)
    lower = torch.tensor([[-1.0, 3.0, 0.1]]).expand(4000, 3)
    upper = torch.tensor([[1.0, 3.0, 0.1 + 1e-6]]).expand(4000, 3)
    box = Box(lower, upper)
    samples = box.sample()
    assert box.contains(samples).all()
    assert (samples[:, 1] == 3.0).all()
    # Uniform on [-1, 1]: the mean of 4000 has a standard deviation of 0.009.
    assert abs(samples[:, 0].mean().item()) < 0.05
    assert samples[:, 0].min() < -0.99 and samples[:, 0].max() > 0.99


def test_box_detach() -> None:
    lower = doubles([[0.0]]).requires_grad_()
    box = Box(lower, lower + 1).detach()
    assert not box.lower.requires_grad and not box.upper.requires_grad
