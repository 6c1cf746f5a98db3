"""What one strict CROWN pass proves: is it answered in hardly more than that pass?

    python benchmarks/easy.py [--only NAME] [--radius 1e-3] [--times 3] [--threads 2]

Networks of several families (random weights; nothing here was tuned to them), each with the largest
radius at which one pass of linear bounds of all layers, in float64 and with every rounding error
accounted for, proves the prediction: what is cheaper than that pass has mostly failed there. For
large networks, where looking for it takes long, `--radius` gives one.
Prints the pass' seconds, those of `tr.verify` of the traced network (first and best of several
calls), the stage that proved it, and what the best is beyond one and a half passes and 0.2 s
(negative is good).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
from crown import Case, ours
from torch import Tensor, nn

import tightrope as tr
from tightrope import nets
from tightrope.answer import Verdict
from tightrope.certification.properties import Ball
from tightrope.certification.subjects import Subject

PASSES, MORE = 1.5, 0.2


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return a multilayer perceptron."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
# name: input shape, network
FAMILIES: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "dense 2x50, 5 inputs": ((5,), lambda: dense(5, 50, 50, 5)),
    "dense 4x256": (MNIST, lambda: dense(784, *[256] * 4, 10)),
    "dense 9x200": (MNIST, lambda: dense(784, *[200] * 9, 10)),
    "dense 2x2000": (MNIST, lambda: dense(784, 2000, 2000, 10)),
    "sigmoid 3x100": (MNIST, lambda: dense(784, *[100] * 3, 10, activation=nn.Sigmoid)),
    "gelu 3x100": (MNIST, lambda: dense(784, *[100] * 3, 10, activation=nn.GELU)),
    "cnn3": (MNIST, lambda: nets.build("cnn3", MNIST, 10)),
    "cnn5 CIFAR": (CIFAR, lambda: nets.build("cnn5", CIFAR, 10)),
    "cnn7 width 16": (MNIST, lambda: nets.build("cnn7", MNIST, 10, width=16, hidden=128)),
    "cnn7 width 64": (MNIST, lambda: nets.build("cnn7", MNIST, 10)),
    "resnet CIFAR": (CIFAR, lambda: nets.build("resnet", CIFAR, 10)),
}


def case_of(name: str, radius: float) -> Case:
    """Return a random network and a ball around a random input."""
    shape, build = FAMILIES[name]
    torch.manual_seed(0)
    module = build().eval()
    subject = Subject.of(module, shape)
    x = torch.rand(1, *shape)
    return Case(name, subject, Ball(x, radius).outer(), int(subject.predict(x)[0]))


def largest_radius(name: str) -> float:
    """Return the largest radius, up to a factor of 1.1, that one strict pass proves."""

    def proves(radius: float) -> bool:
        case = case_of(name, radius)
        with torch.no_grad():
            return bool((ours(case.subject.exact, case, torch.float64)() > 0).all())

    radius = 1e-6
    while radius < 1 and proves(radius * 8):
        radius *= 8
    for factor in (2.0**1.5, 2.0**0.75, 1.3, 1.1):
        radius *= factor if proves(radius * factor) else 1.0
    return radius


def least(times: int, run: Callable[[], object]) -> tuple[float, float]:
    """Return the first and the least seconds."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds[0], min(seconds)


def measure(name: str, times: int, radius: float) -> float:
    """Print a line; return the seconds that the answer came late."""
    case = case_of(name, radius)
    x: Tensor = (case.box.lower + case.box.upper).float()[0] / 2
    answers: list[tr.Answer] = []
    with torch.no_grad():
        _, one_pass = least(times, ours(case.subject.exact, case, torch.float64))
    first, best = least(
        times,
        lambda: answers.append(tr.verify(case.subject.graph, x, case.label, eps=radius)),
    )
    answer = answers[-1]
    over = best - PASSES * one_pass - MORE
    print(
        f"{name:22} {radius:10.2e} {one_pass:8.3f} {first:8.3f} {best:8.3f} "
        f"{answer.verdict!s:>9} {answer.stage:>10} {over:8.3f}",
        flush=True,
    )
    if answer.verdict is not Verdict.VERIFIED:
        raise SystemExit(f"{name}: one pass proves it, verify answers {answer.verdict}")
    return over


def main() -> None:
    """Measure all families."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--radius", type=float, help="instead of the largest that a pass proves")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    heads = ("network", "radius", "pass s", "first s", "best s", "answer", "by", "late s")
    print("{:22} {:>10} {:>8} {:>8} {:>8} {:>9} {:>10} {:>8}".format(*heads))
    chosen = [name for name in FAMILIES if options.only in name]
    late = [measure(n, options.times, options.radius or largest_radius(n)) for n in chosen]
    print(f"{sum(value > 0 for value in late)} of {len(late)} late")


if __name__ == "__main__":
    main()
