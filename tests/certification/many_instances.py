"""Small problems of all operations, with values that are exact.

What is exact is a value at a point, in rational numbers: where the smallest value of a network is
attained (`patterns`), or where the lowest of many samples is. No bound may lie above it, and
nothing may be verified where it is not positive, by however little.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from composed_instances import COMPOSED
from exact import Exact, exact_values, fractions
from instances import KINDS, POOLS, SMOOTH, Instance, Largest, draw_rows, small_module
from networks import points_in
from patterns import exact_minimum, patterns
from torch import Tensor, nn

from tightrope.answer import Answer
from tightrope.box import Box
from tightrope.certification.problem import Problem
from tightrope.certification.subjects import Subject
from tightrope.graph import trace

EVERY_KIND = (*KINDS, *POOLS, *SMOOTH)
SAMPLES = 2000
MOST_PATTERNS = 32
# Minima that are asked for: zero, and as close to it as rounding goes or a search hardly gets.
NEAR = (0.0, 2e-16, -2e-16, 1e-13, -1e-13, 1e-9, -1e-9, 1e-6, -1e-6)
NOISE = 1e-12  # of the network in float64, whose word a counterexample is


@dataclass(frozen=True)
class Drawn:
    """An instance, and its exact outputs at points where rows are low: an upper limit."""

    instance: Instance
    outputs: list[Exact]

    @property
    def subject(self) -> Subject:
        return self.instance.subject

    def lowest(self, problem: Problem) -> Fraction:
        """Return the smallest worst row at those points, in exact arithmetic."""
        return min(self._worst(problem, output) for output in self.outputs)

    @staticmethod
    def _worst(problem: Problem, output: Exact) -> Fraction:
        """Return the smallest, over groups, of the largest row of some outputs."""
        group = problem.unsafe.group.numpy()
        rows = fractions(problem.unsafe.matrix) @ output + fractions(problem.unsafe.offset)
        worst: Fraction = min(max(rows[group == g]) for g in np.unique(group))
        return worst

    def problems(self, count: int, seed: int) -> Iterator[tuple[Problem, float]]:
        """Yield problems with the minimum that each is meant to have, many of them near zero."""
        generator = random.Random(seed)
        scale, minima = self.instance.scale, self.instance.minima
        for k in range(count):
            wanted = [abs(generator.gauss(0, 0.5)) + 1e-3 for _ in minima]
            near = NEAR[(seed + k) % len(NEAR)] * scale
            wanted[generator.randrange(len(wanted))] = near if k % 2 else generator.gauss(0, 0.3)
            target = torch.tensor(wanted, dtype=torch.float64)
            yield self.instance.problem(target - minima), min(wanted)

    def check(self, problem: Problem, answer: Answer) -> str:
        """Compare an answer with what is exact; return the verdict."""
        lowest = self.lowest(problem)
        if answer.bound is not None and answer.counterexample is None:
            assert Fraction(answer.bound) <= lowest, f"bound {answer.bound}, but {float(lowest)}"
        if bool(answer):
            assert lowest > 0, f"verified, but one value is {float(lowest)}"
            assert answer.counterexample is None
        elif answer.counterexample is not None:
            assert bool(problem.inner.contains(answer.counterexample[None])[0])
            assert self.instance.worst(answer.counterexample, problem.unsafe) <= 0
            # Nor is it an accident of rounding.
            exact = exact_values(self.subject.exact, answer.counterexample)
            found = self._worst(problem, exact[len(self.subject.exact.nodes) - 1])
            assert found <= Fraction(NOISE * self.instance.scale), f"falsified by {float(found)}"
        return str(answer.verdict)


def draw(seed: int, kinds: Sequence[str] = EVERY_KIND) -> Drawn:
    """Return the network, box and rows of a seed."""
    generator = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    module, shape = small_module(kind, generator)
    flavour = generator.choice(("plain", "plain", "dyadic", "thin"))
    center = torch.randn(1, *shape, dtype=torch.float64)
    radius = generator.choice([0.01, 0.1, 0.5, 1.0, 3.0]) * torch.rand(1, *shape).double()
    if flavour == "dyadic":  # minima are then often floats, and zero can be zero
        with torch.no_grad():
            for tensor in (*module.parameters(), center, radius):
                tensor.copy_((4 * tensor).round() / 4)
    if flavour == "thin":
        radius = _thin(generator, center, radius)
    subject = Subject.of(module, shape)
    unsafe = draw_rows(generator, subject.exact.output_shape[0], (1, 1, 2, 3))
    if flavour == "dyadic":
        unsafe.matrix.mul_(4).round_().div_(4)
    groups = [unsafe.group == g for g in unsafe.group.unique()]
    wholes = [Largest(module, unsafe.matrix[mine], unsafe.offset[mine]) for mine in groups]
    find = _sampled if kind in (*SMOOTH, *COMPOSED) else _enumerated
    box, minima, points = find(wholes, shape, center, radius)
    scale = 1 + float((unsafe.matrix.abs() @ subject.outputs(center)[0].abs()).max())
    scale += float(unsafe.offset.abs().max())
    instance = Instance(subject, box, unsafe, minima, scale)
    last = len(subject.exact.nodes) - 1
    corners = [corner[0] for corner in box.corners]
    outputs = [exact_values(subject.exact, point)[last] for point in (*points, *corners)]
    return Drawn(instance, outputs)


def _thin(generator: random.Random, center: Tensor, radius: Tensor) -> Tensor:
    """Return widths of nothing, of one float, or hardly more, for some inputs or for all."""
    unit = center.abs() * 2.0**-52
    thin = generator.choice([torch.zeros_like(unit), unit, 2.0**14 * unit, 1e-9 * radius])
    return torch.where(torch.rand(radius.shape) < generator.choice([0.5, 1.0]), thin, radius)


Found = tuple[Box, Tensor, list[Tensor]]


def _enumerated(wholes: list[nn.Module], shape: tuple[int, ...], x: Tensor, r: Tensor) -> Found:
    """Return a box with few patterns, the minimum of each group on it, and where that is."""
    graphs = [trace(whole, shape) for whole in wholes]
    while max(patterns(graph, Box(x - r, x + r)) for graph in graphs) > MOST_PATTERNS:
        r = r / 2
    box = Box(x - r, x + r)
    one = torch.ones(1, dtype=torch.float64)
    found = [exact_minimum(graph, box, one) for graph in graphs]
    # Linear programs are off by a little, which coarser coordinates may undo.
    points = [point for _, point in found]
    points += [torch.clamp((64 * p).round() / 64, *(t[0] for t in box.corners)) for p in points]
    return box, torch.tensor([value for value, _ in found], dtype=torch.float64), points


def _sampled(wholes: list[nn.Module], shape: tuple[int, ...], x: Tensor, r: Tensor) -> Found:
    """Do so by the lowest of many samples."""
    box = Box(x - r, x + r)
    samples = points_in(box, SAMPLES)
    with torch.no_grad():
        values = [whole(samples)[:, 0] for whole in wholes]
    lowest = torch.tensor([float(v.min()) for v in values], dtype=torch.float64)
    return box, lowest, [samples[int(v.argmin())] for v in values]
