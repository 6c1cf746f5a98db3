"""COLT (Balunovic and Vechev 2020): adversarial training layer by layer, inside zonotopes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import CrossEntropy, Steps, misclassified
from tightrope.attacks.coefficients import LatentZonotope
from tightrope.box import Box
from tightrope.domains import interval, zonotope
from tightrope.domains.error_terms import Errors
from tightrope.domains.reduced.reduction import LINEAR
from tightrope.domains.strips import strip
from tightrope.errors import UserError
from tightrope.graph import Graph, ops
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, Stage
from tightrope.training.objectives.ibp_r import relaxation_area
from tightrope.training.objectives.propagation import EVALUATION_MEMORY
from tightrope.training.parsing import increasing, setting


@dataclass(frozen=True)
class COLT(Objective):
    """Cross-entropy at adversarial points of the zonotope behind ever more layers.

    Each stage freezes the layers up to a ReLU and attacks the zonotope that these make of the ball;
    what is behind them learns. A penalty keeps the next stage's zonotope small.
    """

    name: ClassVar[str] = "colt"
    summary: ClassVar[str] = "adversarial points in zonotopes behind ever more frozen layers"

    layers: tuple[int, ...] = setting(
        (0, 1), increasing, "one stage each: attack behind so many ReLUs (0: in the ball)"
    )
    mix: float = setting(0.3, options.share, "part of a stage in which its loss takes over")
    radius_factor: float = setting(
        1.1, options.positive, "a stage's radius over that of the stage after it"
    )
    rate_factor: float = setting(
        0.75, options.positive, "a stage's learning rate over that of the stage before it"
    )
    area_weight: float = setting(
        5e-3, options.not_negative, "weight of the ReLU areas in the first stage: rho"
    )
    area_factor: float = setting(1.5, options.positive, "its factor from stage to stage")
    projections: int = setting(50, options.count, "random projections that estimate a bound")
    steps: int = options.steps(7)
    step_size: float = options.step_size(0.25, "step of the error coefficients, in [-1, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers[:1] != (0,):
            raise UserError(
                f"colt.layers must begin with 0, the ball, got {list(self.layers)}: "
                "the first stage trains all layers"
            )

    def check(self, graph: Graph) -> None:
        """Refuse networks whose layers cannot be frozen one after the other."""
        if any(isinstance(node.op, ops.BatchNorm) for node in graph.nodes):
            raise UserError("colt freezes layers, which BatchNorm would not be: batch_norm = false")
        cuts = {len(graph.relus) - behind: cut for behind, cut in graph.cuts().items()}
        missing = [n for n in self.layers if n not in cuts]
        if missing:
            raise UserError(
                f"colt.layers has {missing[0]}, but the network cannot be cut there; "
                f"possible numbers of ReLUs: {', '.join(map(str, sorted(cuts)))}"
            )
        body = graph.nodes[: cuts[self.layers[-1]]]
        other = [n.op for n in body if not isinstance(n.op, (*LINEAR, ops.Relu))]
        if other:
            raise UserError(
                f"colt.layers = {list(self.layers)} asks for zonotopes behind a "
                f"{type(other[0]).__name__}: layers up to the last of them must be affine or ReLUs"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """A stage for each layer; radii fall towards the last one, and so do learning rates."""
        last = len(self.layers) - 1
        return tuple(
            Stage(
                Layerwise(self, number),
                frozen=layer,
                radius=self.radius_factor ** (last - number),
                rate=self.rate_factor**number,
                mix=self.mix,
            )
            for number, layer in enumerate(self.layers)
        )

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the loss of the first stage."""
        return self.stages[0].objective(model, x, y, radius)


class Layerwise(Objective):
    """The loss of one stage, whose layers up to the `current`-th ReLU are frozen."""

    def __init__(self, colt: COLT, number: int) -> None:
        self.colt = colt
        self.previous = colt.layers[number - 1] if number else None
        self.current = colt.layers[number]
        self.next = colt.layers[number + 1] if number + 1 < len(colt.layers) else None
        self.area_weight = colt.area_weight * colt.area_factor**number

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return `k L(current) + (1 - k) L(previous) + k rho R(next)`, with `model.progress` as k.

        R is the mean over the samples of the sum of `max(-l, 0) max(u, 0)` over the next ReLUs.
        """
        kappa, ball = model.progress, Box.ball(x, radius)
        boxes = self.bounds(model.graph, ball)
        logits = self.adversarial_logits(model.graph, ball, boxes, y, self.current)
        value = kappa * F.cross_entropy(logits, y)
        if kappa < 1:
            before = model.logits
            if self.previous is not None:
                before = self.adversarial_logits(model.graph, ball, boxes, y, self.previous)
            value = value + (1 - kappa) * F.cross_entropy(before, y)
        if self.next is not None:
            area = relaxation_area(boxes[model.graph.relus[self.next - 1]]).mean()
            value = value + kappa * self.area_weight * area
        return Loss(value, ~misclassified(logits.detach(), y))

    def largest_batch(self, graph: Graph) -> int | None:
        """Return how many samples to evaluate at a time, each with all its projections."""
        groups = self.current if self.next is None else self.next
        if groups < 2:  # bounds behind affine layers need none
            return None
        width = max(math.prod(node.shape) for node in graph.nodes[: graph.relus[groups - 1]])
        # Values, what a layer makes of them, and their sizes; 4 bytes each.
        return max(1, EVALUATION_MEMORY // (4 * 3 * self.colt.projections * groups * width))

    def bounds(self, graph: Graph, ball: Box) -> dict[int, Box]:
        """Estimate the boxes of the ReLUs' inputs, as far as they are looked at.

        The first ReLU's are exact: the layers before it are affine. Behind it, sums of absolute
        values over error terms are medians of random projections: no bounds to rely on.
        """
        relus = graph.relus[: self.current if self.next is None else self.next]
        inputs = [graph.nodes[i].inputs[0] for i in relus]
        boxes: dict[int, Box] = {}
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.next is not None):
            if len(inputs) > 1:
                errors = Errors(projections=self.colt.projections)
                body = Graph(graph.nodes[: max(inputs) + 1])
                boxes |= zonotope.bounds(body, ball, keep=inputs, errors=errors)[1]
            if inputs:
                body = Graph(graph.nodes[: inputs[0] + 1])
                boxes[inputs[0]] = interval.bounds(body, ball)[0]
        return {i: boxes[before] for i, before in zip(relus, inputs, strict=True)}

    def adversarial_logits(
        self, graph: Graph, ball: Box, boxes: Mapping[int, Box], y: Tensor, relus: int
    ) -> Tensor:
        """Return the outputs at the worst point found in the zonotope behind so many ReLUs.

        The point is a constant: the layers before it learn nothing.
        """
        lines = {}
        for i in graph.relus[:relus]:
            slope, offset, _ = strip("deepz", boxes[i])
            lines[i] = slope, offset
        zono = LatentZonotope(graph, ball, lines)
        found = zono.worst(CrossEntropy(y), Steps(self.colt.steps, self.colt.step_size))
        extractor, classifier = graph.split(len(graph.relus) - relus)
        return classifier(zono.point(found, len(extractor.nodes) - 1))
