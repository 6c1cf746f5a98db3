"""Small problems whose exact answer is known: networks, boxes, and the minimum over every group."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from composed_instances import COMPOSED
from patterns import exact_minimum, patterns
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.certification.problem import Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.subjects import Subject
from tightrope.graph import trace

KINDS = ("dense", "deep", "conv", "residual", "leaky", "batchnorm")
POOLS = ("maxpool", "avgpool")
SMOOTH = ("sigmoid", "tanh")


class _Residual(nn.Module):
    """`x -> last(relu(first(x)) + second(relu(first(x))))`, with a ReLU on the join."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(torch.relu(x + self.second(x)))


class Largest(nn.Module):
    """The largest of some rows of a network's output, by ReLUs: `max(a, b) = a + relu(b - a)`."""

    def __init__(self, module: nn.Module, matrix: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.module = module
        self.rows = nn.Linear(matrix.shape[1], len(matrix)).to(matrix.dtype)
        with torch.no_grad():
            self.rows.weight.copy_(matrix)
            self.rows.bias.copy_(offset)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(self.module(x))
        most = rows[:, 0:1]
        for i in range(1, self.rows.out_features):
            most = most + torch.relu(rows[:, i : i + 1] - most)
        return most


def small_module(kind: str, generator: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a float64 network of at most ten ReLUs, and the shape of its input."""
    torch.manual_seed(generator.getrandbits(32))
    if kind in COMPOSED:
        module, shape = COMPOSED[kind](generator)
        _scatter(module)
        return module.double().eval(), shape
    inputs, outputs = generator.randint(2, 6), generator.randint(2, 4)
    width = generator.randint(2, 6)
    shape: tuple[int, ...] = (inputs,)
    if kind == "residual":
        module: nn.Module = _Residual(inputs, generator.randint(2, 4), outputs)
    elif kind == "deep":
        width = generator.randint(2, 3)
        module = nn.Sequential(
            *(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)),
        )
    elif kind in POOLS:
        shape = (1, 3, 3)
        pool = nn.MaxPool2d((1, 2)) if kind == "maxpool" else nn.AvgPool2d(2, 1, padding=1)
        size = 2 if kind == "maxpool" else 18
        module = nn.Sequential(
            *(nn.Conv2d(1, 2, 2), nn.ReLU(), pool, nn.Flatten()),
            nn.Linear(2 * size if kind == "maxpool" else size, outputs),
        )
    elif kind == "conv":
        shape = (1, 2, 3)
        module = nn.Sequential(
            *(nn.Conv2d(1, 2, 2, padding=(0, 1)), nn.ReLU(), nn.Conv2d(2, 1, (1, 2)), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(3, outputs)),
        )
    else:
        acts: dict[str, nn.Module] = {"sigmoid": nn.Sigmoid(), "tanh": nn.Tanh()}
        act = acts.get(kind, nn.ReLU())
        if kind == "leaky":
            act = nn.LeakyReLU(generator.choice([0.01, 0.25]))
        norm = [nn.BatchNorm1d(width)] if kind == "batchnorm" else []
        second = generator.randint(1, 4)
        module = nn.Sequential(
            *(nn.Linear(inputs, width), *norm, act, nn.Linear(width, second), act),
            nn.Linear(second, outputs),
        )
    _scatter(module)
    return module.double().eval(), shape


def _scatter(module: nn.Module) -> None:
    """Draw weights and statistics that are larger than torch's, so that much can happen."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.8)
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.1, 2.0)


@dataclass(frozen=True)
class Instance:
    """A network on a box, groups of rows, and the exact minimum of each group's largest row."""

    subject: Subject
    box: Box
    unsafe: Unsafe
    minima: Tensor
    scale: float

    def problem(self, shift: Tensor) -> Problem:
        """Return the problem whose groups have been shifted, each by its own number."""
        offset = self.unsafe.offset + shift[self.unsafe.group]
        unsafe = Unsafe(self.unsafe.matrix, offset, self.unsafe.group)

        def fails(point: Tensor) -> bool:
            return self.worst(point, unsafe) <= 0

        return Problem(self.box, self.box, unsafe, fails)

    def worst(self, point: Tensor, unsafe: Unsafe) -> float:
        """Return the smallest, over groups, of the largest row at a point."""
        rows = unsafe.matrix @ self.subject.outputs(point[None])[0] + unsafe.offset
        return min(float(rows[unsafe.group == g].max()) for g in unsafe.group.unique())


def draw_instance(seed: int, *, most: int = 64, single: bool = False) -> Instance:
    """Return the instance of a seed, with at most so many patterns of activations.

    Groups have one to three rows each, `single` ones exactly one.
    """
    generator = random.Random(seed)
    module, shape = small_module(KINDS[seed % len(KINDS)], generator)
    subject = Subject.of(module, shape)
    center = torch.randn(1, *shape, dtype=torch.float64)
    radius = generator.choice([0.01, 0.1, 0.5, 1.0, 3.0]) * torch.rand(1, *shape).double()
    unsafe = draw_rows(generator, subject.exact.output_shape[0], (1,) if single else (1, 1, 2, 3))
    groups = [unsafe.group == g for g in unsafe.group.unique()]
    wholes = [
        trace(Largest(module, unsafe.matrix[mine], unsafe.offset[mine]), shape) for mine in groups
    ]
    while max(patterns(whole, Box(center - radius, center + radius)) for whole in wholes) > most:
        radius = radius / 2
    box = Box(center - radius, center + radius)
    one = torch.ones(1, dtype=torch.float64)
    minima = torch.tensor(
        [exact_minimum(whole, box, one)[0] for whole in wholes], dtype=torch.float64
    )
    outputs = subject.outputs(center)
    scale = 1 + float((unsafe.matrix.abs() @ outputs[0].abs()).max() + unsafe.offset.abs().max())
    return Instance(subject, box, unsafe, minima, scale)


def draw_rows(generator: random.Random, outputs: int, choices: tuple[int, ...]) -> Unsafe:
    """Return two or three groups of so many rows."""
    sizes = [generator.choice(choices) for _ in range(generator.randint(2, 3))]
    rows = sum(sizes)
    matrix = torch.randn(rows, outputs, dtype=torch.float64)
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return Unsafe(matrix, torch.randn(rows, dtype=torch.float64), group)
