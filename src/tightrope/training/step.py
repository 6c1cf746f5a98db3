"""One optimiser step: the clean pass, the objective, the regularisers, the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks import misclassified
from tightrope.box import Box
from tightrope.devices import forked_random
from tightrope.domains import interval
from tightrope.graph import Graph, ops
from tightrope.training import regularizers
from tightrope.training.batchnorm import (
    FixedModel,
    Statistics,
    clean_pass,
    fix,
    training_model,
    update_running,
)
from tightrope.training.distances import DistancePass
from tightrope.training.distributed import Group, own_rows
from tightrope.training.objectives import Loss, Objective
from tightrope.training.parts import PartGradients, parameters_of
from tightrope.training.tightness import lost_tightness

# The regularisers look at boxes of at least this radius: float32 cannot represent smaller ones.
REGULARIZER_RADIUS = 1e-6


@dataclass(frozen=True)
class StepResult:
    """What a step tells the log; sums over the samples of the batch."""

    samples: int
    loss: float
    natural: int
    robust: int | None

    def uncounted(self) -> StepResult:
        """Return the same about no samples: another process has counted these."""
        return StepResult(0, 0.0, 0, None if self.robust is None else 0)


@dataclass(frozen=True)
class Step:
    """Computes the gradients of a batch, or its loss alone where gradients are switched off.

    `regularizer_weight` scales Shi et al.'s regularisers while the radius is below `target`;
    `natural_weight` is the share of the clean loss; `accumulate` is the number of parts in which
    the batch is computed; `teacher` is the network that the objective learns from, if it does;
    `tightness_weight` scales what intervals lose in propagation. `progress` is what the objective
    is told of it, by default the radius as a share of `target`. With `statistics`, these are
    BatchNorm's, as constants, and the running ones where there are none. The processes of `group`
    share the batch: each gets all of it, computes its own rows, and has the gradients of the whole
    in the end.
    """

    graph: Graph
    objective: Objective
    target: float
    regularizer_weight: float = 0.0
    l1: float = 0.0
    accumulate: int = 1
    natural_weight: float = 0.0
    group: Group | None = None
    progress: float | None = None
    teacher: Graph | None = None
    tightness_weight: float = 0.0
    statistics: Statistics | None = None

    def __call__(self, x: Tensor, y: Tensor, radius: float, *, annealing: bool) -> StepResult:
        """Run the batch and leave the gradients in the parameters."""
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        weight = self.regularizer_weight * (1 - radius / self.target) if annealing else 0.0
        if self.group is not None:
            return self._shared(self.group, x, y, radius, weight)
        self.add_l1()
        if self.accumulate > 1:
            return self._in_parts(x, y, radius, weight)
        model = self._model(x)
        loss, extra = self._losses(model, y, radius, weight, regularizers.of_moments)
        value = (1 - self.natural_weight) * loss.value + extra
        _backward(value)
        return _result(model, y, radius, loss, value)

    @property
    def _own_pass(self) -> DistancePass | None:
        own = getattr(self.objective, "own_pass", None)  # a plain function has none
        return own and own(self.graph, 1.0 if self.progress is None else self.progress)

    def _model(self, x: Tensor, total: int | None = None) -> FixedModel:
        """Return the network with the statistics of this batch, of which `x` may be a part."""
        if self.statistics is None:
            own_pass = self._own_pass
            return training_model(self.graph, x, self.group, total=total, own_pass=own_pass)
        return FixedModel(fix(self.graph, self.statistics), x)

    def add_l1(self) -> None:
        """Add the gradient of the L1 term, which is no part of the loss that is reported."""
        if self.l1:
            _backward(self.l1 * regularizers.l1(self.graph))

    def _shared(
        self, group: Group, x: Tensor, y: Tensor, radius: float, weight: float
    ) -> StepResult:
        """Compute this process's rows, and add up over all processes what belongs together."""
        group.check_batch(len(x), self.accumulate)
        if self.accumulate > 1:
            result = self._in_parts(x, y, radius, weight)
        else:
            result = self._own_rows(group, x, y, radius, weight)
        if torch.is_grad_enabled():
            group.add_gradients(parameters_of(self.graph))
        self.add_l1()  # not a sum over samples: once, in every process
        return result

    def _own_rows(
        self, group: Group, x: Tensor, y: Tensor, radius: float, weight: float
    ) -> StepResult:
        """Compute the gradient of the whole batch's loss with respect to this process's rows."""
        held: list[Tensor] = []

        def hold(moments: Tensor) -> Tensor:
            held.append(moments)
            return _zero(moments)

        with own_rows(group, len(x)) as rows:
            y = y[rows.inside]
            model = self._model(x[rows.inside], len(x))
            loss, extra = self._losses(model, y, radius, weight, hold)
        terms = loss.means if loss.combine else (loss.value,)
        own = torch.cat([torch.stack([*terms, extra]), *held])
        means = group.means(own, rows.share)
        *whole, extra = means[: len(terms) + 1].unbind()
        value = (1 - self.natural_weight) * (loss.combine or _same)(*whole) + extra
        if held:
            value = value + weight * regularizers.of_moments(means[len(terms) + 1 :])
        _backward(value)
        return _result(model, y, radius, loss, value)

    def _losses(
        self,
        model: FixedModel,
        y: Tensor,
        radius: float,
        weight: float,
        regularizer: Callable[[Tensor], Tensor],
    ) -> tuple[Loss, Tensor]:
        """Return the objective's loss, and what is added to it: a mean over the samples."""
        input_position, relu_inputs = watched_positions(model.graph)
        weight = weight if relu_inputs else 0.0
        model.progress = radius / self.target if self.progress is None else self.progress
        model.teacher = self.teacher
        if weight:
            model.watched = (input_position, *relu_inputs)
        if radius == 0:
            loss = Loss(F.cross_entropy(model.logits, y))
        else:
            loss = self.objective(model, model.x, y, radius)
        extra = loss.value.new_zeros(())
        if self.natural_weight:
            extra = extra + self.natural_weight * F.cross_entropy(model.logits, y)
        if self.tightness_weight:
            extra = extra + self.tightness_weight * lost_tightness(model, y).mean()
        if weight:
            wide_enough = radius >= REGULARIZER_RADIUS and loss.boxes
            boxes = loss.boxes if wide_enough else self._boxes(model, radius)
            watched = [boxes[i] for i in relu_inputs]
            moments = regularizers.batch_moments(boxes[input_position], watched)
            extra = extra + weight * regularizer(moments)
        return loss, extra

    def _boxes(self, model: FixedModel, radius: float) -> dict[int, Box]:
        """Return the boxes of a ball that the objective gives none of, as it would propagate it."""
        box = Box.ball(model.x, max(radius, REGULARIZER_RADIUS))
        rules = self.objective.rules
        return interval.bounds(model.graph, box, keep=model.watched, rules=rules)[1]

    def _in_parts(self, x: Tensor, y: Tensor, radius: float, weight: float) -> StepResult:
        """Accumulate gradients over parts that share the statistics of the whole batch.

        The statistics and clean outputs become leaves, whose gradients add up over the parts
        and are sent through the clean pass in the end: exactly the gradient of the whole.
        """
        total, slices = len(x), list(_slices(len(x), self.accumulate))
        rows = torch.arange(total)
        if self.group is not None:
            x, y, rows = (_own_parts(t, slices, self.group) for t in (x, y, rows))
        statistics, outputs = self._whole_pass(x, rows, total)
        leaves = {
            i: (m.detach().requires_grad_(), v.detach().requires_grad_())
            for i, (m, v) in statistics.items()
        }
        ends = {i: value.detach().requires_grad_() for i, value in outputs.items()}
        last = len(self.graph.nodes) - 1

        def parts() -> Iterator[tuple[FixedModel, Tensor, float]]:
            end = 0
            for part in slices:
                with own_rows(self.group, part.stop - part.start) as rows:
                    inside = slice(end, end := end + rows.last - rows.first)
                    fixed = fix(self.graph, self.statistics or leaves)
                    values = {i: value[inside] for i, value in ends.items()}
                    model = FixedModel(fixed, x[inside], values.get(last), values=values)
                    yield model, y[inside], len(y[inside]) / total

        regularizer = self._linear_regularizer(parts(), radius, weight) if weight else _zero
        inputs = [t for pair in leaves.values() for t in pair] + [*ends.values()]
        gradients = PartGradients([*parameters_of(self.graph), *inputs], self.group)
        results = []
        for model, labels, share in parts():
            loss, extra = self._losses(model, labels, radius, weight, regularizer)
            gradients.add(loss, extra, 1 - self.natural_weight, share)
            results.append(_result(model, labels, radius, loss, loss.value))
        value = gradients.finish()
        live = [t for pair in statistics.values() for t in pair] + [*outputs.values()]
        _send_back(live, inputs)
        robust = [r.robust for r in results if r.robust is not None]
        return StepResult(
            len(x), value * len(x), sum(r.natural for r in results), sum(robust) if robust else None
        )

    def _whole_pass(
        self, x: Tensor, rows: Tensor, total: int
    ) -> tuple[Statistics, dict[int, Tensor]]:
        """Run the clean pass over the whole batch, and update running statistics."""
        if self.statistics is not None:
            return {}, {}
        if own_pass := self._own_pass:
            return {}, own_pass(self.graph, x, rows, total, self.group)
        statistics, logits = clean_pass(self.graph, x, self.group)
        update_running(self.graph, statistics, total)
        return statistics, {} if logits is None else {len(self.graph.nodes) - 1: logits}

    def _linear_regularizer(
        self, parts: Iterable[tuple[FixedModel, Tensor, float]], radius: float, weight: float
    ) -> Callable[[Tensor], Tensor]:
        """Return the regulariser as a linear function of a part's moments.

        It is a function of means over the whole batch, so these are taken first. Attacks draw
        the same random points again when the parts are computed for good.
        """
        total: list[Tensor] = []

        def collect(moments: Tensor, share: float) -> Tensor:
            total.append(moments * share)
            return moments.sum()

        with torch.no_grad(), forked_random(parameters_of(self.graph)[0].device):
            for model, y, share in parts:
                self._losses(model, y, radius, weight, partial(collect, share=share))
        if not total:
            return _zero
        whole = torch.stack(total).sum(0)
        if self.group is not None:
            self.group.add(whole)
        with torch.enable_grad():
            moments = whole.requires_grad_()
            value = regularizers.of_moments(moments)
            (slope,) = torch.autograd.grad(value, moments)
        offset = (value - moments @ slope).detach()
        return lambda part: part @ slope + offset


def _backward(value: Tensor) -> None:
    """Leave the gradients in the parameters, unless they are switched off or there are none."""
    if value.requires_grad:
        value.backward()


def _zero(moments: Tensor) -> Tensor:
    return moments.new_zeros(())


def _same(value: Tensor) -> Tensor:
    return value


def _slices(samples: int, parts: int) -> Iterator[slice]:
    for part in torch.arange(samples).tensor_split(parts):
        if len(part):
            yield slice(int(part[0]), int(part[-1]) + 1)


def _own_parts(t: Tensor, slices: Iterable[slice], group: Group) -> Tensor:
    """Return this process's rows of each part of a batch, one part after the other."""
    parts = (t[part] for part in slices)
    return torch.cat([part[group.rows(len(part)).inside] for part in parts])


def _result(model: FixedModel, y: Tensor, radius: float, loss: Loss, value: Tensor) -> StepResult:
    with torch.no_grad():
        right = (~misclassified(model.logits.detach(), y)).sum()
        claimed = right if loss.robust is None else loss.robust.sum()
        # One look at all numbers: on a GPU each would be a wait.
        seen = torch.stack([value.detach().double(), right.double(), claimed.double()]).tolist()
    natural = int(seen[1])
    robust = natural if radius == 0 else None if loss.robust is None else int(seen[2])
    return StepResult(len(y), seen[0] * len(y), natural, robust)


def _send_back(live: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
    """Send the gradients of leaves through what they were cut off from."""
    pairs = [
        (t, leaf.grad)
        for t, leaf in zip(live, leaves, strict=True)
        if leaf.grad is not None and t.requires_grad
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)


def watched_positions(graph: Graph) -> tuple[int, tuple[int, ...]]:
    """Return where the normalised input is, and the inputs of all ReLUs."""
    position = 0
    while isinstance(graph.nodes[position + 1].op, ops.Shift | ops.Scale):
        position += 1
    return position, tuple(graph.nodes[i].inputs[0] for i in graph.relus)
