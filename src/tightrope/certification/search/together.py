"""Many boxes of inputs whose properties differ by numbers only, decided in one search.

The network is condensed once, for the box around all of them; one that cannot be is bounded as it
is, on many boxes at a time. The numbers become inputs that do not vary: a row `c . output + offset`
is a function of the inputs and of its offset, and each box to be searched has the offsets of its
own problem. One more such input says which problem it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tightrope.answer import Answer, falsified
from tightrope.box import Box
from tightrope.certification.problem import Problem
from tightrope.certification.search.box_pool import BoxPool
from tightrope.certification.search.clipping import Boxes
from tightrope.certification.search.inputs import FEW_INPUTS, InputSearch, suits_input_splits
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.devices import launches
from tightrope.domains.boxes.bounding import (
    BoxBounder,
    CompiledBounder,
    GraphBounder,
    OffsetBounder,
    loop_is_ready,
)
from tightrope.domains.boxes.choosing import ChoosingBounder
from tightrope.domains.boxes.condensed import Condensed
from tightrope.domains.boxes.condensing import condense
from tightrope.domains.linear.crown import CROWN_IBP, relax
from tightrope.precision import ROUNDING

FEWEST = 4  # problems that are worth it
TRIED = 16  # points that are run alone, of those that look like counterexamples


def alike(problems: list[Problem]) -> bool:
    """Return whether there are many problems, of equal rows but for their offsets."""
    if len(problems) < FEWEST:
        return False
    first = problems[0].unsafe
    return all(
        torch.equal(p.unsafe.matrix, first.matrix) and torch.equal(p.unsafe.group, first.group)
        for p in problems
    )


def decide_together(
    subject: Subject, problems: list[Problem], deadline: Deadline
) -> tuple[Answer, int] | None:
    """Decide problems that are alike; also say which one a counterexample is of.

    None if too many inputs vary. The deadline is looked at by whoever set it, too (`until`).
    """
    lower, upper = (torch.cat([p.outer.corners[k] for p in problems]) for k in (0, 1))
    hull = Box(lower.amin(0, keepdim=True), upper.amax(0, keepdim=True))
    unsafe = problems[0].unsafe
    chosen = _bounder(subject, problems, hull)
    if chosen is None:
        return None
    bounder, varying = chosen
    refute = _Refuting(subject, problems, hull, varying)
    offsets = torch.stack([p.unsafe.offset for p in problems])
    numbers = torch.arange(len(problems), dtype=torch.float64)[:, None]
    low, high = (
        torch.cat((t.flatten(1)[:, refute.varying], offsets, numbers), 1) for t in (lower, upper)
    )
    whole = Box(low.amin(0, keepdim=True), high.amax(0, keepdim=True))
    search = InputSearch(bounder, whole, unsafe.group, refute)
    still = torch.ones(len(problems), len(search.groups), dtype=torch.bool)
    search.pool = BoxPool(Boxes(low, high, still), lower.new_full((len(problems),), -torch.inf))
    tries = torch.cat((low / 2 + high / 2, low, high))
    for group in unsafe.group.unique():
        point = refute(tries, group.repeat(len(tries)))
        if point is not None:
            return falsified(point), refute.number
    return search.run(deadline.end), refute.number


def _bounder(
    subject: Subject, problems: list[Problem], hull: Box
) -> tuple[BoxBounder, Tensor] | None:
    """Return what bounds the rows, with inputs for their offsets, and the inputs that vary."""
    unsafe, exact = problems[0].unsafe, subject.exact
    blank = torch.zeros_like(unsafe.offset)
    if not launches(hull.lower):
        known = relax(exact, hull, effort=CROWN_IBP, rounding=ROUNDING).boxes
        network = condense(exact, known, unsafe.matrix, blank, rounding=ROUNDING)
        if network is not None and network.inputs <= FEW_INPUTS and loop_is_ready():
            varying = torch.from_numpy(network.varying)
            return CompiledBounder(_with_offsets(network)), varying
    if not all(suits_input_splits(subject, problem) for problem in problems):
        return None
    bounder = ChoosingBounder(GraphBounder(exact, hull, unsafe.matrix, blank))
    return OffsetBounder(bounder, len(blank)), bounder.varying


def _with_offsets(network: Condensed) -> Condensed:
    """Return the network with one more input for the offset of each row, and one for nothing."""
    more = network.rows + 1
    moved = network.source >= network.inputs
    source = np.where(moved, network.source + more, network.source)
    ends = network.pointer[network.neurons + 1 :]
    pointer = network.pointer.copy()
    pointer[network.neurons + 1 :] += np.arange(1, network.rows + 1)
    offsets = network.inputs + np.arange(network.rows)
    return replace(
        network,
        inputs=network.inputs + more,
        pointer=pointer,
        source=np.insert(source, ends, offsets),
        weight=np.insert(network.weight, ends, 1.0),
        varying=np.arange(network.inputs + more),
    )


@dataclass
class _Refuting:
    """Tries points, which say what problem they are about, as counterexamples."""

    subject: Subject
    problems: list[Problem]
    hull: Box
    varying: Tensor
    number: int = -1

    def __post_init__(self) -> None:
        corners = (torch.cat([p.inner.corners[k] for p in self.problems]) for k in (0, 1))
        self.inner = Box(*corners)

    def __call__(self, points: Tensor, groups: Tensor) -> Tensor | None:
        """Return a counterexample, and remember the problem that it is of."""
        number = points[:, -1].round().long()
        inputs = self.hull.center.flatten(1).repeat(len(points), 1)
        inputs[:, self.varying] = points[:, : len(self.varying)]
        inner = self.inner[number]
        inputs = inner.project(inputs.view(-1, *self.subject.input_shape).to(inner.lower.dtype))
        with torch.no_grad():
            outputs = self.subject.attacked(inputs).flatten(1).double()
        unsafe = self.problems[0].unsafe
        rows = outputs @ unsafe.matrix.T + points[:, len(self.varying) : -1]
        about = unsafe.group == groups[:, None]
        score = -torch.where(about, rows, -math.inf).amax(1)
        order = score.argsort(descending=True)[: min(TRIED, int((score >= 0).sum()))]
        for i in order.tolist():
            if self.problems[int(number[i])].fails(inputs[i]):
                self.number = int(number[i])
                return inputs[i]
        return None
