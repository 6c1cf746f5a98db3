"""Steps of small networks, on the CPU and on the pretended GPU."""

from functools import cache

import torch
from pretend_cuda import pretend_cuda, real
from torch import nn

from tightrope import devices
from tightrope.graph import distance, trace
from tightrope.nets import Normalize, powers
from tightrope.nets.distance import Bias, Distance, MeanShift, Nearest
from tightrope.training.assistance import assisted
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.teachers import frozen_teacher

SHAPE = (1, 8, 8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Linear(10, 4),
    ).to(memory_format=torch.channels_last)


def distance_network():
    torch.manual_seed(0)
    first = (nn.Flatten(), Distance(64, 12), MeanShift(12), Distance(12, 4, 0.6), Bias(4))
    return nn.Sequential(Normalize(0.4, 0.5), *first, Nearest())


def batch(samples=7):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(samples, *SHAPE, generator=generator)
    return x, torch.randint(4, (samples,), generator=generator)


def plain_network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1))
    head = (nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 4))
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), *head)


NETWORKS = {"norm": network, "plain": plain_network, "distances": distance_network}


def step(objective, device, *, radius=0.05, annealing=False, net="norm", **options):
    """Return what a step says, its gradients and the running statistics.

    `helpers` are settings of what is put around it.
    """
    given = Settings.parse(options.pop("helpers", {}))
    net, graph, state = _traced(device, "distances" if objective.trains_distances else net)
    with torch.no_grad():
        for tensor, value in zip(net.state_dict().values(), state, strict=True):
            real(tensor).copy_(value)
    net.zero_grad()
    x, y = (t.to(device) for t in batch())
    if getattr(objective, "needs_teacher", False):
        options["teacher"] = _teacher(device)
    options["tightness_weight"] = given.tightness_weight
    plain = Step(graph, objective, 0.1, **options)
    taken = assisted(plain, given, torch.optim.SGD(net.parameters(), 1e-2))
    torch.manual_seed(2)
    result = taken(x, y, radius, annealing=annealing)
    gradients = {name: real(p.grad) for name, p in net.named_parameters()}
    return result, gradients, {name: real(b).clone() for name, b in net.named_buffers()}


@cache
def _traced(device, name):
    """Tracing takes longer than a step; the graph shares the tensors of the network."""
    make = NETWORKS[name]
    net = make().to(device)
    return net, trace(net, SHAPE), [t.clone() for t in make().state_dict().values()]


@cache
def _teacher(device):
    """A network that disagrees with the one to train."""
    net = network()
    with torch.no_grad():
        net[-1].weight.neg_()
    return frozen_teacher(net.eval(), SHAPE, torch.device(device))


def as_on_gpu(monkeypatch):
    """Let the CPU take the ways of a GPU, to compare with."""
    monkeypatch.setattr(devices, "IMMEDIATE", ())
    for module in (powers, distance):
        monkeypatch.setattr(module, "_can_compile", lambda *given: False)


def on_both(objective, monkeypatch, **options):
    as_on_gpu(monkeypatch)
    expected = step(objective, "cpu", **options)
    with pretend_cuda():
        return step(objective, "cuda", **options), expected


def assert_same(found, expected):
    assert found[0] == expected[0]
    for tensors, others in zip(found[1:], expected[1:], strict=True):
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            other = others[name]
            assert (tensor is None) == (other is None), name
            assert tensor is None or torch.equal(tensor, other), name
