"""What busy neighbours cost, and what it costs to be ready for them.

    python benchmarks/busy.py [--rounds 3] [--neighbours N]

Two epochs of the demo's network by IBP and TAPS, each time by a new `tightrope train`, alone and
beside neighbours, which are processes that only count: by default one per core. Threads that
sleep while they wait, as in every process of ours, are compared with threads that spin, which is
OpenMP's default. All cases of a round are measured in turn, and a ratio is that of the sums over
the rounds: spinning is slow in spells, which a median would hide. With one neighbour per core
half of the machine is ours, so the best possible factor is 2. The command fails if that of
sleeping threads exceeds the limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHORT = ("epochs=2", "annealing_epochs=1", "decay_epochs=")
METHODS = {
    "ibp": SHORT,
    "taps": (*SHORT, "train_samples=3000"),
}
# OpenMP's default, told as a choice of the user's, which the command leaves alone.
SPINNING = {"KMP_LIBRARY": "throughput"}
WAITING: dict[str, dict[str, str]] = {"asleep": {}, "spinning": SPINNING}
CHOICES = ("OMP_", "GOMP_", "KMP_")
LIMIT = 2.5


def seconds_of_training(method: str, waiting: str) -> float:
    """Train by the command in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CHOICES)}
    settings = [part for pair in METHODS[method] for part in ("--set", pair)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "tightrope", "train", "--preset", "demo"]
        subprocess.run(
            [*command, "--method", method, "--out", run, *settings],
            env={**kept, **WAITING[waiting]},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        history = (run / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line)["seconds"] for line in history)


def count_for_ever() -> None:
    """Be a neighbour."""
    while True:
        pass


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep as many cores busy."""
    crew = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(count)]
    for process in crew:
        process.start()
    try:
        yield
    finally:
        for process in crew:
            process.kill()
            process.join()


Times = dict[tuple[str, str, bool], float]


def measure(rounds: int, count: int) -> Times:
    """Return the mean seconds of a training by method, kind of waiting and company."""
    cases = [(m, w, busy) for busy in (False, True) for m in METHODS for w in WAITING]
    found = dict.fromkeys(cases, 0.0)
    seconds_of_training("ibp", "asleep")  # what is loaded for the first time is loaded now
    for _ in range(rounds):
        for method, waiting, busy in cases:
            with neighbours(count if busy else 0):
                found[method, waiting, busy] += seconds_of_training(method, waiting) / rounds
    return found


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbours", type=int, default=cores, help="by default one per core")
    arguments = parser.parse_args()
    times = measure(arguments.rounds, arguments.neighbours)
    print(f"{cores} cores, {arguments.neighbours} busy neighbours")
    print(f"  {'training':<10}{'threads':<10}{'alone s':>9}{'beside s':>10}{'factor':>8}")
    for method in METHODS:
        for waiting in WAITING:
            alone, beside = (times[method, waiting, busy] for busy in (False, True))
            print(f"  {method:<10}{waiting:<10}{alone:9.2f}{beside:10.2f}{beside / alone:8.2f}")
    for method in METHODS:
        cost = times[method, "asleep", False] / times[method, "spinning", False]
        print(f"alone, {method} with sleeping threads takes {cost:.2f} times as long as spinning")
    worst = max(times[m, "asleep", True] / times[m, "asleep", False] for m in METHODS)
    print(f"the largest factor of sleeping threads is {worst:.2f}, the limit {LIMIT}")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
