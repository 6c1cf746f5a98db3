"""The fast ways to evaluate classifiers find what the plain way finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import networks
from torch import Tensor, nn

from tightrope.attacks import attack_margins, increments, latent, latent_steps, sparse
from tightrope.attacks.goals import Targeted
from tightrope.attacks.increments import IncrementalMargins, linear_pair
from tightrope.attacks.latent import wrong_classes
from tightrope.attacks.pgd import NetworkLandscape
from tightrope.attacks.sparse import convolution_pair, reduce_margins
from tightrope.box import Box
from tightrope.graph import Graph, dense, ops, trace
from tightrope.graph.dense import convolution_matrix

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = 4


@pytest.fixture(autouse=True, scope="module")
def always_reduced() -> object:
    """Reduce dense boxes, too. (A module's fixture, as hypothesis wants it.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "LARGEST_SHARE", 2.0)
        yield


@st.composite
def conv_classifiers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Draw `convolution, ReLU, linear`, with some neurons always active and some dead."""
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, 2))
    smallest = max(2, kernel - 2 * padding)
    height, width = (draw(st.integers(smallest, smallest + 4)) for _ in range(2))
    channels, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    biased, flat_first = draw(st.booleans()), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 10**6)))
    conv = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=biased)
    conv.weight.data *= 2.0
    if biased:
        shifts = torch.tensor([0.0, 9.0, -9.0, 0.3])
        conv.bias.data += shifts[torch.randint(4, (outputs,))]
    shape = (channels, height, width)
    size = conv(torch.zeros(1, *shape)).numel()
    middle = (nn.Flatten(), nn.ReLU()) if flat_first else (nn.ReLU(), nn.Flatten())
    last = nn.Linear(size, CLASSES, bias=draw(st.booleans()))
    return nn.Sequential(conv, *middle, last).double(), shape


def boxes(shape: tuple[int, ...], flat: float, scale: float, count: int = 3) -> Box:
    """Boxes in which a share of the coordinates has no width, at nonzero constants."""
    lower = torch.randn(count, *shape, dtype=torch.float64)
    width = torch.rand(count, *shape, dtype=torch.float64) * scale
    return Box(lower, lower + width * (torch.rand_like(width) >= flat))


def kept_margins(graph: Graph, points: Tensor, labels: Tensor) -> Tensor:
    targets = wrong_classes(labels, CLASSES).unsqueeze(2)
    with torch.no_grad():
        outputs = graph(points.flatten(0, 1)).unflatten(0, points.shape[:2])
    own = outputs.gather(2, targets)
    return (own - outputs.gather(2, labels.view(-1, 1, 1).expand_as(own)))[..., 0]


def assert_same_margins(graph: Graph, box: Box, labels: Tensor, **options: object) -> None:
    """Attack in both ways from one start and compare what the best points reach."""
    start = box.sample(CLASSES - 1)
    options = {"steps": latent_steps(6, 0.3), "start": start, **options}
    fast = attack_margins(graph, box, labels, **options)
    plain = attack_margins(graph, box, labels, plain=True, **options)
    found, expected = (kept_margins(graph, p, labels) for p in (fast, plain))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (fast >= box.lower.unsqueeze(1)).all() and (fast <= box.upper.unsqueeze(1)).all()
    assert (found >= kept_margins(graph, start, labels) - 1e-9).all()


# --- convolutions -----------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    drawn=conv_classifiers(),
    flat=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    scale=st.sampled_from([0.01, 0.5, 4.0]),
)
def test_reduced_attacks_find_the_margins_of_plain_ones(
    drawn: tuple[nn.Module, tuple[int, ...]], flat: float, scale: float
) -> None:
    module, shape = drawn
    graph = trace(module, shape)
    assert convolution_pair(graph) is not None
    assert_same_margins(graph, boxes(shape, flat, scale), torch.tensor([0, 3, 1]))


@settings(max_examples=60)
@given(
    drawn=conv_classifiers(),
    flat=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    scale=st.sampled_from([0.01, 0.5, 4.0]),
    large=st.booleans(),
)
def test_reduced_margins_are_the_networks(
    drawn: tuple[nn.Module, tuple[int, ...]], flat: float, scale: float, large: bool
) -> None:
    """Scores and gradients at random points, as autograd computes them."""
    module, shape = drawn
    box, labels = boxes(shape, flat, scale), torch.tensor([2, 0, 3])
    targets = wrong_classes(labels, CLASSES)
    pair = convolution_pair(trace(module, shape).detach())
    with pytest.MonkeyPatch.context() as patch:
        if large:  # the slope of active ReLUs by a transposed convolution
            patch.setattr(sparse, "LARGEST_MATRIX", 0)
        landscape = reduce_margins(*pair, box, labels, targets)
    points = box.sample(CLASSES - 1).requires_grad_()
    outputs = module(points.flatten(0, 1)).unflatten(0, points.shape[:2])
    own = outputs.gather(2, targets.unsqueeze(2))[..., 0]
    scores = own - outputs.gather(2, labels.view(3, 1, 1).expand(3, CLASSES - 1, 1))[..., 0]
    (slope,) = torch.autograd.grad(scores.sum(), points)
    moves = (box.upper > box.lower).permute(0, 2, 3, 1)
    view = landscape.look(points.detach().permute(0, 3, 4, 2, 1)[moves])
    torch.testing.assert_close(view.scores, scores.detach(), rtol=1e-10, atol=1e-10)
    expected = slope.permute(0, 3, 4, 2, 1)[moves]
    torch.testing.assert_close(view.gradient, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(view.reached, view.scores > 0)


def test_reduction_keeps_only_what_can_change() -> None:
    conv = nn.Conv2d(1, 3, 1).double()
    with torch.no_grad():
        conv.weight.fill_(1.0)
        conv.bias.copy_(torch.tensor([0.0, 5.0, -5.0]))  # switches, always active, dead
    module = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(12, CLASSES).double())
    lower = torch.tensor([[[[-1.0, -1.0], [0.5, -1.0]]]], dtype=torch.float64)
    upper = torch.tensor([[[[1.0, 1.0], [1.0, -1.0]]]], dtype=torch.float64)
    labels = torch.tensor([0])
    pair = convolution_pair(trace(module, (1, 2, 2)).detach())
    landscape = reduce_margins(*pair, Box(lower, upper), labels, wrong_classes(labels, CLASSES))
    assert landscape.forward.shape == (2, 3)  # of 12 ReLUs and 4 coordinates
    assert landscape.backward.shape == (3, 2)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 1), (1, 1, 4), (1, 4, 1)])
def test_images_of_one_pixel_or_one_line(shape: tuple[int, ...]) -> None:
    # Such tensors are in both memory orders at once.
    torch.manual_seed(0)
    conv = nn.Conv2d(shape[0], 3, 3, padding=1)
    layers = (conv, nn.ReLU(), nn.Flatten(), nn.Linear(3 * shape[1] * shape[2], CLASSES))
    graph = trace(nn.Sequential(*layers).double(), shape)
    assert_same_margins(graph, boxes(shape, 0.0, 2.0), torch.tensor([0, 3, 1]))


@pytest.mark.parametrize("biased", [False, True])
def test_boxes_behind_a_relu(biased: bool) -> None:
    """Lower ends at zero, dead coordinates at zero: as a feature extractor makes them."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=1, bias=biased)
    module = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(100, CLASSES)).double()
    box = boxes((3, 5, 5), 0.3, 1.0, count=6)
    box = Box(box.lower.relu(), box.upper.relu())
    assert ((box.upper == 0) & (box.lower == 0)).any()
    labels = torch.randint(CLASSES, (6,))
    for memory in (1, None):
        assert_same_margins(trace(module, (3, 5, 5)), box, labels, memory=memory)


def test_dense_boxes_are_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES))
    graph = trace(nn.Sequential(*layers).double(), (1, 3, 3))
    labels, wide, narrow = torch.tensor([1, 2]), boxes((1, 3, 3), 0, 50, 2), boxes((1, 3, 3), 1, 1)
    calls = []
    monkeypatch.setattr(sparse, "LARGEST_SHARE", 0.12)
    real = latent.attack_reduced
    monkeypatch.setattr(latent, "attack_reduced", lambda *a, **k: calls.append(1) or real(*a, **k))
    attack_margins(graph, wide, labels, steps=latent_steps(1))
    assert not calls
    attack_margins(graph, narrow[:2], labels, steps=latent_steps(1))
    assert calls
    attack_margins(graph, narrow[:2], labels, steps=latent_steps(1), plain=True)
    assert len(calls) == 1


# --- linear layers ----------------------------------------------------------------------------

SHARES = {"never": 0.0, "as it is": increments.FULL_PRODUCT_SHARE, "always": 2.0}


def linear_classifier(inputs: int, hidden: int, biased: bool) -> nn.Module:
    first = nn.Linear(inputs, hidden, bias=biased)
    if biased:
        first.bias.data += torch.tensor([0.0, 9.0, -9.0, 0.3])[torch.randint(4, (hidden,))]
    return nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, CLASSES, bias=biased)).double()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("flat,scale", [(0.0, 1.0), (0.5, 5.0), (0.9, 0.1), (1.0, 1.0)])
@pytest.mark.parametrize("inputs,hidden", [(1, 3), (5, 12), (30, 40)])
def test_incremental_attacks_find_the_margins_of_plain_ones(
    inputs: int,
    hidden: int,
    flat: float,
    scale: float,
    biased: bool,
    share: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent, "SMALLEST_LAYER", 0)
    monkeypatch.setattr(increments, "FULL_PRODUCT_SHARE", SHARES[share])
    torch.manual_seed(inputs)
    graph = trace(linear_classifier(inputs, hidden, biased), (inputs,))
    labels = torch.randint(CLASSES, (5,))
    assert_same_margins(graph, boxes((inputs,), flat, scale, 5), labels)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("biased", [False, True])
def test_incremental_margins_along_a_walk(
    biased: bool, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few or many coordinates move, samples leave: always what autograd says."""
    monkeypatch.setattr(increments, "FULL_PRODUCT_SHARE", SHARES[share])
    torch.manual_seed(1)
    graph = trace(linear_classifier(20, 30, biased), (20,)).detach()
    labels = torch.randint(CLASSES, (10,))
    targets = (labels + 1 + torch.arange(10) % 3) % CLASSES
    first, last = linear_pair(graph)
    fast = IncrementalMargins.of(first, last, first.weight.T.contiguous(), labels, targets)
    slow = NetworkLandscape(graph, Targeted(labels, targets))
    points = torch.randn(10, 20, dtype=torch.float64)
    for moving in (1.0, 0.02, 0.0, 0.05, 0.5, 0.02, 0.02):
        change = torch.randn_like(points) * (torch.rand_like(points) < moving)
        points = points + change
        found, expected = fast.look(points), slow.look(points)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-10, atol=1e-10)
        assert torch.equal(found.reached, expected.reached)
        nearby = points + 0.1
        found = fast.look(nearby, gradient=False)
        torch.testing.assert_close(found.scores, slow.look(nearby).scores)
        assert found.gradient is None
        index = torch.randperm(len(points))[: len(points) - 1]
        fast, slow, points = fast.select(index), slow.select(index), points[index]


def test_large_layers_are_evaluated_incrementally(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    graph = trace(linear_classifier(20, 30, True), (20,))
    made = []
    real = IncrementalMargins.of
    monkeypatch.setattr(IncrementalMargins, "of", lambda *a: made.append(1) or real(*a))
    box, labels = boxes((20,), 0.0, 1.0, 2), torch.tensor([0, 1])
    for smallest, plain, expected in ((601, False, 0), (600, False, 1), (600, True, 0)):
        monkeypatch.setattr(latent, "SMALLEST_LAYER", smallest)
        attack_margins(graph, box, labels, steps=latent_steps(2), plain=plain)
        assert len(made) == expected
        made.clear()


# --- which classifiers ------------------------------------------------------------------------

CONV = {
    "plain": (nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)),
    "flat first": (nn.Conv2d(2, 3, 2), nn.Flatten(), nn.ReLU(), nn.Linear(27, 4)),
}
OTHERS = {
    "groups": (nn.Conv2d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)),
    "dilation": (nn.Conv2d(2, 3, 2, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)),
    "oblong kernel": (nn.Conv2d(2, 3, (2, 1)), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)),
    "two strides": (nn.Conv2d(2, 3, 2, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)),
    "two paddings": (nn.Conv2d(2, 3, 2, 1, (1, 0)), nn.ReLU(), nn.Flatten(), nn.Linear(45, 4)),
    "another activation": (nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4)),
    "no activation": (nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 4)),
    "two layers": (*CONV["plain"], nn.ReLU(), nn.Linear(4, 4)),
    "not flat": (nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(2), nn.Linear(9, 1), nn.Flatten()),
    "linear on an image": (nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)),
    "only linear": (nn.Flatten(), nn.Linear(32, 4)),
}
LINEAR = {
    "plain": (nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)),
    "flattened again": (nn.Linear(5, 6), nn.Flatten(), nn.ReLU(), nn.Linear(6, 4)),
}
NOT_LINEAR = {
    "another activation": (nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 4)),
    "one layer": (nn.Linear(5, 4),),
    "three layers": (*LINEAR["plain"], nn.ReLU(), nn.Linear(4, 4)),
    "batchnorm": (nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)),
    "activation last": (nn.Linear(5, 6), nn.Linear(6, 4), nn.ReLU()),
}


@pytest.mark.parametrize("name", CONV)
def test_convolution_pairs(name: str) -> None:
    module = nn.Sequential(*CONV[name])
    first, last = convolution_pair(trace(module, (2, 4, 4)))
    assert first.weight is module[0].weight and last.weight is module[3].weight
    assert linear_pair(trace(module, (2, 4, 4))) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_structures_are_no_pairs_and_still_attacked(name: str) -> None:
    torch.manual_seed(0)
    graph = trace(nn.Sequential(*OTHERS[name]).double().eval(), (2, 4, 4))
    assert convolution_pair(graph) is None and linear_pair(graph) is None
    assert_same_margins(graph, boxes((2, 4, 4), 0.3, 1.0, 2), torch.tensor([0, 3]))


@pytest.mark.parametrize("name", LINEAR)
def test_linear_pairs(name: str) -> None:
    module = nn.Sequential(*LINEAR[name])
    first, last = linear_pair(trace(module, (5,)))
    assert first.weight is module[0].weight and last.weight is module[-1].weight


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_other_structures_are_no_linear_pairs(name: str) -> None:
    graph = trace(nn.Sequential(*NOT_LINEAR[name]).eval(), (5,))
    assert linear_pair(graph) is None and convolution_pair(graph) is None


# --- convolutions as matrices -----------------------------------------------------------------


@settings(max_examples=40)
@given(module=networks(containing=ops.Conv2d))
def test_matrices_evaluate_the_network(module: nn.Module) -> None:
    graph = trace(module, module.input_shape)
    torch.manual_seed(0)
    values, slopes = [], []
    points = torch.randn(3, *module.input_shape, dtype=torch.float64)
    inputs = [points.requires_grad_(), *(p for p in module.parameters() if p.requires_grad)]
    for smallest in (0, 1 << 60):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dense, "SMALLEST_PRODUCT", smallest)
            value = graph(points)
        values.append(value.detach())
        weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype).view_as(value)
        total = (value * weights).sum()
        slopes.append(torch.autograd.grad(total, inputs, allow_unused=True))
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-9)
    for found, expected in zip(*slopes, strict=True):
        found, expected = (torch.zeros(()) if g is None else g for g in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, check_dtype=False)


def test_a_shared_convolution_has_a_matrix_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SMALLEST_PRODUCT", 0)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 2, 3)
    module = nn.Sequential(conv, nn.ReLU(), conv, nn.Flatten(), nn.Linear(8, 3)).double()
    graph = trace(module, (2, 6, 6))
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(graph(x), module(x))


def test_convolution_matrix_by_hand() -> None:
    weight = torch.tensor([[[[1.0, 2.0]]]])
    op = ops.Conv2d(weight, torch.tensor([7.0]), (1, 1), (0, 0), (1, 1), 1)
    matrix, bias = convolution_matrix(op, (1, 1, 3))
    assert matrix.tolist() == [[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]
    assert bias.tolist() == [7.0, 7.0]


def test_large_convolutions_and_few_points_stay_convolutions() -> None:
    op = trace(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (1, 5, 5)).nodes[1].op
    enough = -(-dense.SMALLEST_PRODUCT // (25 * 18))
    assert dense.pays(op, torch.zeros(enough, 1, 5, 5))
    assert not dense.pays(op, torch.zeros(enough - 1, 1, 5, 5))
    assert not dense.pays(op, torch.zeros(enough, 1, 30, 30))  # too large a matrix
