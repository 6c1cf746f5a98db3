"""One optimiser step: the clean pass, the objective, the regularisers, the gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import misclassified
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, ops
from tightrope.training import regularizers
from tightrope.training.batchnorm import (
    FixedModel,
    clean_pass,
    fix,
    training_model,
    update_running,
)
from tightrope.training.objectives import Loss, Objective

# Radius at which the regularisers look at the network while the real one is zero.
REGULARIZER_RADIUS = 1e-6


@dataclass(frozen=True)
class StepResult:
    """What a step tells the log; sums over the samples of the batch."""

    samples: int
    loss: float
    natural: int
    robust: int | None


@dataclass(frozen=True)
class Step:
    """Computes the gradients of a batch.

    `regularizer_weight` scales Shi et al.'s regularisers while the radius is below `target`;
    `accumulate` is the number of parts in which the batch is computed.
    """

    graph: Graph
    objective: Objective
    target: float
    regularizer_weight: float = 0.0
    l1: float = 0.0
    accumulate: int = 1

    def __call__(self, x: Tensor, y: Tensor, radius: float, *, annealing: bool) -> StepResult:
        """Run the batch and leave the gradients in the parameters."""
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        weight = self.regularizer_weight * (1 - radius / self.target) if annealing else 0.0
        if self.l1:
            (self.l1 * regularizers.l1(self.graph)).backward()
        if self.accumulate > 1:
            return self._in_parts(x, y, radius, weight)
        return self._backward(training_model(self.graph, x), y, radius, weight, share=1.0)

    def _backward(
        self, model: FixedModel, y: Tensor, radius: float, weight: float, *, share: float
    ) -> StepResult:
        input_position, relu_inputs = watched_positions(model.graph)
        weight = weight if relu_inputs else 0.0
        if weight:
            model.watched = (input_position, *relu_inputs)
        if radius == 0:
            loss = Loss(F.cross_entropy(model.logits, y))
        else:
            loss = self.objective(model, model.x, y, radius)
        value = loss.value
        if weight:
            boxes = loss.boxes or self._narrow_boxes(model)
            watched = [boxes[i] for i in relu_inputs]
            value = value + weight * regularizers.fast_regularizer(boxes[input_position], watched)
        (value * share).backward()
        with torch.no_grad():
            natural = int((~misclassified(model.logits.detach(), y)).sum())
        robust = natural if radius == 0 else None if loss.robust is None else int(loss.robust.sum())
        return StepResult(len(y), float(value.detach()) * len(y), natural, robust)

    def _narrow_boxes(self, model: FixedModel) -> dict[int, Box]:
        box = Box.ball(model.x, REGULARIZER_RADIUS)
        return interval.bounds(model.graph, box, keep=model.watched)[1]

    def _in_parts(self, x: Tensor, y: Tensor, radius: float, weight: float) -> StepResult:
        """Accumulate gradients over parts that share the statistics of the whole batch.

        The statistics and clean outputs become leaves, whose gradients add up over the parts
        and are sent through the clean pass in the end: exactly the gradient of the whole.
        """
        statistics, logits = clean_pass(self.graph, x)
        update_running(self.graph, statistics, len(x))
        leaves = {
            i: tuple(t.detach().requires_grad_() for t in pair) for i, pair in statistics.items()
        }
        output = None if logits is None else logits.detach().requires_grad_()
        results = []
        for part in torch.arange(len(x)).tensor_split(self.accumulate):
            if not len(part):
                continue
            inside = slice(int(part[0]), int(part[-1]) + 1)
            model = FixedModel(
                fix(self.graph, {i: (m, v) for i, (m, v) in leaves.items()}),
                x[inside],
                None if output is None else output[inside],
            )
            share = len(part) / len(x)
            results.append(self._backward(model, y[inside], radius, weight, share=share))
        _send_back(statistics, leaves, logits, output)
        robust = [r.robust for r in results if r.robust is not None]
        return StepResult(
            sum(r.samples for r in results),
            sum(r.loss for r in results),
            sum(r.natural for r in results),
            sum(robust) if robust else None,
        )


def _send_back(
    statistics: dict[int, tuple[Tensor, Tensor]],
    leaves: dict[int, tuple[Tensor, ...]],
    logits: Tensor | None,
    output: Tensor | None,
) -> None:
    live = [t for pair in statistics.values() for t in pair]
    seen = [t.grad for pair in leaves.values() for t in pair]
    if logits is not None and output is not None:
        live, seen = [*live, logits], [*seen, output.grad]
    pairs = [(t, g) for t, g in zip(live, seen, strict=True) if g is not None and t.requires_grad]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)


def watched_positions(graph: Graph) -> tuple[int, tuple[int, ...]]:
    """Return where the normalised input is, and the inputs of all ReLUs."""
    position = 0
    while isinstance(graph.nodes[position + 1].op, ops.Shift | ops.Scale):
        position += 1
    return position, tuple(graph.nodes[i].inputs[0] for i in graph.relus)
