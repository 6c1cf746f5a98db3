"""The latent attack by few launches: the margins of the plain one."""

import gpu_steps
import pytest
import torch
from torch import nn

from tightrope.attacks import attack_margins, few_launches, latent, latent_steps, wrong_classes
from tightrope.attacks.kernels.chains import chain
from tightrope.attacks.pgd import Search
from tightrope.box import Box
from tightrope.graph import trace
from tightrope.precision import search_precision, searching

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = 5


def linear():
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, CLASSES)), (12,)


def deep():
    layers = (nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False))
    behind = (nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, CLASSES))
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), *behind), (2, 6, 6)


NETWORKS = {"linear": linear, "deep": deep}


def case(name, samples=6, width=0.7, dtype=torch.float32):
    torch.manual_seed(3)
    module, shape = NETWORKS[name]()
    graph = trace(module.to(dtype), shape)
    center = torch.randn(samples, *shape, dtype=dtype)
    if len(shape) == 3:
        center = center.contiguous(memory_format=torch.channels_last)
    return graph, Box(center - width, center + width), torch.arange(samples) % CLASSES


def found_margins(graph, points, labels):
    outputs = graph(points.flatten(0, 1)).unflatten(0, points.shape[:2])
    targets = wrong_classes(labels, CLASSES)
    true = outputs.gather(2, labels.view(-1, 1, 1).expand(-1, targets.shape[1], 1))
    return (outputs.gather(2, targets.unsqueeze(2)) - true).squeeze(2).detach()


def attack(case, **options):
    graph, box, labels = case
    torch.manual_seed(7)
    options = {"steps": latent_steps(20), **options}
    return attack_margins(graph, box, labels, **options)


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_margins_are_those_of_the_plain_attack(name, restarts, monkeypatch):
    problem = case(name)
    graph, box, labels = problem
    plain = attack(problem, plain=True, restarts=restarts)
    gpu_steps.as_on_gpu(monkeypatch)
    points = attack(problem, restarts=restarts)
    assert box.map(lambda t: t.repeat_interleave(4, 0)).contains(points.flatten(0, 1)).all()
    expected = found_margins(graph, plain, labels)
    torch.testing.assert_close(found_margins(graph, points, labels), expected, atol=2e-6, rtol=2e-6)
    middle = found_margins(graph, box.center.unsqueeze(1).expand_as(plain), labels)
    assert (expected >= middle - 1e-6).all() and (expected > middle + 0.01).float().mean() > 0.5


@pytest.mark.parametrize("name", NETWORKS)
def test_who_is_left_out_and_how_it_is_cut_do_not_matter(name, monkeypatch):
    """In float64, where sums of another order hardly differ."""
    gpu_steps.as_on_gpu(monkeypatch)
    problem = case(name, dtype=torch.float64)
    sizes = []
    original = few_launches.Climbers.select

    def select(self, rows):
        sizes.append((len(rows), self.points.shape[0] * self.points.shape[1]))
        return original(self, rows)

    monkeypatch.setattr(few_launches.Climbers, "select", select)
    monkeypatch.setattr(few_launches, "WORTHWHILE", 1.0)
    usual = attack(problem)
    assert sizes and any(left < before for left, before in sizes)
    in_pieces = attack(problem, memory=1)
    monkeypatch.setattr(few_launches, "WORTHWHILE", -1.0)
    sizes.clear()
    assert torch.allclose(attack(problem), usual, atol=1e-12)
    assert not sizes
    assert torch.allclose(in_pieces, usual, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_autograd(name):
    graph, box, labels = case(name, dtype=torch.float64)
    targets = wrong_classes(labels, CLASSES)[:, 0]
    points = box.sample().requires_grad_()
    outputs = graph(points)
    rows = torch.arange(len(labels))
    scores = outputs[rows, targets] - outputs[rows, labels]
    (expected,) = torch.autograd.grad(scores.sum(), points)
    margins = few_launches.Margins(chain(graph), torch.float64)
    slopes, offsets = margins.rows(labels, targets[:, None])
    with torch.no_grad():
        found, inputs = margins.look(points.detach(), slopes[:, 0], offsets[:, 0])
        gradient = margins.gradient(inputs, slopes[:, 0])
    torch.testing.assert_close(found, scores.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_search_in_short_numbers_still_finds(name, monkeypatch):
    """Points are found in bfloat16; what they are worth is computed in full."""
    problem = case(name)
    graph, _, labels = problem
    gpu_steps.as_on_gpu(monkeypatch)
    usual = found_margins(graph, attack(problem), labels)
    with searching("bf16"):
        points = attack(problem)
    assert points.dtype == torch.float32
    found = found_margins(graph, points, labels)
    assert not torch.equal(found, usual)
    torch.testing.assert_close(found, usual, atol=0.1, rtol=0.1)


def test_only_a_search_is_short():
    with searching("tf32"):
        assert torch.backends.cuda.matmul.fp32_precision != "tf32"
        with search_precision():
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert torch.backends.cudnn.conv.fp32_precision == "tf32"
        assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    with searching("full"), search_precision():
        assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def test_other_networks_take_the_plain_way(monkeypatch):
    gpu_steps.as_on_gpu(monkeypatch)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    graph = trace(module, (4,))
    assert chain(graph) is None
    box, labels = Box(torch.zeros(3, 4), torch.ones(3, 4)), torch.arange(3)
    looks = []
    original = Search.moving
    monkeypatch.setattr(Search, "moving", lambda *given: looks.append(1) or original(*given))
    monkeypatch.setattr(latent, "MEMORY", 1 << 40)
    points = attack_margins(graph, box, labels, steps=latent_steps(20))
    assert points.shape == (3, 4, 4)
    assert len(looks) <= 4
