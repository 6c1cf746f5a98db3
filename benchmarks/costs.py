"""Hours of the paper's five settings, predicted from what a step asks for.

    python benchmarks/costs.py --measure --out docs/results/costs   # counts, several minutes
    python benchmarks/costs.py --out docs/results/costs             # predicts with these counts

One step of each setting, with the paper's network, is counted at small batches and few steps of the
latent attack (kernels, floating-point operations, bytes), and carried over to the batch and the
steps of the preset: all of it is linear in both. A device is its data sheet and the assumptions
below; the time of a kernel is the longest of computing, moving bytes and being started. No GPU was
at hand: these are predictions, to be compared with the hours that the paper reports.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
from counting import Bill, as_on_a_gpu, combined, counted
from torch import nn

from tightrope import nets
from tightrope.graph import ops, trace
from tightrope.training.initialization import initialize
from tightrope.training.objectives import Objective, Standard
from tightrope.training.presets import load_preset
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import make_optimizer


@dataclass(frozen=True)
class Card:
    """What a data sheet says: single precision without tensor cores, and memory."""

    name: str
    flops: float
    bandwidth: float


RTX_3090 = Card("RTX 3090", 35.6e12, 936e9)
TITAN_RTX = Card("TITAN RTX", 16.3e12, 672e9)
A100 = Card("A100", 19.5e12, 2039e9)
H100 = Card("H100", 66.9e12, 3350e9)
CARDS = (RTX_3090, TITAN_RTX, A100, H100)

# Assumed, not measured: what kernels reach of a data sheet, and what Python takes to ask for one.
COMPUTE, MEMORY = 0.5, 0.7
LAUNCH = 10e-6  # seconds of the processor for one kernel, its autograd included
KERNEL = 3e-6  # seconds that the shortest kernel keeps the card busy
LINK = 10e9  # bytes a second between machines
MEETING = 50e-6  # seconds of a reduction of little
GPUS = (1, 4, 16)

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "tinyimagenet": (3, 56, 56)}
CLASSES = {"mnist": 10, "cifar10": 10, "tinyimagenet": 200}
TRAINING = {"mnist": 60_000, "cifar10": 50_000, "tinyimagenet": 100_000}
BATCHES, STEPS = (2, 3), (1, 2)


@dataclass(frozen=True)
class Published:
    """What the paper reports; seconds, and shares of the test set in per cent.

    Tables of training and certification times and of the split position, Appendix B and C.
    """

    card: Card
    train: float
    certify: float
    adversarial: float | None = None
    certified: float | None = None


PAPER = {
    ("mnist-0.1", "taps"): Published(RTX_3090, 42_622, 17_117, 98.51, 98.39),
    ("mnist-0.3", "taps"): Published(RTX_3090, 12_417, 41_624, 94.01, 93.62),
    ("cifar10-2-255", "taps"): Published(RTX_3090, 141_281, 166_474, 63.00, 61.56),
    ("cifar10-8-255", "taps"): Published(RTX_3090, 27_017, 26_968, 35.29, 35.10),
    ("tinyimagenet-1-255", "taps"): Published(TITAN_RTX, 306_036, 23_497, 20.94, 20.82),
    ("mnist-0.1", "staps"): Published(RTX_3090, 19_865, 12_943),
    ("mnist-0.3", "staps"): Published(RTX_3090, 23_613, 125_768),
    ("cifar10-2-255", "staps"): Published(RTX_3090, 47_631, 398_245),
    ("cifar10-8-255", "staps"): Published(RTX_3090, 48_706, 77_793),
    ("tinyimagenet-1-255", "staps"): Published(TITAN_RTX, 861_639, 35_183, 22.40, 22.16),
}
TEST, PAPER_LIMIT = 10_000, 1000  # samples, and the seconds that the paper gave to each
OUR_LIMIT = 60  # seconds, the default of `certify`
ATTACK = 5 * 200  # steps of the paper's attack on each sample


# --- counting -----------------------------------------------------------------------------------


def network(settings: Settings) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the preset's network, before training."""
    shape, normal = SHAPES[settings.data], ((0.5,), (0.25,))
    torch.manual_seed(0)
    classes = CLASSES[settings.data]
    module = nets.build(settings.net, shape, classes, normalize=normal)
    return module.train().to(memory_format=torch.channels_last), shape


def count(name: str) -> dict[str, Any]:
    """Count the steps of a preset's phases at its batch, and a pass through its network."""
    settings = Settings.parse(load_preset(f"paper/{name}"))
    module, shape = network(settings)
    graph = trace(module, shape)
    initialize(graph)
    objective = settings.objective()
    eps = float(settings.eps if settings.train_eps is None else settings.train_eps)

    def bill(chosen: Objective, batch: int, radius: float, annealing: bool) -> Bill:
        x, y = torch.rand(batch, *shape), torch.arange(batch) % CLASSES[settings.data]
        x = x.contiguous(memory_format=torch.channels_last)
        optimizer = make_optimizer(module, settings)
        weight = settings.regularizer_weight
        step = Step(graph, chosen, eps, regularizer_weight=weight, l1=settings.l1)

        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # the first makes its state

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            step(x, y, radius, annealing=annealing)
            nn.utils.clip_grad_norm_(module.parameters(), 10.0, foreach=True)
            optimizer.step()

        return counted(run)

    def at(chosen: Objective, radius: float, annealing: bool) -> Bill:
        """What is linear in the batch, at the preset's."""
        few, many = (bill(chosen, batch, radius, annealing) for batch in BATCHES)
        u = (settings.batch_size - BATCHES[0]) / (BATCHES[1] - BATCHES[0])
        return combined((1 - u, few), (u, many))

    short, long = (at(replace(objective, steps=s), eps, False) for s in STEPS)  # type: ignore[type-var]
    w = (objective.steps - STEPS[0]) / (STEPS[1] - STEPS[0])  # type: ignore[attr-defined]
    phases = {
        "warmup": at(Standard(), 0.0, True),
        "annealing": at(objective.annealing, eps / 2, True),
        "rest": combined((1 - w, short), (w, long)),
    }
    one = torch.rand(1, *shape).requires_grad_()
    module.eval()

    def climb() -> None:
        torch.autograd.grad(module(one).sum(), one)

    each = (long.total[1] - short.total[1]) / (STEPS[1] - STEPS[0])
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "norms": sum(isinstance(node.op, ops.BatchNorm) for node in graph.nodes),
        "latent_flops": objective.steps * each,  # type: ignore[attr-defined]
        "attack": counted(climb).total[1:],
        "phases": {phase: written(bill) for phase, bill in phases.items()},
    }


def written(bill: Bill) -> list[list[Any]]:
    """Return a bill as JSON, without what rounds to nothing."""
    return [
        [*key, *(round(v) for v in line)]
        for key, line in sorted(bill.lines.items())
        if any(round(v) for v in line)
    ]


# --- predicting ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Time:
    """Seconds of one step: of the card by what bounds its kernels, and of the processor."""

    computing: float
    moving: float
    starting: float  # kernels that are too short to be anything else
    launches: float

    @property
    def card(self) -> float:
        """The seconds that the card is busy."""
        return self.computing + self.moving + self.starting

    @property
    def step(self) -> float:
        """Launches run ahead of the card: the slower one decides."""
        return max(self.card, self.launches)


def timed(lines: list[list[Any]], card: Card, share: float = 1.0, parts: int = 1) -> Time:
    """Return the time of a step, of which this card has a share of the samples."""
    sums = {"computing": 0.0, "moving": 0.0, "starting": 0.0}
    launches = 0.0
    for _, _, count_, flops, size in lines:
        times = {
            "computing": share * flops / (COMPUTE * card.flops),
            "moving": share * size / (MEMORY * card.bandwidth),
            "starting": parts * count_ * KERNEL,
        }
        bound = max(times, key=lambda name: times[name])
        sums[bound] += times[bound]
        launches += parts * count_ * LAUNCH
    return Time(**sums, launches=launches)


def epochs(settings: Settings) -> dict[str, int]:
    warmup, annealing = settings.warmup_epochs, settings.annealing_epochs
    return {
        "warmup": warmup,
        "annealing": annealing,
        "rest": settings.epochs - warmup - annealing,
    }


def training(name: str, counts: dict[str, Any], published: Published) -> dict[str, Any]:
    """Predict the hours of a training on each card, and on several."""
    settings = Settings.parse(load_preset(f"paper/{name}"))
    samples = TRAINING[settings.data] * (1 - float(settings.validation))
    steps = math.ceil(samples / settings.batch_size)
    parts = settings.accumulate

    def hours(card: Card, gpus: int = 1) -> float:
        gradient = 2 * (gpus - 1) / gpus * 4 * counts["parameters"] / LINK
        meetings = (2 * counts["norms"] + 2) * MEETING * (gpus > 1)
        each = {
            phase: timed(lines, card, 1 / gpus, parts).step + gradient + meetings
            for phase, lines in counts["phases"].items()
        }
        return sum(n * steps * each[phase] for phase, n in epochs(settings).items()) / 3600

    card = published.card
    found = timed(counts["phases"]["rest"], card, parts=parts)
    total = [sum(line[i] for line in counts["phases"]["rest"]) for i in (2, 3, 4)]
    slowest = max(("computing", "moving", "starting"), key=lambda part: getattr(found, part))
    return {
        "card": card.name,
        "paper": published.train / 3600,
        "hours": {c.name: hours(c) for c in CARDS},
        "own": hours(card),
        "ratio": hours(card) / (published.train / 3600),
        "a100": {str(n): hours(A100, n) for n in GPUS},
        "parameters": counts["parameters"],
        "step": {
            "kernels": total[0] * parts,
            "gflops": total[1] / 1e9,
            "gbytes": total[2] / 1e9,
            "milliseconds": 1e3 * found.step,
            "latent": counts["latent_flops"] / total[1],
            "computing": found.computing / found.card,
            "moving": found.moving / found.card,
            "starting": found.starting / found.card,
            "launches": found.launches / found.step,
            "bound": "launches" if found.launches > found.card else slowest,
        },
    }


def certification(counts: dict[str, Any], published: Published) -> dict[str, Any]:
    """Predict hours of a certification with the paper's limit: attacks, and what stays open."""
    flops, size = counts["attack"]
    card = TITAN_RTX  # on which the paper certified
    step = max(flops / (COMPUTE * card.flops), size / (MEMORY * card.bandwidth))
    found: dict[str, Any] = {
        "paper": published.certify / 3600,
        "attack": TEST * ATTACK * step / 3600,
    }
    if published.adversarial is not None and published.certified is not None:
        # What neither attack nor proof decided took all of its time.
        undecided = round((published.adversarial - published.certified) / 100 * TEST)
        found |= {"undecided": undecided, "waiting": undecided * PAPER_LIMIT / 3600}
        found["share"] = found["waiting"] / found["paper"]
        found["shorter"] = undecided * OUR_LIMIT / 3600
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="count again")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "counts.json"
    if given.measure:
        torch.set_num_threads(1)
        found = {}
        for setting, method in PAPER:
            began = time.process_time()
            with as_on_a_gpu():
                found[f"{setting}-{method}"] = count(f"{setting}-{method}")
            print(f"{setting}-{method}: counted in {time.process_time() - began:.0f} s", flush=True)
        path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    elif not path.exists():
        parser.error(f"nothing was counted yet: there is no {path}; give --measure")
    counts = json.loads(path.read_text(encoding="utf-8"))
    result: dict[str, Any] = {
        "assumed": {
            "compute": COMPUTE,
            "memory": MEMORY,
            "launch": 1e6 * LAUNCH,
            "kernel": 1e6 * KERNEL,
            "link": LINK / 1e9,
        },
        "cards": {card.name: [card.flops, card.bandwidth] for card in CARDS},
    }
    for (setting, method), published in PAPER.items():
        name = f"{setting}-{method}"
        row = training(name, counts[name], published)
        key = setting.replace("0.", "0")  # dots separate keys where pages look numbers up
        result.setdefault(key, {})[method] = {
            "training": row,
            "certification": certification(counts[name], published),
        }
        step = row["step"]
        print(
            f"{name:26} {step['kernels']:6.0f} kernels {step['gflops']:8.0f} GFLOP "
            f"{step['gbytes']:6.1f} GB {step['milliseconds']:7.1f} ms by {step['bound']:9} "
            f"{row['own']:6.1f} h, paper {row['paper']:6.1f} h ({row['card']})"
        )
    ratios = [
        methods[method]["training"]["paper"] / methods[method]["training"]["own"]
        for key, methods in result.items()
        if key.startswith(("mnist", "cifar10"))  # on the first card
        for method in methods
    ]
    result["ratios"] = {"least": min(ratios), "most": max(ratios)}
    (given.out / "costs.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
