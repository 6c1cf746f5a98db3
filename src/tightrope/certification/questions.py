"""What `tr.verify` is asked: that a class wins, or that a spec holds, everywhere in a region."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tightrope.answer import Answer, verified
from tightrope.certification.arguments import check_label
from tightrope.certification.problem import Problem
from tightrope.certification.properties import Unsafe
from tightrope.certification.regions import Region
from tightrope.certification.specs import Spec
from tightrope.certification.subjects import Subject
from tightrope.domains import interval
from tightrope.errors import UserError, shorten
from tightrope.precision import ROUNDING, provable


class Question(Protocol):
    """What must hold; how it becomes a problem, or is answered at once."""

    def problem(self, subject: Subject, region: Region) -> Problem | Answer:
        """Return the problem of a network on a region."""


def check_question(x: Any, eps: Any, box: Any, label: Any, spec: Any) -> Question:
    """Return what is asked; what was left out or given twice is refused."""
    if (x is None) == (box is None):
        raise UserError("say which inputs: give either x with eps, or a box")
    if box is None and eps is None:
        raise UserError("eps is missing: the radius around x")
    if box is not None and eps is not None:
        raise UserError("give either a box or an input with eps, not both")
    if (label is None) == (spec is None):
        raise UserError("say what must hold: give either a label or a spec")
    if spec is None:
        return ClassWins(check_label(label))
    if not isinstance(spec, Spec):
        raise UserError(f"spec must be made by argmax, within or linear, got {shorten(spec)}")
    return SpecHolds(spec)


@dataclass(frozen=True)
class ClassWins:
    """A class wins, as the network's own `argmax` has it."""

    label: int

    def problem(self, subject: Subject, region: Region) -> Problem:
        """Return the problem: no other class may win."""
        shape, label = subject.graph.output_shape, self.label
        if len(shape) != 1 or shape[0] < 2:
            raise UserError(
                f"the network must give one number for each of at least two classes, but its "
                f"output has shape {shape} (x has no batch dimension)"
            )
        if not 0 <= label < shape[0]:
            raise UserError(f"label must be one of 0 to {shape[0] - 1}, got {shorten(label)}")

        def fails(point: Tensor) -> bool:
            return int(subject.predict(point[None])[0]) != label

        unsafe = Unsafe.misclassification(label, shape[0], region.outer.lower.device)
        return Problem(region.outer, region.inner, unsafe, fails)


@dataclass(frozen=True)
class SpecHolds:
    """A spec holds."""

    spec: Spec

    def problem(self, subject: Subject, region: Region) -> Problem | Answer:
        """Return the problem of what is left when the bounds of single outputs are known."""
        failure = self.spec.failure(math.prod(subject.graph.output_shape))

        def fails(point: Tensor) -> bool:
            return failure.holds_at(subject.outputs(point[None])[0])

        left = failure
        if not bool(failure.rows.strict.all()):  # a range that ends where the outputs do
            with torch.no_grad(), provable():
                output, _ = interval.bounds(subject.exact, region.outer, rounding=ROUNDING)
            left = failure.without(failure.rows.proved_by(output))
        if not left.groups:
            return replace(verified(0.0), stage="ibp", note=region.note())
        unsafe = left.unsafe(region.outer.lower.device)
        return Problem(region.outer, region.inner, unsafe, fails)
