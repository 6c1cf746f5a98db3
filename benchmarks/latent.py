"""What each trick of the latent attack brings.

    python benchmarks/latent.py [--net tiny|cnn3|cnn7] [--rounds 3]

The textbook loop evaluates every estimator in every step by autograd. The rows below it are our
attack, with more and more of its tricks: points at rest leave; pieces that suit the processor;
changes are followed through the network, after the steps in which most coordinates move; a large
last layer is narrowed to what can flip; small classifiers are reduced to what can change. The last
row is what the attack chooses by itself. The last column is the largest difference of the margins
found, from the same starting points.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from unittest.mock import patch

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
from networks import BATCH, RADIUS, annealed_state, build
from torch import Tensor

from tightrope.allocation import reuse_freed_memory
from tightrope.attacks import attack_margins, latent_steps, wrong_classes
from tightrope.attacks.kernels import chains, last_layer
from tightrope.box import Box
from tightrope.domains import interval
from tightrope.graph import Graph, trace
from tightrope.training.objectives.propagation import estimated_margins

STEPS = latent_steps(20)
CASES = {"tiny": (1,), "cnn3": (1, 2), "cnn7": (1, 3)}
SAMPLES = {"tiny": 256, "cnn3": 256, "cnn7": 16}
NEVER = 1 << 60


def textbook(classifier: Graph, box: Box, labels: Tensor, start: Tensor) -> Tensor:
    """The latent attack as the paper describes it, all estimators in one batch."""
    targets = wrong_classes(labels, classifier.output_shape[0])
    count = targets.shape[1]
    lower, upper = (t.repeat_interleave(count, 0) for t in box.corners)
    points, rows = start.flatten(0, 1), torch.arange(len(labels) * count)
    labels, targets = labels.repeat_interleave(count), targets.flatten()
    best, best_score = points.clone(), torch.full((len(points),), -torch.inf)
    for size in [*STEPS.sizes(), None]:
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            logits = classifier(points)
            score = logits[rows, targets] - logits[rows, labels]
            (gradient,) = torch.autograd.grad(score.sum(), points)
        better = score.detach() > best_score
        best[better], best_score[better] = points.detach()[better], score.detach()[better]
        if size is not None:
            moved = points.detach() + size / 2 * (upper - lower) * gradient.sign()
            points = torch.minimum(torch.maximum(moved, lower), upper)
    return best.unflatten(0, start.shape[:2])


def variants() -> dict[str, Callable[[Graph, Box, Tensor, Tensor], Tensor]]:
    """The textbook loop and ours."""

    def ours(
        limits: Mapping[tuple[object, str], int] = MappingProxyType({}), **options: object
    ) -> Callable[[Graph, Box, Tensor, Tensor], Tensor]:
        def run(classifier: Graph, box: Box, labels: Tensor, start: Tensor) -> Tensor:
            with ExitStack() as patches:
                for (module, name), limit in limits.items():
                    patches.enter_context(patch.object(module, name, limit))
                return attack_margins(classifier, box, labels, steps=STEPS, start=start, **options)

        return run

    followed = {(chains, "LARGEST_REDUCED"): 0}
    return {
        "textbook": textbook,
        "plain, one piece": ours(plain=True, memory=1 << 40),
        "plain": ours(plain=True),
        "changes after full steps": ours({**followed, (last_layer, "SMALLEST"): NEVER}),
        "last layer narrowed": ours(followed),
        "ours": ours(),
    }


def measure(net: str, rounds: int) -> None:
    dataset, module = build(net)
    module.load_state_dict(annealed_state(net).network)
    graph = trace(module.eval(), dataset.input_shape).detach().fold_batchnorm()
    x, y = next(iter(dataset.training_batches(BATCH[net], drop_last=True)))
    x, y = x[: SAMPLES[net]].contiguous(memory_format=torch.channels_last), y[: SAMPLES[net]]
    for relus in CASES[net]:
        extractor, classifier = graph.split(relus)
        with torch.no_grad():
            box = interval.bounds(extractor, Box.ball(x, RADIUS))[0]
            box = Box(box.lower, box.upper)
            start = box.sample(9)
            print(f"{net}, {relus} classifier ReLUs, {len(y)} samples")
            print(f"  {'attack':<26}{'ms':>9}{'speed-up':>10}{'difference':>12}")
            reference, base = None, 0.0
            for name, run in variants().items():
                times = []
                run(classifier, box, y, start)  # warm-up
                for _ in range(rounds):
                    started = time.perf_counter()
                    points = run(classifier, box, y, start)
                    times.append(time.perf_counter() - started)
                margins = estimated_margins(classifier, points, y)
                if reference is None:
                    reference, base = margins, statistics.median(times)
                median = statistics.median(times)
                gap = float((margins - reference).abs().max())
                print(f"  {name:<26}{1000 * median:9.1f}{base / median:10.2f}{gap:12.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=sorted(CASES), action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reuse_freed_memory()
    for net in arguments.net or CASES:
        measure(net, arguments.rounds)


if __name__ == "__main__":
    main()
