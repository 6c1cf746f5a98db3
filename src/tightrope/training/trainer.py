"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tightrope.allocation import reuse_freed_memory
from tightrope.attacks import misclassified
from tightrope.devices import deterministic, forked_random, launches
from tightrope.errors import UserError
from tightrope.graph import Graph, ops, trace
from tightrope.precision import full_precision, searching
from tightrope.training.assistance import assisted
from tightrope.training.averaging import WeightAverage
from tightrope.training.batchnorm import FixedModel, evaluation_model, precise_batchnorm
from tightrope.training.checkpoints import Checkpoint, epoch_seed
from tightrope.training.distributed import Group, own_rows
from tightrope.training.initialization import initialize, pass_on
from tightrope.training.objectives import Objective, Stage
from tightrope.training.schedules import RadiusSchedule, cosine, learning_rate
from tightrope.training.settings import Settings
from tightrope.training.stages import Plan, freeze
from tightrope.training.step import Step, StepResult
from tightrope.training.teachers import frozen_teacher
from tightrope.training.tightness import check_tightness

Batch = tuple[Tensor, Tensor]


class BatchSource(Protocol):
    """Batches of a data set, anew for each pass."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...


class Progress(Protocol):
    """What the trainer tells whoever watches."""

    def step(self, epoch: int, iteration: int, result: StepResult, radius: float) -> None:
        """One iteration is done."""

    def epoch(self, record: dict[str, Any]) -> None:
        """One epoch is done; `record` is its line of history."""


@dataclass
class Totals:
    """Running sums over an epoch."""

    samples: int = 0
    loss: float = 0.0
    natural: int = 0
    robust: int | None = 0

    def add(self, result: StepResult) -> None:
        """Add one step."""
        self.samples += result.samples
        self.loss += result.loss
        self.natural += result.natural
        if self.robust is not None:
            self.robust = None if result.robust is None else self.robust + result.robust

    def over(self, group: Group | None) -> Totals:
        """Return the sums over all processes."""
        if group is None:
            return self
        samples, loss, natural, robust = group.add_numbers(
            self.samples, self.loss, self.natural, self.robust or 0
        )
        some = None if self.robust is None else round(robust)
        return Totals(round(samples), loss, round(natural), some)


class Trainer:
    """Trains a module by an objective; `run` yields one record and checkpoint per epoch.

    The processes of `group` share every batch, and are given the same ones.
    """

    def __init__(
        self,
        module: nn.Module,
        input_shape: tuple[int, ...],
        settings: Settings,
        objective: Objective,
        device: torch.device,
        group: Group | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        # Convolutions are up to twice as fast on channels-last tensors, on CPUs and GPUs.
        self.module = module.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device, self.settings, self.group = device, settings, group
        self.objective = objective
        self.graph = trace(self.module, input_shape)
        objective.check_layers(self.graph)
        objective.check(self.graph)
        self.plan = Plan.of(objective, settings.epochs)
        if settings.tightness_weight:
            check_tightness(self.graph)
        self.teacher = None if teacher is None else frozen_teacher(teacher, input_shape, device)
        if settings.initialization == "shi":
            initialize(self.graph)
        elif settings.initialization == "teacher" and teacher is not None:
            self.module.load_state_dict(teacher.state_dict())
        elif settings.initialization == "identity":
            pass_on(self.graph)
        self.optimizer = self._make_optimizer()
        self.average = WeightAverage(self.module, settings.average_from, settings.average_decay)
        self.finished = 0
        self.best = -1.0
        self.selected_epoch = -1

    @property
    def has_batchnorm(self) -> bool:
        """Whether a step needs statistics of several samples."""
        return any(isinstance(node.op, ops.BatchNorm) for node in self.graph.nodes)

    def run(
        self,
        training: BatchSource,
        validation: BatchSource | None,
        *,
        progress: Progress | None = None,
        on_epoch: Callable[[Trainer, dict[str, Any], bool], None] = lambda *_: None,
    ) -> None:
        """Train until all epochs are done, calling `on_epoch(trainer, record, selected)`."""
        settings = self.settings
        reuse_freed_memory()
        with (
            forked_random(self.device),
            full_precision(),
            deterministic(settings.deterministic),
        ):
            for epoch in range(self.finished, settings.epochs):
                torch.manual_seed(epoch_seed(settings.seed, epoch))
                if self.group is not None:
                    self.group.share_state(self.module)
                record = self._train_epoch(epoch, training, progress)
                if not math.isfinite(record["loss"]):
                    raise UserError(
                        f"training diverged in epoch {epoch + 1} (loss {record['loss']}); "
                        "lower learning_rate or the radius, or lengthen the annealing"
                    )
                record |= self._validate(epoch, record["radius"], validation)
                self.finished = epoch + 1
                selected = self._select(record)
                if progress is not None:
                    progress.epoch(record)
                on_epoch(self, record, selected)

    def _train_epoch(
        self, epoch: int, batches: BatchSource, progress: Progress | None
    ) -> dict[str, Any]:
        settings, started = self.settings, time.perf_counter()
        number, since = self.plan.place(epoch)
        if number and not since:
            self.optimizer = self._make_optimizer()
        stage = self.plan.stages[number]
        rate = self._set_learning_rate(since, stage)
        schedule = radius_schedule(settings, len(batches))
        annealing = epoch < settings.warmup_epochs + (settings.annealing_epochs or 0)
        step = self._make_step(stage, annealing)
        totals, radius = Totals(), 0.0
        self.module.train()
        for i, (x, y) in enumerate(batches):
            radius = stage.radius * schedule(epoch * len(batches) + i)
            if settings.decay == "cosine":
                self._set_learning_rate(since, stage, i / len(batches))
            step = replace(step, progress=self.plan.progress(epoch, i, len(batches)))
            helped = assisted(step, settings, self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
            with searching(settings.search_precision):
                result = helped(x, y, radius, annealing=annealing)
            if settings.clip is not None:
                nn.utils.clip_grad_norm_(self.module.parameters(), settings.clip)
            self.optimizer.step()
            self.average.update(epoch, i)
            totals.add(result)
            if progress is not None:
                progress.step(epoch, i, result, radius)
        last = epoch + 1 == settings.epochs
        averaged = last and self.average.apply()
        # What was trained is not what is evaluated: its means are of use when that is looked at.
        shifted = self.objective.trains_distances and self._settled(epoch)
        shifted = shifted and (last or settings.select != "last")
        if settings.precise_bn or averaged or shifted:
            precise_batchnorm(self.graph, batches, self.group)
        if self.group is not None:
            self.group.check_draws()
        totals = totals.over(self.group)
        return {
            "epoch": epoch,
            **({"stage": number + 1} if self.plan.several else {}),
            "radius": radius,
            "learning_rate": rate,
            "loss": totals.loss / totals.samples,
            "natural": totals.natural / totals.samples,
            "robust": None if totals.robust is None else totals.robust / totals.samples,
            "seconds": time.perf_counter() - started,
        }

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return make_optimizer(self.module, self.settings, self.objective.groups(self.graph))

    def _settled(self, epoch: int) -> bool:
        """Return whether an epoch began with the objective's ramp behind it."""
        number, since = self.plan.place(epoch)
        ramp = self.plan.stages[number].objective.ramp(since, self.plan.epochs)
        return self.plan.in_last_stage(epoch) and (ramp is None or ramp >= 1)

    def _make_step(self, stage: Stage, annealing: bool) -> Step:
        s = self.settings
        assert s.train_eps is not None
        # Methods that attack latent boxes begin once the boxes have been made small.
        return Step(
            freeze(self.graph, stage.frozen),
            stage.objective.annealing if annealing else stage.objective,
            target=float(s.train_eps) * stage.radius,
            regularizer_weight=s.regularizer_weight if self.objective.propagates_boxes else 0.0,
            l1=s.l1,
            accumulate=s.accumulate,
            natural_weight=s.natural_weight,
            group=self.group,
            teacher=self.teacher,
            tightness_weight=s.tightness_weight,
        )

    def _set_learning_rate(self, epoch: int, stage: Stage, done: float = 0.0) -> float:
        """Set the rate of an epoch of a stage, of which that part is done."""
        s = self.settings
        rate = stage.rate * s.learning_rate
        if s.decay == "cosine":
            rate = cosine(rate, (epoch + done) / self.plan.epochs)
        else:
            rate = learning_rate(rate, epoch, s.decay_epochs or (), s.decay_factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        return rate

    def _validate(self, epoch: int, radius: float, batches: BatchSource | None) -> dict[str, Any]:
        if batches is None:
            return {}
        started = time.perf_counter()
        radius = min(radius, float(self.settings.eps))
        objective = self.plan.stages[self.plan.place(epoch)[0]].objective
        given = (self.graph, objective, batches, radius)
        natural, robust = evaluate(*given, self.group, self.teacher)
        return {
            "validation_radius": radius,
            "validation_natural": natural,
            "validation_robust": robust,
            "validation_seconds": time.perf_counter() - started,
        }

    def _select(self, record: dict[str, Any]) -> bool:
        """Decide whether this epoch's weights are the ones to keep so far."""
        if self.settings.select == "last":
            selected = True
        else:
            robust = record["validation_robust"]
            score = record["validation_natural"] if robust is None else robust
            # Accuracies below the full radius do not compare with those at it, nor those of
            # earlier stages with the last one's.
            assert self.settings.train_eps is not None
            reachable = float(min(self.settings.eps, self.settings.train_eps))
            full = record["validation_radius"] >= reachable or robust is None
            score = score if full and self._settled(record["epoch"]) else -1.0
            selected = score > self.best or (self.best < 0 and score < 0)
            self.best = max(self.best, score)
        if selected:
            self.selected_epoch = record["epoch"]
        return selected

    def checkpoint(self) -> Checkpoint:
        """Return the state that resuming needs."""
        return Checkpoint(
            self.finished,
            self.module.state_dict(),
            self.optimizer.state_dict(),
            self.best,
            self.selected_epoch,
            self.average.state(),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; raises ValueError or RuntimeError if it does not fit."""
        if not 0 <= checkpoint.epoch <= self.settings.epochs:
            raise ValueError(f"{checkpoint.epoch} epochs out of {self.settings.epochs}")
        self.module.load_state_dict(checkpoint.model)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        for parameter, state in self.optimizer.state.items():
            moments = (value for name, value in state.items() if name != "step")
            if any(m.shape != parameter.shape for m in moments if isinstance(m, Tensor)):
                raise ValueError("the optimiser's state has other shapes")
        self.average.restore(checkpoint.average)
        self.finished = checkpoint.epoch
        self.best, self.selected_epoch = checkpoint.best, checkpoint.selected_epoch


@torch.no_grad()
def evaluate(
    graph: Graph,
    objective: Objective,
    batches: Iterable[Batch],
    radius: float,
    group: Group | None = None,
    teacher: Graph | None = None,
) -> tuple[float, float | None]:
    """Return natural accuracy and the accuracy that the objective considers robust."""
    totals = Totals()
    limit = objective.largest_batch(graph)
    for x, y in batches:
        for part in torch.arange(len(y)).split(limit or len(y)):
            with own_rows(group, len(part)) as rows:
                inside = slice(int(part[0]) + rows.first, int(part[0]) + rows.last)
                model = evaluation_model(graph, x[inside])
                model.teacher = teacher
                result = _evaluate(model, objective, y[inside], radius, totals)
            counted = group is None or group.counts(rows)
            totals.add(result if counted else result.uncounted())
    totals = totals.over(group)
    robust = None if totals.robust is None else totals.robust / totals.samples
    return totals.natural / totals.samples, robust


def _evaluate(
    model: FixedModel, objective: Objective, y: Tensor, radius: float, totals: Totals
) -> StepResult:
    """Evaluate some samples; once no claims about robustness are made, none are asked for."""
    natural, robust = int((~misclassified(model.logits, y)).sum()), None
    if totals.robust is not None:
        claim = objective(model, model.x, y, radius).robust
        robust = None if claim is None else int(claim.sum())
    return StepResult(len(y), 0.0, natural, robust)


def radius_schedule(settings: Settings, iterations: int) -> RadiusSchedule:
    """Return the schedule of a run with so many iterations per epoch."""
    assert settings.train_eps is not None and settings.annealing_epochs is not None
    start = settings.warmup_epochs * iterations
    end = start + settings.annealing_epochs * iterations
    kind, middle = settings.annealing, settings.annealing_middle
    return RadiusSchedule(float(settings.train_eps), start, end, kind, middle)  # type: ignore[arg-type]


def make_optimizer(
    module: nn.Module,
    settings: Settings,
    own: Mapping[Tensor, Mapping[str, float]] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimiser that the settings name; some parameters have settings of their `own`."""
    parameters = list(module.parameters())
    shared: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if any(map(launches, parameters)):
        shared["foreach"] = True  # one launch for all parameters
    groups: list[dict[str, Any]] = []
    for parameter in parameters:
        special = (own or {}).get(parameter, {})
        if not groups or {k: v for k, v in groups[-1].items() if k != "params"} != special:
            groups.append({"params": [], **special})
        groups[-1]["params"].append(parameter)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, **shared)
    shared |= {"betas": (0.9, settings.beta2), "eps": settings.optimizer_eps}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}
    return kinds[settings.optimizer](groups, **shared)
