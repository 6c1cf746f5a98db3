"""The latent attack: one point per wrong class, against a loop written from the paper."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tightrope.attacks import (
    CrossEntropy,
    Steps,
    attack_loss,
    attack_margins,
    latent_steps,
    pgd,
    wrong_classes,
)
from tightrope.attacks.kernels import chain_attack, chains
from tightrope.box import Box
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")

HUGE = 1 << 40


def affine(classes: int = 4) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(6, classes)), (6,)


def linear(classes: int = 4) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, classes)), (6,)


def conv(classes: int = 4) -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(36, classes))
    return nn.Sequential(*layers), (2, 3, 4)


def deep(classes: int = 4) -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 7), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(7, classes)), (2, 3, 4)


def pooled(classes: int = 4) -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(12, classes)), (2, 3, 4)


KINDS = {"affine": affine, "linear": linear, "conv": conv, "deep": deep, "pooled": pooled}


def make(kind: str, classes: int = 4, count: int = 5) -> tuple[nn.Module, Graph, Box, Tensor]:
    """A classifier, its graph, boxes of which some coordinates have no width, and labels."""
    torch.manual_seed(3)
    module, shape = KINDS[kind](classes)
    module = module.double()
    lower = torch.randn(count, *shape, dtype=torch.float64)
    width = torch.rand(count, *shape, dtype=torch.float64) * 1.5
    width[torch.rand_like(width) < 0.2] = 0.0
    labels = torch.randint(classes, (count,))
    return module, trace(module, shape), Box(lower, lower + width), labels


@pytest.fixture(autouse=True)
def always_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow changes in small classifiers, too."""
    monkeypatch.setattr(chains, "SMALLEST_WORK", 0)


def margins(module: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    """`o_i - o_y` of each wrong class i at its own point, one at a time."""
    result = torch.zeros(points.shape[:2], dtype=points.dtype)
    with torch.no_grad():
        for n, y in enumerate(labels.tolist()):
            wrong = [i for i in range(points.shape[1] + 1) if i != y]
            for e, i in enumerate(wrong):
                outputs = module(points[n, e].unsqueeze(0))[0]
                result[n, e] = outputs[i] - outputs[y]
    return result


def slow_attack(module: nn.Module, box: Box, labels: Tensor, start: Tensor, n: int) -> Tensor:
    """The paper's latent attack: one sample, one class and one step after the other."""
    result = torch.zeros_like(start)
    for s, y in enumerate(labels.tolist()):
        low, up = box.lower[s], box.upper[s]
        for e, i in enumerate(c for c in range(start.shape[1] + 1) if c != y):
            z, best = start[s, e], -torch.inf
            for k in range(n + 1):
                z = z.clone().requires_grad_()
                outputs = module(z.unsqueeze(0))[0]
                score = outputs[i] - outputs[y]
                (slope,) = torch.autograd.grad(score, z)
                if score > best:
                    best, result[s, e] = score.item(), z.detach()
                size = max(0.2, 2 / n)
                if 20 <= n <= 50 and k >= int(0.7 * n):
                    size *= 0.1
                z = torch.minimum(torch.maximum(z + size * (up - low) * slope.sign(), low), up)
                z = z.detach()
    return result


# --- steps and classes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count,share,drops",
    [
        (1, 2.0, []),
        (5, 0.4, []),
        (10, 0.2, []),
        (19, 0.2, []),
        (20, 0.2, [14]),
        (50, 0.2, [35]),
        (51, 0.2, [20, 35]),
        (80, 0.2, [32, 56]),
        (81, 0.2, [24, 48, 64]),
        (100, 0.2, [30, 60, 80]),
    ],
)
def test_steps_of_the_paper(count: int, share: float, drops: list[int]) -> None:
    steps = latent_steps(count)
    expected = [2 * share * 0.1 ** sum(k >= d for d in drops) for k in range(count)]
    assert steps.sizes() == pytest.approx(expected, rel=1e-12)  # twice: of the half-width


def test_steps_of_another_size_and_decay() -> None:
    expected = [1.0] * 14 + [0.2] * 6
    assert latent_steps(20, 0.5, 0.2).sizes() == pytest.approx(expected)
    assert latent_steps(4, 0.3).sizes() == pytest.approx([0.6] * 4)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_wrong_classes_are_all_but_the_label_in_order(classes: int) -> None:
    labels = torch.tensor([*range(classes), 0])
    expected = [[c for c in range(classes) if c != y] for y in labels.tolist()]
    assert wrong_classes(labels, classes).tolist() == expected


# --- against the loop -------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_the_attack_is_the_papers(kind: str, n: int, plain: bool) -> None:
    module, graph, box, labels = make(kind, count=3)
    start = box.sample(3)
    options = {"steps": latent_steps(n), "start": start, "plain": plain}
    found = attack_margins(graph, box, labels, **options)
    expected = slow_attack(module, box, labels, start, n)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert (found != start).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes,count", [(2, 4), (2, 1), (4, 1)])
def test_two_classes_and_single_samples(kind: str, classes: int, count: int) -> None:
    module, graph, box, labels = make(kind, classes, count)
    start = box.sample(classes - 1)
    found = attack_margins(graph, box, labels, steps=latent_steps(4), start=start)
    assert found.shape == (count, classes - 1, *box.lower.shape[1:])
    expected = slow_attack(module, box, labels, start, 4)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_counts(kind: str) -> None:
    """Nothing is lost by attacking on from a good point with steps that lead away from it."""
    module, graph, box, labels = make(kind, count=8)
    good = attack_margins(graph, box, labels, steps=latent_steps(20))
    once = attack_margins(graph, box, labels, steps=Steps(1, size=2.0), start=good)
    before, after = (margins(module, p, labels) for p in (good, once))
    assert (after >= before - 1e-12).all()
    untouched = attack_margins(graph, box, labels, steps=Steps(0), start=good)
    torch.testing.assert_close(untouched, good, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_is_projected(kind: str) -> None:
    _, graph, box, labels = make(kind)
    start = box.sample(3)
    start[:, 0] += 5.0
    start[:, 2] -= 5.0
    found = attack_margins(graph, box, labels, steps=Steps(0), start=start)
    assert torch.equal(found, torch.stack((box.upper, start[:, 1], box.lower), 1))


@pytest.mark.parametrize("kind", KINDS)
def test_starts_in_any_memory_order(kind: str) -> None:
    # The search fills views of the points: where dimensions do not merge, it would fill copies.
    module, graph, box, labels = make(kind)
    start = box.sample(3)
    turned = start.transpose(0, 1).contiguous().transpose(0, 1)
    options = {"steps": latent_steps(3)}
    expected = attack_margins(graph, box, labels, start=start, **options)
    found = attack_margins(graph, box, labels, start=turned, **options)
    torch.testing.assert_close(found, expected)
    assert (margins(module, found, labels) > margins(module, start, labels)).all()


# --- inside the box ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_points_never_leave_the_box(kind: str, centered: bool, dtype: torch.dtype) -> None:
    _, graph, box, labels = make(kind, count=8)
    box = Box(box.lower.to(dtype), box.upper.to(dtype))
    if centered:
        box = Box.around(box.center, box.radius)
    steps = latent_steps(5, 0.37)
    points = attack_margins(graph.to(dtype), box, labels, steps=steps, restarts=2)
    assert points.dtype == dtype
    assert (points >= box.lower.unsqueeze(1)).all() and (points <= box.upper.unsqueeze(1)).all()
    single = attack_loss(graph.to(dtype), box, labels, steps=steps, restarts=2)
    assert single.shape == (8, 1, *box.lower.shape[1:])
    assert box.contains(single[:, 0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_without_width_return_their_point(kind: str) -> None:
    _, graph, box, labels = make(kind)
    flat = Box(box.lower, box.lower)
    points = attack_margins(graph, flat, labels, steps=latent_steps(5), restarts=2)
    assert torch.equal(points, box.lower.unsqueeze(1).expand_as(points))
    points = attack_loss(graph, flat, labels, steps=latent_steps(5))
    assert torch.equal(points[:, 0], box.lower)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_without_width_among_others(kind: str) -> None:
    module, graph, box, labels = make(kind)
    upper = box.upper.clone()
    upper[2] = box.lower[2]
    box = Box(box.lower, upper)
    start = box.sample(3)
    found = attack_margins(graph, box, labels, steps=latent_steps(3), start=start)
    expected = slow_attack(module, box, labels, start, 3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(found[2], box.lower[2].expand_as(found[2]))


# --- memory and restarts ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [False, True])
def test_memory_does_not_change_the_result(kind: str, plain: bool) -> None:
    module, graph, box, labels = make(kind, count=7)
    found = []
    for memory in (1, 15000, HUGE, None):
        torch.manual_seed(8)
        options = {"steps": latent_steps(4), "restarts": 2, "memory": memory, "plain": plain}
        found.append(attack_margins(graph, box, labels, **options))
    for other in found[:-1]:
        torch.testing.assert_close(other, found[-1], rtol=1e-10, atol=1e-10)
    start = box.lower.unsqueeze(1).expand_as(found[-1])
    assert (margins(module, found[-1], labels) > margins(module, start, labels)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_restarts_never_hurt(kind: str) -> None:
    module, graph, box, labels = make(kind, count=8)
    start = box.sample(3)
    scores = []
    for restarts in (1, 2, 4):
        torch.manual_seed(5)
        options = {"steps": Steps(1, size=0.5), "restarts": restarts, "start": start}
        scores.append(margins(module, attack_margins(graph, box, labels, **options), labels))
    for fewer, more in pairwise(scores):
        assert (more >= fewer - 1e-12).all()
    assert (scores[-1] > scores[0] + 1e-6).any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_restart_draws_anew(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no steps, the best of the starts remains."""
    module, graph, box, labels = make(kind)
    draws = []
    real = Box.sample

    def spy(self: Box, count: int | None = None) -> Tensor:
        draws.append(real(self, count))
        return draws[-1]

    monkeypatch.setattr(Box, "sample", spy)
    monkeypatch.setattr(chain_attack, "_draw", lambda box, count, _pool: spy(box, count))
    start = real(box, 3)
    options = {"steps": Steps(0), "start": start}
    first = attack_margins(graph, box, labels, restarts=1, **options)
    assert torch.equal(first, start)
    draws.clear()
    best = margins(module, attack_margins(graph, box, labels, restarts=3, **options), labels)
    assert len(draws) == 2
    scores = [margins(module, p, labels) for p in (start, *(image(d, start) for d in draws))]
    torch.testing.assert_close(best, torch.stack(scores).amax(0))
    assert (best >= margins(module, start, labels) - 1e-12).all()
    assert (best > margins(module, start, labels) + 1e-6).any()


def image(points: Tensor, like: Tensor) -> Tensor:
    """Undo the flattening of points, channels last, that following changes begins with."""
    if points.shape == like.shape:
        return points
    return points.unflatten(2, (*like.shape[3:], like.shape[2])).movedim(-1, 2)


def test_estimators_begin_at_points_of_their_own() -> None:
    for kind in KINDS:
        _, graph, box, labels = make(kind)
        points = attack_margins(graph, box, labels, steps=Steps(0))
        moves = box.upper > box.lower
        assert (points[:, 0] != points[:, 1])[moves].all() and (points[:, 0] >= box.lower).all()


# --- stopping early ---------------------------------------------------------------------------


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attack", [attack_margins, attack_loss])
def test_attacks_leave_no_gradients(kind: str, attack: object) -> None:
    module, graph, box, labels = make(kind)
    lower = box.lower.requires_grad_()
    points = attack(graph, Box(lower, box.upper), labels, steps=latent_steps(3), restarts=2)
    assert not points.requires_grad
    assert lower.grad is None
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_starts_may_have_gradients(kind: str) -> None:
    _, graph, box, labels = make(kind)
    start = box.sample(3)
    expected = attack_margins(graph, box, labels, steps=latent_steps(3), start=start)
    start.requires_grad_()
    points = attack_margins(graph, box, labels, steps=latent_steps(3), start=start)
    assert torch.equal(points, expected) and not points.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_estimator_is_pgd_on_cross_entropy(kind: str) -> None:
    _, graph, box, labels = make(kind)
    for restarts in (1, 3):
        options = {"steps": latent_steps(6), "restarts": restarts}
        torch.manual_seed(2)
        expected = pgd(graph.detach(), box, CrossEntropy(labels), **options)
        torch.manual_seed(2)
        found = attack_loss(graph, box, labels, **options)
        torch.testing.assert_close(found[:, 0], expected, rtol=1e-10, atol=1e-10)
