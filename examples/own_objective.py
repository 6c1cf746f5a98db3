"""A training method of one's own, compared with IBP on equal terms.

The method is a frozen dataclass with a name and a call; nothing in the package is changed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import tightrope as tr
from tightrope.cli.compare import print_comparison
from tightrope.domains import interval
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import METHODS
from tightrope.training.objectives.base import certified
from tightrope.training.parsing import number, setting


@dataclass(frozen=True)
class HingeIBP(tr.Objective):
    """Hinge loss of interval bounds: margins above a target are good enough."""

    name: ClassVar[str] = "hinge-ibp"
    summary: ClassVar[str] = "hinge loss of the worst margin under interval bounds"
    propagates_boxes: ClassVar[bool] = True

    target: float = setting(3.0, number(0, strict=True), "margin that is good enough")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> tr.Loss:
        """Return the mean of `max(0, target - worst margin)`."""
        box = tr.Box.ball(x, radius)
        margins, boxes = interval.margins(model.graph, box, y, keep=model.watched)
        worst = margins.scatter(1, y[:, None], torch.inf).amin(1)
        value = (self.target - worst).relu().mean()
        return tr.Loss(value, certified(margins, y), boxes=boxes)


def compare(out: Path, *, samples: int = 500, seeds: int = 1, **settings: Any) -> tr.Comparison:
    """Train and certify IBP and the new method with the same settings and seeds."""
    METHODS[HingeIBP.name] = HingeIBP
    methods = ("ibp", HingeIBP.name)
    return tr.compare(methods, out=out, samples=samples, seeds=seeds, **settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/own-objective"))
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    print_comparison(compare(arguments.out, epochs=arguments.epochs, train_samples=10000, eps=0.1))
