"""Small networks with planted counterexamples that attacks miss.

Of each network, some inputs x0 have a counterexample x0 + d: all coordinates of d are close to the
ends of the ball, and another class is on top there. The network is trained to classify x0, to keep
the planted class on top at x0 + d, and to be right at what attacks have found lately; so in the end
attacks find nothing, and yet the property does not hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.attacks import CrossEntropy, Margin, Steps, pgd, strong_attack
from tightrope.box import Box
from tightrope.certification.problem import robustness
from tightrope.certification.properties import parse_ball
from tightrope.certification.subjects import Subject

EDGE = 0.98  # of the radius, at least, by which each coordinate of a planted point is away
MARGIN = 0.01  # by which the planted class shall win
WINDOW = 60  # points that attacks found lately, of each input
RATE, LATER = 1e-3, 3e-4  # before and after planting
GAIN = 2.0  # of the first layer: what is planted takes steep slopes
# How far an input has to go towards a planted point to be noticed, how steeply its neuron reacts
# from there on, and what those behind it make of that.
WAKE, STEEP, PASS = 0.8, 10.0, 1.5
STRAIGHT = 1.0
SAMPLES = 1000  # of a ball, to see how far a point has gone by what convolutions make of it
BEFORE, AFTER = 5, 5  # chunks of training; before planting, the balls grow to their size
CHUNK = 100  # steps of training between two looks at what a stronger attack finds
# The attack in a step of training, and the stronger one that looks for what it missed.
STEPS, TRIES = 8, 2
HARD_STEPS, HARD_TRIES = 40, 24
# The one that an instance has to stand in the end, and attacks on each class by itself.
LAST_STEPS, LAST_RESTARTS, EACH_CLASS = 200, 20, 5


@dataclass(frozen=True)
class Family:
    """A kind of network: its layers, what it takes, and how it is attacked."""

    layers: Callable[[int], list[nn.Module]]  # by the number of classes
    shape: tuple[int, ...]
    classes: int
    eps: float
    planted: int = 14
    networks: int = 1

    def build(self, seed: int) -> nn.Sequential:
        """Return the network of a seed, untrained."""
        torch.manual_seed(seed)
        network = nn.Sequential(*self.layers(self.classes))
        for layer in network:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
                # Convolutions that hardly bend let the layers behind see where an input is.
                nn.init.constant_(layer.bias, STRAIGHT * isinstance(layer, nn.Conv2d))
        first = network[0]
        with torch.no_grad():  # inputs are about one half, and differ by a few tenths of that
            first.weight.mul_(GAIN)
            first.bias.sub_(0.5 * first.weight.flatten(1).sum(1))
        return network


@dataclass(frozen=True)
class Plants:
    """Inputs, their classes, and the planted points with theirs."""

    x: Tensor
    labels: Tensor
    points: Tensor
    targets: Tensor
    eps: float

    def box(self) -> Box:
        """Return the balls that attacks may move in."""
        return parse_ball(self.x, self.eps, (0.0, 1.0)).inner()


def dense(*widths: int, act: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    """Return linear layers with activations between them."""
    pairs = list(itertools.pairwise(widths))
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(pairs):
        layers += [nn.Linear(a, b)] + [act()] * (k + 1 < len(pairs))
    return layers


def convolutions(*channels: int, act: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    """Return convolutions that keep the image's size."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(channels):
        layers += [nn.Conv2d(a, b, 3, padding=1), act()]
    return layers


def _image(
    *channels: int, width: int, act: type[nn.Module] = nn.ReLU, pool: bool = False
) -> Callable[[int], list[nn.Module]]:
    size = channels[-1] * (16 if pool else 25)
    middle: list[Callable[[], nn.Module]] = [lambda: nn.AvgPool2d(2, 1)] if pool else []

    def layers(classes: int) -> list[nn.Module]:
        rest = dense(size, width, width, classes, act=act)
        return [*convolutions(*channels, act=act), *(m() for m in middle), nn.Flatten(), *rest]

    return layers


def _flat(
    inputs: int, *widths: int, act: type[nn.Module] = nn.ReLU
) -> Callable[[int], list[nn.Module]]:
    return lambda classes: dense(inputs, *widths, classes, act=act)


GREY, COLOUR = (1, 5, 5), (3, 5, 5)

FAMILIES: dict[str, Family] = {
    "conv1": Family(_image(1, 12, width=64), GREY, 3, 0.1),
    "conv1-colour": Family(_image(3, 12, width=64), COLOUR, 5, 0.1),
    "conv2": Family(_image(1, 8, 8, width=64), GREY, 3, 0.1),
    "conv2-colour": Family(_image(3, 8, 8, width=64), COLOUR, 10, 0.1, planted=10),
    "conv3": Family(_image(1, 8, 8, 8, width=48), GREY, 4, 0.1, planted=10),
    "conv3-colour": Family(_image(3, 8, 8, 8, width=48), COLOUR, 3, 0.1, planted=10),
    "avgpool": Family(_image(1, 12, width=64, pool=True), GREY, 3, 0.1),
    "avgpool-colour": Family(_image(3, 12, width=64, pool=True), COLOUR, 5, 0.05, planted=10),
    "dense4": Family(_flat(25, 96, 96, 96, 96), (25,), 3, 0.1, networks=2),
    "dense4-few": Family(_flat(10, 96, 96, 96, 96), (10,), 3, 0.1, networks=2),
    "dense4-many": Family(_flat(75, 96, 96, 96, 96), (75,), 10, 0.1, networks=2),
    "dense5": Family(_flat(25, 80, 80, 80, 80, 80), (25,), 5, 0.1, networks=2),
    "dense5-few": Family(_flat(10, 80, 80, 80, 80, 80), (10,), 4, 0.1, networks=2),
    "dense5-many": Family(_flat(75, 80, 80, 80, 80, 80), (75,), 3, 0.1, networks=2),
    "tanh": Family(_flat(25, 96, 96, 96, act=nn.Tanh), (25,), 3, 0.1, networks=2),
    "tanh-conv": Family(_image(1, 12, width=64, act=nn.Tanh), GREY, 5, 0.1),
    "sigmoid": Family(_flat(25, 96, 96, 96, act=nn.Sigmoid), (25,), 3, 0.1, planted=10),
    "sigmoid-conv": Family(_image(1, 12, width=64, act=nn.Sigmoid), GREY, 3, 0.1, planted=10),
}


def draw_plants(family: Family, seed: int) -> Plants:
    """Draw inputs, classes and planted points."""
    generator = torch.Generator().manual_seed(seed)
    size = (family.planted, *family.shape)
    x = family.eps + (1 - 2 * family.eps) * torch.rand(size, generator=generator)
    labels = torch.randint(family.classes, (family.planted,), generator=generator)
    others = torch.randint(1, family.classes, (family.planted,), generator=generator)
    share = EDGE + (1 - EDGE) * torch.rand(size, generator=generator)
    signs = torch.randint(2, size, generator=generator) * 2 - 1
    found = Plants(x, labels, x, (labels + others) % family.classes, family.eps)
    return Plants(
        x, labels, found.box().project(x + family.eps * share * signs), found.targets, family.eps
    )


def sow(network: nn.Sequential, plants: Plants) -> None:
    """Give each planted point neurons of its own, that wake up close to it and make its class win.

    The first, in the first dense layer, measures how far an input has gone from x towards the
    point, and is silent (or saturated) on most of the way; those behind pass that on. Gradients
    elsewhere say nothing of it: there is something for training to keep and for attacks to miss.
    """
    first, *rest = [k for k, layer in enumerate(network) if isinstance(layer, nn.Linear)]
    count = len(plants.x)
    own = torch.arange(count)
    with torch.no_grad():
        _wake_up(network, first, plants)
        for k in rest[:-1]:
            layer = network[k]
            layer.weight[:count], layer.weight[:, :count] = 0.0, 0.0
            layer.weight[own, own], layer.bias[:count] = PASS, 0.0
        last = network[rest[-1]]
        last.weight[:, :count] = 0.0
        start, end = (network[: rest[-1]](t)[own, own] for t in (plants.x, plants.points))
        outputs = network(plants.points)
        behind = outputs.amax(1) - outputs[own, plants.targets] + 1
        push = behind / (end - start) / 2
        for sign, classes in ((1.0, plants.targets), (-1.0, plants.labels)):
            last.weight[classes, own] = sign * push
            last.bias.index_add_(0, classes, -sign * push * start)


def _wake_up(network: nn.Sequential, place: int, plants: Plants) -> None:
    """Let neurons of the first dense layer measure the way to the planted points."""
    layer, box = network[place], plants.box()
    for i, (x, point) in enumerate(zip(plants.x, plants.points, strict=True)):
        way = (point - x).flatten()
        points = torch.cat((box[i : i + 1].repeat(SAMPLES).sample(), point[None]))
        gone = (points - x).flatten(1) @ way / way.square().sum()
        seen, origin = (network[:place](t) for t in (points, x[None]))
        found = torch.linalg.lstsq((seen - origin).double(), gone[:, None].double(), driver="gelsd")
        weight = found.solution[:, 0].float()
        weight /= weight @ (seen[-1] - origin[0])
        layer.weight[i] = STEEP * weight
        layer.bias[i] = -STEEP * (weight @ origin[0] + WAKE)


class Planter:
    """Trains one network so that attacks miss what is planted."""

    def __init__(self, network: nn.Sequential, plants: Plants, *, seed: int) -> None:
        self.network, self.plants = network, plants
        self.sown = False
        self.optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
        self.whole = self.box = plants.box()
        self.window = plants.x[None].repeat(WINDOW, *(1 for _ in plants.x.shape))
        self.next = 0
        torch.manual_seed(seed)

    def sow(self) -> None:
        """Plant, and from now on train less, to keep what is planted."""
        sow(self.network, self.plants)
        self.sown = True
        for group in self.optimizer.param_groups:
            group["lr"] = LATER

    def remember(self, points: Tensor) -> None:
        """Put points of all inputs into the window, in the place of the oldest."""
        self.window[self.next % WINDOW] = points
        self.next += 1

    def train(self, steps: int, share: float) -> None:
        """Take some steps of training, each with a short attack in that share of the balls."""
        x = self.plants.x
        self.box = Box(*(x + share * (corner - x) for corner in self.whole.corners))
        for _ in range(steps):
            self._attack(STEPS, TRIES)
            self.optimizer.zero_grad(set_to_none=True)
            self._loss().backward()
            self.optimizer.step()

    def harden(self) -> int:
        """Attack longer, remember what is found; return how many inputs it was found for."""
        return int(self._attack(HARD_STEPS, HARD_TRIES))

    def _attack(self, steps: int, tries: int) -> Tensor:
        """Attack all inputs and remember the worst points; return how many are broken."""
        count, labels = len(self.plants.labels), self.plants.labels.repeat_interleave(tries)
        goal = (Margin if self.next % 2 else CrossEntropy)(labels)
        plan = Steps(steps, size=0.5, milestones=(0.5, 0.8))
        points = pgd(self.network, self.box.repeat(tries), goal, steps=plan)
        with torch.no_grad():
            outputs = self.network(points)
        wrong = (outputs.argmax(1) != labels).view(count, tries)
        loss = F.cross_entropy(outputs, labels, reduction="none").view(count, tries)
        points = points.view(count, tries, *points.shape[1:])
        # Of many tries, the worst few of each input.
        for place in loss.topk(min(tries, 4), 1).indices.T:
            self.remember(points[torch.arange(count), place])
        return wrong.any(1).sum()

    def _loss(self) -> Tensor:
        plants, window = self.plants, self.window.flatten(0, 1)
        points = torch.cat((plants.x, plants.points, window))
        outputs = self.network(points)
        count = len(plants.x)
        clean, planted, attacked = outputs.split([count, count, len(window)])
        wanted = planted.gather(1, plants.targets[:, None])
        others = planted.scatter(1, plants.targets[:, None], -math.inf)
        hinge = (others.amax(1, keepdim=True) - wanted + MARGIN).clamp(min=0)
        labels = plants.labels.repeat(len(self.window))
        losses = F.cross_entropy(attacked, labels, reduction="none")
        return (
            F.cross_entropy(clean, plants.labels) + 4 * self.sown * hinge.mean() + 4 * losses.mean()
        )


def grow(family: Family, plants: Plants, *, seed: int) -> nn.Sequential:
    """Return a network in which the points are planted."""
    network = family.build(seed)
    planter = Planter(network, plants, seed=seed)
    for k in range(BEFORE + AFTER):
        if k == BEFORE:
            planter.sow()
        planter.train(CHUNK, min(1.0, (k + 1) / BEFORE))
        planter.harden()
    return network.eval()


def hidden(network: nn.Module, plants: Plants) -> Tensor:
    """Return which planted points are counterexamples that our strongest attacks miss.

    A planted point lies in the ball, by exact arithmetic, and its class is strictly on top.
    """
    subject = Subject.of(network, tuple(plants.x.shape[1:]))
    box = plants.box()
    kept = (subject.predict(plants.x) == plants.labels) & box.contains(plants.points)
    for i in kept.nonzero()[:, 0].tolist():  # alone, as whoever has only this one would see it
        outputs = subject.outputs(plants.points[i : i + 1])[0]
        kept[i] = outputs[plants.targets[i]] > outputs[plants.labels[i]]
    points = strong_attack(
        subject.attacked, box, plants.labels, steps=LAST_STEPS, restarts=LAST_RESTARTS
    )
    kept &= subject.predict(points) == plants.labels
    ball = parse_ball(plants.x, plants.eps, (0.0, 1.0))
    for i, problem in enumerate(robustness(subject, ball, plants.labels)):
        if kept[i]:
            found = problem.refuter(subject).search(steps=LAST_STEPS, restarts=EACH_CLASS)
            kept[i] = found is None
    return kept
