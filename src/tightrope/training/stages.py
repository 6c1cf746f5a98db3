"""Trainings in stages: each begins anew, on a network whose first layers are done."""

from __future__ import annotations

from dataclasses import dataclass

from tightrope.graph import Graph
from tightrope.training.objectives import Objective, Stage


@dataclass(frozen=True)
class Plan:
    """The stages of a training; most trainings are one stage.

    Where a training stands follows from the number of its epoch, so a checkpoint needs no more.
    """

    stages: tuple[Stage, ...]
    epochs: int  # of each stage; the last has what is left over, too

    @classmethod
    def of(cls, objective: Objective, epochs: int) -> Plan:
        """Divide the epochs among the stages of an objective."""
        stages = objective.stages or (Stage(objective),)
        return cls(stages, epochs // len(stages))

    @property
    def several(self) -> bool:
        """Whether there is more than one stage."""
        return len(self.stages) > 1

    def place(self, epoch: int) -> tuple[int, int]:
        """Return the number of an epoch's stage, and that of the epoch in it, both from zero."""
        number = min(epoch // self.epochs, len(self.stages) - 1)
        return number, epoch - number * self.epochs

    def in_last_stage(self, epoch: int) -> bool:
        """Return whether an epoch belongs to the last stage."""
        return self.place(epoch)[0] == len(self.stages) - 1

    def progress(self, epoch: int, iteration: int, iterations: int) -> float | None:
        """Return how much of its stage's mixing is done before an iteration of an epoch.

        Without mixing, objectives may have a ramp of their own.
        """
        number, since = self.place(epoch)
        share = self.stages[number].mix
        if share is None:
            time = since + iteration / iterations
            return self.stages[number].objective.ramp(time, self.epochs)
        mixing = share * self.epochs * iterations
        done = since * iterations + iteration
        return 1.0 if done >= mixing else done / mixing


def freeze(graph: Graph, relus: int) -> Graph:
    """Return the graph with the layers up to so many ReLUs cut off from their gradients.

    The weights are the same tensors, so who holds the whole graph sees every step.
    """
    if not relus:
        return graph
    before, _ = graph.split(len(graph.relus) - relus)
    return graph.replace_ops({i: node.op for i, node in enumerate(before.detach().nodes)})
