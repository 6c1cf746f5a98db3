"""A training step of SortNet beside the same distances without powers or gradients.

    python benchmarks/distances.py [--width 1024] [--depth 5] [--batch 128]

Processor seconds of one thread. The reference is a compiled `max_j |x_j - w_j|` for every sample
and every row of all layers, of which the terms per second are reported; a step is the pass by
powers, its gradients and the optimiser. With `keep` below 100 a step leaves terms out; the
ratio is to all of them.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()

import numpy as np
import torch
from torch import Tensor

from tightrope import nets
from tightrope.graph import trace
from tightrope.graph.work import products
from tightrope.nets.powers_kernel import compiled
from tightrope.training.distances import distance_layers
from tightrope.training.objectives import SortNet
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import make_optimizer

INPUT, CLASSES = (1, 28, 28), 10
PROGRESS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


def main() -> None:
    """Print a line for each power and share of kept inputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("width", 1024), ("depth", 5), ("batch", 128), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.rand(asked.batch, *INPUT), torch.randint(CLASSES, (asked.batch,))
    print(f"width {asked.width}, depth {asked.depth}, batch {asked.batch}, one thread")
    print(f"{'keep':>5} {'r':>5} {'power':>7} {'reference':>10} {'step':>8} {'ratio':>6}")
    for keep in (100, 70):
        sizes = {"width": asked.width, "depth": asked.depth, "keep": keep}
        net = nets.build("sortnet", INPUT, CLASSES, normalize=((0.13,), (0.31,)), **sizes)
        graph = trace(net, INPUT)
        optimizer = make_optimizer(net, Settings(optimizer="adamw"))
        for progress in PROGRESS:
            step = Step(graph, SortNet(), 0.3, progress=progress)

            train = partial(whole_step, step, optimizer, x, y)
            layers = [graph.nodes[i].op.weight.detach() for i in distance_layers(graph)]
            taken, reference = turns(asked.repeat, train, partial(largest, x, layers))
            power = step.objective.own_pass(graph, progress).power
            print(f"{keep:5} {progress:5.2f} {power:7.0f} {reference:9.3f}s {taken:7.3f}s "
                  f"{taken / reference:6.2f}")  # fmt: skip
    terms = asked.batch * products(graph.nodes)
    print(f"reference: {terms / reference / 1e9:.1f} thousand million terms per second")


def whole_step(step: Step, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Run a batch and the optimiser."""
    optimizer.zero_grad(set_to_none=True)
    step(x, y, 0.3, annealing=False)
    optimizer.step()


def largest(x: Tensor, layers: list[Tensor]) -> None:
    """Compute the largest differences of all layers, for inputs of their sizes."""
    value = x.flatten(1).numpy()
    for weight in layers:
        found = np.empty((len(value), len(weight)), np.int32)
        gaps = np.empty(weight.shape[1], np.float32)
        largest_gaps(value, weight.numpy(), gaps, gaps.view(np.int32), found)
        value = found.view(np.float32)


@compiled
def largest_gaps(x: Any, weight: Any, gaps: Any, bits: Any, found: Any) -> None:
    """Find largest differences as the largest whole numbers of their bits: that is the fastest."""
    for o in range(len(weight)):
        row = weight[o]
        for i in range(len(x)):
            point = x[i]
            for j in range(len(row)):
                gaps[j] = abs(point[j] - row[j])
            most = bits[0]
            for j in range(len(row)):
                most = max(most, bits[j])
            found[i, o] = most


def turns(repeat: int, *functions: Callable[[], None]) -> list[float]:
    """Return the least processor seconds of each function, which are called in turn."""
    best = [float("inf")] * len(functions)
    for function in functions:
        function()  # compiles
    for _ in range(repeat):
        for i, function in enumerate(functions):
            before = seconds()
            function()
            best[i] = min(best[i], seconds() - before)
    return best


def seconds() -> float:
    """Return the processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
