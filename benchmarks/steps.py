"""The cost of a training step by method, relative to a standard step in the same process.

    python benchmarks/steps.py [--net cnn3|cnn7] [--rounds 5]

Each round times every method once, in turn, so that a slow moment of the machine hits all of
them; the ratio is that of the medians. Loading the batches is included. Peak memory is what the
process needed while the method ran.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tightrope import data, nets
from tightrope.graph import trace
from tightrope.training.initialization import initialize
from tightrope.training.memory import reuse_freed_memory
from tightrope.training.objectives import IBP, PGD, Objective, Standard
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import make_optimizer

BATCH = {"cnn3": 256, "cnn7": 64}
METHODS: dict[str, Objective] = {"standard": Standard(), "ibp": IBP(), "pgd-10": PGD(steps=10)}


def endless(batches: data.Batches) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


def plain_step(net: str) -> Callable[[], None]:
    """A standard step written in plain PyTorch, to see that ours is not slow to begin with."""
    dataset, module = build(net)
    batches = endless(dataset.training_batches(BATCH[net], drop_last=True))
    optimizer = torch.optim.Adam(module.parameters(), lr=5e-4)

    def run() -> None:
        x, y = next(batches)
        x = x.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(module(x), y).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 10.0)
        optimizer.step()

    return run


def our_step(net: str, objective: Objective) -> Callable[[], None]:
    dataset, module = build(net)
    graph = trace(module, dataset.input_shape)
    initialize(graph)
    batches = endless(dataset.training_batches(BATCH[net], drop_last=True))
    optimizer = make_optimizer(module, Settings())
    step = Step(graph, objective, target=0.1)

    def run() -> None:
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        step(x, y, 0.1, annealing=False)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 10.0)
        optimizer.step()

    return run


def build(net: str) -> tuple[data.Dataset, torch.nn.Module]:
    dataset = data.load_dataset("mnist")
    torch.manual_seed(0)
    normalize = (dataset.mean, dataset.std)
    module = nets.build(net, dataset.input_shape, 10, normalize=normalize)
    return dataset, module.train().to(memory_format=torch.channels_last)


def reset_peak() -> None:
    gc.collect()
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float:
    if not Path("/proc/self/status").exists():
        return float("nan")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def measure(net: str, rounds: int) -> None:
    steps = {"plain PyTorch": plain_step(net)}
    steps |= {name: our_step(net, objective) for name, objective in METHODS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, float] = {}
    repeats = 5 if net == "cnn3" else 1
    for name, run in steps.items():
        run()  # warm-up
        reset_peak()
        run()
        memory[name] = peak_megabytes()
    for _ in range(rounds):
        for name, run in steps.items():
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            times[name].append((time.perf_counter() - started) / repeats)
    base = statistics.median(times["standard"])
    print(f"{net} with BatchNorm, MNIST, batch {BATCH[net]}, {torch.get_num_threads()} threads")
    print(f"  {'step':<16}{'ms':>9}{'ratio':>8}{'peak MB':>9}")
    for name in steps:
        median = statistics.median(times[name])
        print(f"  {name:<16}{1000 * median:9.1f}{median / base:8.2f}{memory[name]:9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=sorted(BATCH), action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reuse_freed_memory()  # as the trainer does
    for net in arguments.net or sorted(BATCH):
        measure(net, arguments.rounds)


if __name__ == "__main__":
    main()
