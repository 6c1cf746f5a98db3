"""The fast ways to evaluate classifiers find what the plain way finds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tightrope.attacks import attack_margins, latent, latent_steps
from tightrope.attacks.kernels import chain_attack, chains, increments, last_layer, reduced
from tightrope.attacks.kernels.chains import chain
from tightrope.attacks.latent import wrong_classes
from tightrope.attacks.pgd import WIDTH, Steps
from tightrope.box import Box
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = 4
# Hidden layers: convolutions, or linear ones.
DEPTHS = [(True,), (False,), (True, True), (True, False), (False, False), (True, True, False)]
# Reduced to what can change; changes followed after one step in full, or after several; the last
# layer without what cannot flip.
WAYS = ("reduced", "followed", "in full first", "narrowed")


@pytest.fixture(autouse=True, scope="module")
def always_followed() -> object:
    """Follow changes in small networks, too. (A module's fixture, as hypothesis wants it.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "SMALLEST_WORK", 0)
        yield


def go(way: str, patch: pytest.MonkeyPatch) -> None:
    """Attack small networks in one of the ways."""
    patch.setattr(chains, "LARGEST_REDUCED", 1 << 60 if way == "reduced" else 0)
    patch.setattr(chains, "DEEPEST_REDUCED", 1 << 60)
    patch.setattr(increments, "WIDTH", 0.0 if way == "followed" else WIDTH)
    patch.setattr(last_layer, "SMALLEST", 0 if way == "narrowed" else 1 << 60)
    patch.setattr(last_layer, "SHARE", 0)


def shifted(layer: nn.Module) -> nn.Module:
    """Make some neurons always active and some dead."""
    if layer.bias is not None:
        shifts = torch.tensor([0.0, 9.0, -9.0, 0.3])
        layer.bias.data += shifts[torch.randint(4, layer.bias.shape)]
    return layer


@st.composite
def drawn_chains(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """Draw up to three convolutions or linear layers with ReLUs, and a linear layer."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(2, 7)))
    layers: list[nn.Module] = []
    size: tuple[int, ...] = shape
    for convolution in draw(st.sampled_from(DEPTHS)):
        biased, outputs = draw(st.booleans()), draw(st.integers(1, 4))
        if convolution:
            stride = tuple(draw(st.integers(1, 3)) for _ in range(2))
            padding = tuple(draw(st.integers(0, 2)) for _ in range(2))
            room = [n + 2 * p for n, p in zip(size[1:], padding, strict=True)]
            kernel = tuple(draw(st.integers(1, min(5, n))) for n in room)
            layer = nn.Conv2d(size[0], outputs, kernel, stride, padding, bias=biased)
            layer.weight.data *= 2.0
            size = tuple(layer(torch.zeros(1, *size)).shape[1:])
            layers += [shifted(layer), nn.ReLU()]
        else:
            inputs = torch.zeros(size).numel()
            first = [nn.Flatten()] if len(size) == 3 else []
            layers += [*first, shifted(nn.Linear(inputs, 5, bias=biased)), nn.ReLU()]
            size = (5,)
    if len(size) == 3:
        layers.append(nn.Flatten())
    layers.append(nn.Linear(torch.zeros(size).numel(), CLASSES, bias=draw(st.booleans())))
    return nn.Sequential(*layers).double(), shape


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


# --- changes ------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    drawn=drawn_chains(),
    flat=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    scale=st.sampled_from([0.01, 0.5, 4.0]),
    way=st.sampled_from(WAYS),
)
def test_following_changes_finds_the_margins_of_plain_attacks(
    drawn: tuple[nn.Module, tuple[int, ...]], flat: float, scale: float, way: str
) -> None:
    module, shape = drawn
    graph = trace(module, shape)
    assert chain(graph) is not None
    with pytest.MonkeyPatch.context() as patch:
        go(way, patch)
        box, labels = boxes(shape, flat, scale), torch.tensor([0, 3, 1])
        assert_same_margins(graph, box, labels, steps=latent_steps(12, 0.3))


@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("geometry", [(3, 2, 1), (5, 2, 2), (4, 3, 1), (3, 1, 1)])
def test_the_points_themselves_are_those_of_plain_attacks(
    count: int,
    way: str,
    geometry: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also coordinates without a gradient, which stay where they began."""
    go(way, monkeypatch)
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 3, *geometry)
    hidden = convolution(torch.zeros(1, 2, 6, 6)).numel()
    layers = (convolution, nn.ReLU(), nn.Flatten(), nn.Linear(hidden, CLASSES))
    with torch.no_grad():
        convolution.bias.copy_(torch.tensor([-0.5, -0.8, -0.6]))  # whole windows fall silent
    graph = trace(nn.Sequential(*layers).double(), (2, 6, 6))
    box, labels = boxes((2, 6, 6), 0.2, 1.0, 60), torch.arange(60) % CLASSES
    start = box.sample(CLASSES - 1)
    options = {"steps": latent_steps(count), "start": start}
    fast = attack_margins(graph, box, labels, **options)
    plain = attack_margins(graph, box, labels, plain=True, **options)
    # Of two points with the same margin, rounding may prefer either.
    found, expected = (kept_margins(graph, p, labels) for p in (fast, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    differs = ((fast - plain).abs() > 1e-12).flatten(2).any(2)
    assert differs.double().mean() < 0.02
    assert ((plain == start) & (box.upper > box.lower).unsqueeze(1)).any()


@pytest.mark.parametrize("way", WAYS)
def test_points_that_go_to_and_fro(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one size end between two points; the best of them is the plain attack's."""
    go(way, monkeypatch)
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 1, 1), nn.ReLU()
    module = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(96, CLASSES)).double()
    graph, shape = trace(module, (1, 8, 8)).detach(), (1, 8, 8)
    box, labels = boxes(shape, 0.1, 3.0, 40), torch.arange(40) % CLASSES
    start, steps = box.sample(CLASSES - 1), Steps(30, 0.4)
    fast, plain = (
        attack_margins(graph, box, labels, steps=steps, start=start, plain=plain)
        for plain in (False, True)
    )
    found, expected = (kept_margins(graph, points, labels) for points in (fast, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    differs = ((fast - plain).abs() > 1e-12).flatten(2).any(2)
    assert differs.double().mean() < 0.02
    # Points do go to and fro here: the last one is the last but two, and not the last but one.
    rows, wrong = box.repeat(CLASSES - 1), wrong_classes(labels, CLASSES).view(-1, 1)
    visited = [start.flatten(0, 1)]
    for size in steps.sizes():
        point = visited[-1].clone().requires_grad_()
        outputs = graph(point)
        margins = outputs.gather(1, wrong) - outputs.gather(1, labels.repeat_interleave(3)[:, None])
        (slope,) = torch.autograd.grad(margins.sum(), point)
        moved = point.detach() + size / 2 * (rows.upper - rows.lower) * slope.sign()
        visited.append(torch.clamp(moved, rows.lower, rows.upper))
    last, before, earlier = (t.flatten(1) for t in visited[:-4:-1])
    cycling = ((last - earlier).abs() < 1e-12).all(1) & ((last - before).abs() > 1e-6).any(1)
    assert cycling.double().mean() > 0.2


@pytest.mark.parametrize("way", WAYS)
def test_the_way_is_the_one_asked_for(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go(way, monkeypatch)
    calls = dict.fromkeys(("reduced", "in full", "narrowed"), 0)
    watched = {
        "reduced": (reduced.Reduction, "climb"),
        "in full": (increments.Increments, "_observe"),
        "narrowed": (last_layer.LastLayer, "of"),
    }
    for name, (owner, method) in watched.items():
        real = getattr(owner, method)

        def spy(*given: object, name: str = name, real: Any = real) -> object:
            calls[name] += 1
            return real(*given)

        monkeypatch.setattr(owner, method, spy)
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5), nn.ReLU())
    module = nn.Sequential(*layers, nn.Linear(5, CLASSES)).double()
    attack_margins(
        trace(module, (1, 3, 3)), boxes((1, 3, 3), 0, 2), torch.arange(3), steps=latent_steps(20)
    )
    expected = {"reduced": (1, 0, 0), "followed": (0, 2, 0), "in full first": (0, 6, 0)}
    assert tuple(calls.values()) == expected.get(way, (0, 6, 3))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("flat,scale", [(0.0, 1.0), (0.5, 5.0), (0.9, 0.1), (1.0, 1.0)])
@pytest.mark.parametrize("inputs,hidden", [(1, 3), (5, 12), (30, 40)])
def test_vectors(inputs: int, hidden: int, flat: float, scale: float, biased: bool) -> None:
    torch.manual_seed(inputs)
    first = shifted(nn.Linear(inputs, hidden, bias=biased))
    module = nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, CLASSES, bias=biased)).double()
    labels = torch.randint(CLASSES, (5,))
    assert_same_margins(trace(module, (inputs,)), boxes((inputs,), flat, scale, 5), labels)


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


def test_channels_last_boxes_and_threads() -> None:
    """Neither the memory order nor the number of threads changes anything."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES))
    graph, labels = trace(nn.Sequential(*layers).double(), (3, 5, 5)), torch.arange(11) % CLASSES
    box = boxes((3, 5, 5), 0.3, 1.0, count=11)
    start = box.sample(CLASSES - 1)
    options = {"steps": latent_steps(20), "start": start}
    usual = attack_margins(graph, box, labels, **options)
    last = box.map(lambda t: t.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(attack_margins(graph, last, labels, **options), usual)
    torch.set_num_threads(3)
    found = attack_margins(graph, box, labels, **options)
    torch.set_num_threads(1)
    torch.testing.assert_close(found, usual)


def test_small_classifiers_are_evaluated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES))
    graph = trace(nn.Sequential(*layers).double(), (1, 3, 3))
    labels, box, steps = torch.tensor([1, 2]), boxes((1, 3, 3), 0, 1, 2), latent_steps(1)
    calls = []
    real = latent.attack_chain
    monkeypatch.setattr(latent, "attack_chain", lambda *a, **k: calls.append(1) or real(*a, **k))
    products = 2 * 2 * 2 * 4 + 8 * CLASSES
    for smallest, plain, expected in (
        (products + 1, False, 0),
        (products, False, 1),
        (products, True, 0),
    ):
        monkeypatch.setattr(chains, "SMALLEST_WORK", smallest)
        attack_margins(graph, box, labels, steps=steps, plain=plain)
        assert len(calls) == expected
        calls.clear()


def test_starts_are_uniform_in_the_box_on_any_number_of_threads() -> None:
    torch.manual_seed(0)
    box = boxes((40,), 0.3, 2.0, 37)
    drawn = []
    for threads in (1, 3):
        torch.manual_seed(1)
        with ThreadPoolExecutor(threads) as pool:
            drawn.append(chain_attack._draw(box, 300, pool))
            again = chain_attack._draw(box, 300, pool)
    points = drawn[0]
    assert torch.equal(points, drawn[1]) and not torch.equal(points, again)
    low, width = box.lower.unsqueeze(1), (box.upper - box.lower).unsqueeze(1)
    assert ((points >= low) & (points <= box.upper.unsqueeze(1))).all()
    share = ((points - low) / width)[width.expand_as(points) > 0]
    # Hundreds of thousands of numbers: mean and deviation of the uniform distribution.
    assert abs(share.mean() - 0.5) < 0.005 and abs(share.std() - 12**-0.5) < 0.005
    assert len(torch.unique(share)) > 0.99 * len(share)


# --- which classifiers --------------------------------------------------------------------------

CHAINS = {
    "plain": (nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)),
    "oblong": (nn.Conv2d(2, 3, (2, 1), (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)),
    "flat": (nn.Flatten(), nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 4)),
}
CHAINS["deep"] = (*CHAINS["plain"], nn.ReLU(), nn.Linear(4, 4))
OTHERS = {
    "flat first": (nn.Conv2d(2, 3, 2), nn.Flatten(), nn.ReLU(), nn.Linear(27, 4)),
    "groups": (nn.Conv2d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4)),
    "dilation": (nn.Conv2d(2, 3, 2, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)),
    "another activation": (nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4)),
    "no activation": (nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 4)),
    "batchnorm": (nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), *CHAINS["plain"][1:]),
    "not flat": (nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Flatten(2), nn.Linear(9, 1), nn.Flatten()),
    "linear on an image": (nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)),
    "only linear": (nn.Flatten(), nn.Linear(32, 4)),
    "activation last": (*CHAINS["plain"], nn.ReLU()),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str) -> None:
    module = nn.Sequential(*CHAINS[name])
    found = chain(trace(module, (2, 4, 4)))
    affine = [layer for layer in module if hasattr(layer, "weight")]
    assert [op.weight for op in found.layers] == [layer.weight for layer in affine]


@pytest.mark.parametrize("name", OTHERS)
def test_other_structures_are_no_chains_and_still_attacked(name: str) -> None:
    torch.manual_seed(0)
    graph = trace(nn.Sequential(*OTHERS[name]).double().eval(), (2, 4, 4))
    assert chain(graph) is None
    assert_same_margins(graph, boxes((2, 4, 4), 0.3, 1.0, 2), torch.tensor([0, 3]))
