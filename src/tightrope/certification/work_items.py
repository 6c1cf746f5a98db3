"""What certification hands out: batches of samples, samples that are left of one, half a search.

Everything here is picklable and complete: whoever gets it needs nothing else but the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tightrope.answer import Answer
from tightrope.box import Box
from tightrope.certification.cascade import Alone
from tightrope.certification.problem import OpenProblem
from tightrope.certification.search.branch_and_bound import BranchAndBound
from tightrope.domains.linear.crown import ALPHA, CROWN, CROWN_FORMS, CROWN_IBP
from tightrope.runs.journal import Record

_EFFORTS = (None, CROWN_IBP, CROWN_FORMS, CROWN, ALPHA)  # told apart by identity


@dataclass(frozen=True)
class Batch:
    """Samples to decide together. `origin` tells one attempt at them from another."""

    indices: np.ndarray
    x: np.ndarray
    labels: np.ndarray
    known: frozenset[int] = frozenset()  # samples that have a record already
    origin: int = 0

    def __str__(self) -> str:
        return f"samples {self.indices[0]} to {self.indices[-1]}"

    @property
    def samples(self) -> Batch:
        """All samples that it is about."""
        return self

    def some(self, indices: list[int]) -> Batch:
        """Return some of the samples."""
        chosen = np.isin(self.indices, indices)
        return Batch(self.indices[chosen], self.x[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Left:
    """What the common stages found out about a sample that they did not decide."""

    index: int
    seed: int
    times: dict[str, float]
    nodes: Mapping[int, Box] | None
    settled: dict[int, Box]
    bound: float | None
    effort: int
    last: Answer

    @classmethod
    def of(cls, index: int, alone: Alone) -> Left:
        """Write down what is known."""
        opened = alone.opened
        effort = next(i for i, known in enumerate(_EFFORTS) if known is opened.effort)
        return cls(
            index,
            alone.seed,
            opened.times,
            None if opened.nodes is None else dict(opened.nodes),
            opened.settled,
            opened.bound,
            effort,
            opened.last,
        )

    def restored(self, position: int, opened: OpenProblem) -> Alone:
        """Return the problem as it was left."""
        known: dict[str, Any] = {
            name: getattr(self, name) for name in ("times", "nodes", "settled", "bound", "last")
        }
        return Alone(position, replace(opened, **known, effort=_EFFORTS[self.effort]), self.seed)


@dataclass(frozen=True)
class Rest:
    """Samples that are left of a batch, each to go on by itself."""

    samples: Batch
    left: list[Left]
    origin: int = 0

    def __str__(self) -> str:
        return str(self.samples)


@dataclass(frozen=True)
class Part:
    """Half of the search of one sample, and the seconds that it may take."""

    sample: Batch
    family: int  # the origin of the item whose search it is a part of
    search: BranchAndBound
    seconds: float

    @property
    def index(self) -> int:
        """The sample."""
        return int(self.sample.indices[0])

    def __str__(self) -> str:
        return f"sample {self.index}"


Portion = Batch | Rest | Part


@dataclass(frozen=True)
class Partial:
    """A message: what came of a part of a sample's search. The `root` is what gave away others."""

    record: Record
    family: int
    root: bool


@dataclass(frozen=True)
class Point:
    """A message: a counterexample, for whoever writes files; its record follows."""

    index: int
    content: bytes = field(repr=False)
