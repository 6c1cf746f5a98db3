"""Distillation from a robust teacher: AD-CERT (2026) and CC-Dist (De Palma 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tightrope.attacks import Divergence
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, certified
from tightrope.training.objectives.divergence import divergence
from tightrope.training.objectives.expressive import Interpolated, own_margins
from tightrope.training.objectives.propagation import margin_loss
from tightrope.training.parsing import choice, setting

RSLAD_CLEAN = 1 / 6  # the share of the clean inputs in RSLAD's loss

CLEAN, ADVERSARIAL = "clean", "adversarial"
_TEACHER_INPUT = "where the teacher is asked: at the clean or at the adversarial inputs"


@dataclass(frozen=True)
class Distilled(Interpolated):
    """What methods with a teacher share: it is frozen, robust, and of the same architecture."""

    needs_teacher: ClassVar[bool] = True

    teacher_input: str = setting(CLEAN, choice(CLEAN, ADVERSARIAL), _TEACHER_INPUT)


@dataclass(frozen=True)
class ADCERT(Distilled):
    """The IBP loss, and the divergence of an attacked student from its teacher.

    Labels enter through the IBP loss and the attack only.
    """

    name: ClassVar[str] = "ad-cert"
    summary: ClassVar[str] = "IBP loss, and the divergence from a robust teacher under attack"

    imitate: str = setting(
        ADVERSARIAL,
        choice(ADVERSARIAL, "rslad", CLEAN),
        "the teacher at adversarial inputs, at both kinds as RSLAD does, or at clean ones",
    )
    attack: str = setting(
        "labels", choice("labels", "teacher"), "whom the attack leads away from (rslad: teacher)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imitate == "rslad":
            object.__setattr__(self, "attack", "teacher")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `alpha L_IBP + (1 - alpha) KL(teacher(x) || student(x'))`."""
        teacher = teacher_of(model)
        points = self._points(model, x, y, radius)
        logits = model.logits if self.imitate == CLEAN else model.graph(points)
        reference = teacher(points if self.teacher_input == ADVERSARIAL else x)
        imitation = divergence(reference, logits).mean()
        if self.imitate == "rslad":
            clean = divergence(reference, model.logits).mean()
            imitation = RSLAD_CLEAN * clean + (1 - RSLAD_CLEAN) * imitation
        ball = Box.ball(x, radius)
        bound, boxes = interval.margins(model.graph, ball, y, keep=model.watched)
        value = self.alpha * margin_loss(bound, y) + (1 - self.alpha) * imitation
        return Loss(value, self.robust(own_margins(logits, y), bound, y), boxes=boxes)

    def _points(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Tensor:
        if self.imitate == CLEAN and self.teacher_input == CLEAN:
            return x
        goal = Divergence(teacher_of(model)(x)) if self.attack == "teacher" else None
        return self.points(model, x, y, radius, goal)


@dataclass(frozen=True)
class CCDist(Distilled):
    """CC-IBP, and the worst distance of the features from those of a teacher.

    Both take the same convex combinations of what an attack finds and of what intervals bound.
    """

    name: ClassVar[str] = "cc-dist"
    summary: ClassVar[str] = "CC-IBP, and bounds of the distance to a robust teacher's features"

    weight: float = setting(5.0, options.not_negative, "of the mean squared distance of a feature")

    def check(self, graph: Graph) -> None:
        """Refuse networks that have no features in front of a last linear layer."""
        features_of(graph)

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `CE(combined margins) + weight mean_j max over [lo_j, hi_j] of (z - t_j)^2`."""
        points = self.points(model, x, y, radius)
        place, end = features_of(model.graph), len(model.graph.nodes) - 1
        values = model.graph.propagate(evaluate.RULES, points, keep=(place,))
        adversarial = own_margins(values[end], y)
        bound, boxes = interval.margins(
            model.graph, Box.ball(x, radius), y, keep={*model.watched, place}
        )
        combined = torch.lerp(adversarial, bound, self.alpha)
        distance = worst_distance(
            _between(values[place], boxes[place], self.alpha),
            _features(teacher_of(model), points if self.teacher_input == ADVERSARIAL else x),
        )
        value = margin_loss(combined, y) + self.weight * distance.mean()
        seen = {i: boxes[i] for i in model.watched}
        return Loss(value, certified(combined, y), boxes=seen)


def worst_distance(box: Box, target: Tensor) -> Tensor:
    """Return `max (z_j - t_j)^2` over the box, as a mean over the features j of each sample."""
    lower, upper = box.corners
    return torch.maximum((lower - target) ** 2, (upper - target) ** 2).flatten(1).mean(1)


def teacher_of(model: FixedModel) -> Graph:
    """Return the network to learn from."""
    if model.teacher is None:
        raise UserError("there is no teacher to learn from: set teacher to the folder of a run")
    return model.teacher


def features_of(graph: Graph) -> int:
    """Return the position of the features: what the last linear layer reads."""
    last = graph.nodes[-1]
    if not isinstance(last.op, ops.Linear):
        raise UserError(
            "cc-dist compares what the last linear layer reads, but this network does not end in "
            "one; use ad-cert, which compares outputs"
        )
    return last.inputs[0]


def _features(graph: Graph, x: Tensor) -> Tensor:
    place = features_of(graph)
    found: Tensor = graph.propagate(evaluate.RULES, x, keep=(place,))[place]
    return found


def _between(points: Tensor, box: Box, alpha: float) -> Box:
    """Return the box whose ends lie between the points and the ends of a box around them."""
    lower, upper = box.corners
    return Box(torch.lerp(points, lower, alpha), torch.lerp(points, upper, alpha))
