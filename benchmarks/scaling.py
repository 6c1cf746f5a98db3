"""How far does `certify` scale? A simulation of its scheduler, fed with measured seconds.

    python benchmarks/scaling.py --measure RUN --out FOLDER   # measures seconds per sample of a run
    python benchmarks/scaling.py --out FOLDER                 # simulates with what was measured

The folder of the documentation is docs/results/scaling. It says nothing about hardware: a worker
is a worker. The scheduler is the class that runs on Ray (`tightrope.parallel.scheduler`) with a
simulated clock; workers take the measured seconds of CPU (drawn anew, with a fixed seed), messages
a few milliseconds. Batches are the unit of the common stages; a worker that is asked gives away
half of the samples that wait, or half of its search. Samples of larger networks take longer, so
everything is simulated again as if each had taken ten and a hundred times as long.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from tightrope.parallel.scheduler import Scheduler
from tightrope.waiting import sleep_while_waiting

WORKERS = (1, 3, 10, 30, 100, 300, 1000)
SAMPLES, BATCHES = 10_000, (500, 50)  # the largest and the smallest batch of `certify`
SCALES = (1, 10, 100)  # times as long as measured
LATENCY = 0.005  # seconds that a message takes
GLANCE = 0.25  # seconds between two looks at who is idle, as on Ray
ROUND = 0.2  # seconds between two looks at wishes, in a search
SETUP = 0.2  # seconds that half a search costs whoever gets it
LEAST = 1.0  # seconds of a search below which its pool is too small to be divided


@dataclass
class Item:
    """What a worker is given: seconds of the common stages, and of each sample that goes on."""

    common: float
    alone: list[float] = field(default_factory=list)
    part: bool = False

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.common + sum(self.alone)


@dataclass
class Worker:
    """A worker at work: what it does until when."""

    number: int
    item: Item | None = None
    until: float = 0.0
    common: bool = False
    wish: bool = False
    version: int = 0


class Simulation:
    """Events in the order of a clock; the scheduler sees that clock and nothing else."""

    def __init__(self, items: list[Item], workers: int, *, samples: bool, searches: bool) -> None:
        self.now, self.samples, self.searches = 0.0, samples, searches
        self.scheduler: Scheduler[int, Item] = Scheduler(
            items, size=self._size, clock=lambda: self.now, shares=samples or searches
        )
        self.workers = [Worker(n) for n in range(workers)]
        self.events: list[tuple[float, int, str, int, int]] = []
        self.order = itertools.count()
        self.last = 0.0

    def run(self) -> float:
        """Return when the last sample is decided."""
        for worker in self.workers:
            self.scheduler.free(worker.number)
        self._assign()
        self._at(GLANCE, "glance", 0)
        while self.events:
            self.now, _, what, number, version = heapq.heappop(self.events)
            worker = self.workers[number]
            if what == "glance":
                if not self.scheduler.is_over:
                    self._at(GLANCE, "glance", 0)
            elif what == "wish":
                worker.wish = worker.item is not None
                if worker.wish and not worker.common:
                    self._at(ROUND, "share", number, worker.version)
                continue
            elif version != worker.version:
                continue
            elif what == "share":
                self._share(worker)
            elif what == "next":
                self._next(worker)
                continue
            else:
                self.scheduler.free(number)
                self.last = self.now
            self._assign()
        return self.last

    def _size(self, item: Item) -> float:
        return 0.5 if item.part else len(item.alone)

    def _at(self, delay: float, what: str, number: int, version: int = 0) -> None:
        event = (self.now + delay, next(self.order), what, number, version)
        heapq.heappush(self.events, event)

    def _assign(self) -> None:
        for number, turn in self.scheduler.assign():
            worker = self.workers[number]
            worker.item, worker.wish, worker.common = turn.item, False, turn.item.common > 0
            if worker.common:
                self._work(worker, LATENCY + turn.item.common)
            else:
                self._next(worker, LATENCY)
        for number in self.scheduler.ask():
            self._at(LATENCY, "wish", number)

    def _work(self, worker: Worker, seconds: float) -> None:
        worker.version += 1
        worker.until = self.now + seconds
        self._at(seconds, "next", worker.number, worker.version)

    def _next(self, worker: Worker, delay: float = 0.0) -> None:
        """Begin the next sample of the item, or end it."""
        assert worker.item is not None
        worker.common = False
        if worker.wish and self.samples and len(worker.item.alone) > 1:
            self._give(worker, self._every_second(worker.item))
        if not worker.item.alone:
            worker.item, worker.version = None, worker.version + 1
            self._at(LATENCY, "done", worker.number, worker.version)
            return
        self._work(worker, delay + worker.item.alone.pop())
        if worker.wish:
            self._at(ROUND, "share", worker.number, worker.version)

    def _share(self, worker: Worker) -> None:
        """In the middle of a sample: give away others, or half of it."""
        assert worker.item is not None
        left = worker.until - self.now
        if worker.item.alone and self.samples:
            self._give(worker, self._every_second(worker.item))
        elif self.searches and left > LEAST:
            self._work(worker, left / 2)
            self._give(worker, Item(0.0, [left / 2 + SETUP], part=True))
        elif left > ROUND:
            self._at(ROUND, "share", worker.number, worker.version)

    def _every_second(self, item: Item) -> Item:
        given = item.alone[::2]
        item.alone[:] = item.alone[1::2]
        return Item(0.0, given)

    def _give(self, worker: Worker, item: Item) -> None:
        worker.wish = False
        self.scheduler.add(worker.number, [item])


def drawn(
    measured: dict[str, list[float]], batch: int, scale: float = 1.0, samples: int = SAMPLES
) -> list[Item]:
    """Draw samples from those measured, in batches, as if each took `scale` times as long."""
    dice = random.Random(0)
    pairs = list(zip(measured["common"], measured["alone"], strict=True))
    chosen = [dice.choice(pairs) for _ in range(samples)]
    return [
        Item(scale * sum(c for c, _ in part), [scale * a for _, a in part if a > 0])
        for part in (chosen[i : i + batch] for i in range(0, samples, batch))
    ]


MODES = {
    "batches only": (False, False),
    "samples shared": (True, False),
    "searches shared, too": (True, True),
}


# What the documentation says of a thousand workers, by names.
THOUSAND = (
    ("alone", "batches only", 50),
    ("samples", "samples shared", 50),
    ("searches", "searches shared, too", 50),
    ("large", "searches shared, too", 500),
)


def is_last(row: dict[str, object], mode: str, batch: int) -> bool:
    """Whether a row is about the most workers, in this mode."""
    return (row["workers"], row["mode"], row["batch"]) == (WORKERS[-1], mode, batch)


def simulate(measured: dict[str, list[float]]) -> list[dict[str, object]]:
    """Return a row for each case."""
    rows: list[dict[str, object]] = []
    cases = itertools.product(SCALES, BATCHES, MODES.items(), WORKERS)
    for scale, batch, (mode, (samples, searches)), workers in cases:
        items = drawn(measured, batch, scale)
        work = sum(item.seconds for item in items)
        took = Simulation(items, workers, samples=samples, searches=searches).run()
        use = work / (workers * took)
        row = {"scale": scale, "batch": batch, "mode": mode, "workers": workers}
        rows.append({**row, "seconds": round(took, 1), "utilisation": round(use, 4)})
        where = f"{scale:3} times as long  batch {batch:3}  {mode:22} {workers:5} workers"
        print(f"{where} {took:9.1f} s  {use:6.1%}")
    return rows


def measure(folder: Path, samples: int, timeout: float) -> dict[str, object]:
    """Certify a run by the clock of the CPU, which busy neighbours do not change."""
    sleep_while_waiting()
    import torch

    import tightrope as tr

    torch.set_num_threads(1)
    time.perf_counter = time.monotonic = time.process_time
    run = tr.Run(folder)
    tr.certify(run, samples=samples, timeout=timeout, force=True, device="cpu")
    lines = [json.loads(line) for line in run.journal.read_text().splitlines()]
    long = ("alpha", "bab", "milp")
    alone = [sum(line["times"].get(name, 0.0) for name in long) for line in lines]
    common = [line["seconds"] - a for line, a in zip(lines, alone, strict=True)]
    values = run.values()
    named = {k: values[k] for k in ("data", "net", "method", "eps", "epochs")}
    return {
        "run": {**named, "eps": str(named["eps"]), "samples": samples, "timeout": timeout},
        "common": [round(seconds, 4) for seconds in common],
        "alone": [round(seconds, 4) for seconds in alone],
    }


def draw(rows: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = len(BATCHES), len(SCALES)
    figure, places = pyplot.subplots(*size, figsize=(9, 5.6), sharex=True, sharey=True)
    for place, (batch, scale) in zip(places.flat, itertools.product(BATCHES, SCALES), strict=True):
        for mode in MODES:
            case = (scale, batch, mode)
            chosen = [r for r in rows if (r["scale"], r["batch"], r["mode"]) == case]
            counts = [r["workers"] for r in chosen]
            place.plot(counts, [r["utilisation"] for r in chosen], marker="o", ms=3, label=mode)
        place.axhline(0.8, color="grey", linestyle=":")
        long = "as measured" if scale == 1 else f"{scale} times as long"
        place.set(xscale="log", title=f"batches of {batch}, {long}", ylim=(0, 1.03))
        place.title.set_size(9)
    for place in places[-1]:
        place.set_xlabel("workers (simulated)")
    for place in places[:, 0]:
        place.set_ylabel("utilisation")
    places[-1, -1].legend(loc="lower left", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="RUN")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    seconds = given.out / "seconds.json"
    if given.measure is not None:
        found = measure(given.measure, given.samples, given.timeout)
        seconds.write_text(json.dumps(found) + "\n", encoding="utf-8")
    elif not seconds.exists():
        parser.error(f"nothing was measured yet: there is no {seconds}; give --measure RUN")
    measured = json.loads(seconds.read_text(encoding="utf-8"))
    rows = simulate(measured)
    numbers = measured["alone"], measured["common"]
    table = {
        "measured": {
            "samples": len(numbers[0]),
            "alone": sum(numbers[0]) / len(numbers[0]),
            "common": sum(numbers[1]) / len(numbers[1]),
            "longest": max(numbers[0]),
            "ideal": SAMPLES * sum(map(sum, numbers)) / len(numbers[0]) / WORKERS[-1],
            "run": measured["run"],
        },
        "thousand": {
            name: {f"{r['scale']}": r["utilisation"] for r in rows if is_last(r, mode, batch)}
            for name, mode, batch in THOUSAND
        },
        "rows": rows,
    }
    (given.out / "scaling.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    draw(rows, given.out / "scaling.svg")


if __name__ == "__main__":
    main()
