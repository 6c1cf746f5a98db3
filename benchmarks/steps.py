"""The cost of a training step by method, relative to a standard step in the same process.

    python benchmarks/steps.py [--net cnn3|cnn7] [--rounds 15]

Each round times every method once, in turn, so that a slow moment of the machine hits all of
them; the ratio is that of the medians. Loading the batches is included. All methods start from a
network that IBP has annealed to the radius, since the work of the latent attacks depends on the
state of the network. Peak memory is what the process needed while the method ran.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
from networks import BATCH, RADIUS, State, annealed_state, build, endless

from tightrope.allocation import reuse_freed_memory
from tightrope.graph import trace
from tightrope.training.assistance import assisted
from tightrope.training.objectives import (
    ADCERT,
    CROWNIBP,
    IBP,
    MTLIBP,
    PGD,
    SABR,
    STAPS,
    TAPS,
    CCDist,
    Objective,
    Standard,
)
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import make_optimizer

NETS = ("cnn3", "cnn7")
ROUNDS = {"cnn3": 15, "cnn7": 5}  # a step of CNN3 is short, so one slow moment weighs more


def methods(net: str) -> dict[str, Objective]:
    """The methods to measure."""
    deep = 2 if net == "cnn3" else 3
    return {
        "standard": Standard(),
        "ibp": IBP(),
        "crown-ibp, margins": CROWNIBP(end_beta=0.5),
        "crown-ibp, fused": CROWNIBP(end_beta=0.5, loss="fused"),
        "pgd, 10 steps": PGD(steps=10),
        "sabr, 8 steps": SABR(steps=8),
        "mtl-ibp, 10 steps": MTLIBP(steps=10),
        "ad-cert, 10 steps": ADCERT(steps=10),
        "cc-dist, 10 steps": CCDist(steps=10),
        "taps, 1 ReLU": TAPS(classifier_relus=1, steps=20),
        f"taps, {deep} ReLUs": TAPS(classifier_relus=deep, steps=20),
        "staps, 1 ReLU": STAPS(classifier_relus=1, steps=20, attack_steps=10),
    }


# What can be put around a step: here around IBP's.
HELPERS = {
    "ibp, sam": {"sam_rho": 0.05},
    "ibp, edac": {"edac_weight": 0.3},
    "ibp, rgs, 1 pair": {"smoothing": "rgs", "smoothing_pairs": 1},
    "ibp, pgpe, 1 pair": {"smoothing": "pgpe", "smoothing_pairs": 1},
    "ibp, tightness": {"tightness_weight": 1e-4},
}


def plain_step(net: str, state: State) -> Callable[[], None]:
    """A standard step written in plain PyTorch, to see that ours is not slow to begin with."""
    dataset, module = build(net)
    module.load_state_dict(state.network)
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


def our_step(
    net: str, objective: Objective, state: State, settings: Settings | None = None
) -> Callable[[], None]:
    dataset, module = build(net)
    module.load_state_dict(state.network)
    graph = trace(module, dataset.input_shape)
    batches = endless(dataset.training_batches(BATCH[net], drop_last=True))
    settings = settings or Settings()
    optimizer = make_optimizer(module, settings)
    optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    weight = settings.tightness_weight
    teacher = graph.fold_batchnorm().map_tensors(lambda t: t.detach().clone())
    plain = Step(graph, objective, target=RADIUS, teacher=teacher, tightness_weight=weight)
    step = assisted(plain, settings, optimizer)

    def run() -> None:
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        step(x, y, RADIUS, annealing=False)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 10.0)
        optimizer.step()

    return run


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
    state = annealed_state(net)
    steps = {"plain PyTorch": plain_step(net, state)}
    steps |= {name: our_step(net, objective, state) for name, objective in methods(net).items()}
    for name, given in HELPERS.items():
        steps[name] = our_step(net, IBP(), state, Settings.parse(given))
    times: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, float] = {}
    quick = ("plain PyTorch", "standard", "ibp")
    for name, run in steps.items():
        run()  # warm-up
        reset_peak()
        run()
        memory[name] = peak_megabytes()
    for _ in range(rounds):
        for name, run in steps.items():
            repeats = 5 if net == "cnn3" and name in quick else 1
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            times[name].append((time.perf_counter() - started) / repeats)
    base = statistics.median(times["standard"])
    print(f"{net} with BatchNorm, MNIST, batch {BATCH[net]}, {torch.get_num_threads()} threads")
    print(f"  {'step':<20}{'ms':>9}{'ratio':>8}{'peak MB':>9}")
    for name in steps:
        median = statistics.median(times[name])
        print(f"  {name:<20}{1000 * median:9.1f}{median / base:8.2f}{memory[name]:9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, action="append")
    parser.add_argument("--rounds", type=int, help=f"by default {ROUNDS}")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    reuse_freed_memory()  # as the trainer does
    for net in arguments.net or NETS:
        measure(net, arguments.rounds or ROUNDS[net])


if __name__ == "__main__":
    main()
