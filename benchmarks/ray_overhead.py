"""What Ray costs beside local processes: one certification by two workers either way, in turn.

    python benchmarks/ray_overhead.py RUN [--samples 10000] [--rounds 1] [--timeout 60]

Ray starts on this machine and listens as Ray does; as root, a network of its own keeps it inside:

    unshare --net python tests/parallel/loopback.py benchmarks/ray_overhead.py RUN

Each round certifies a copy of the run from the beginning, by `--jobs 2` and by `--engine ray --jobs
2`. Start-up is what passes until the first record; the overhead is that of the rest. `busy` is the
share of the rest that workers spend on samples. Verdicts have to be the same, but where time ran
out. A run of ten minutes says more than a short one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

WORKERS = 2
ENGINES = {"processes": (), "ray": ("--engine", "ray")}
GLANCE = 0.02
LIMIT = 0.10


@dataclass(frozen=True)
class Measured:
    """Seconds until the first record and from there on, and the verdicts."""

    start: float
    rest: float
    busy: float
    verdicts: dict[int, str]


def measure(run: Path, engine: str, samples: int, timeout: float) -> Measured:
    """Certify a copy of a run by a command of its own."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        unwanted = shutil.ignore_patterns("certification*", "counterexamples", "*.lock")
        shutil.copytree(run, copy, ignore=unwanted)
        journal, began, first = copy / "certification.jsonl", time.monotonic(), 0.0
        command = [sys.executable, "-m", "tightrope", "certify", str(copy), "--force"]
        command += ["--samples", str(samples), "--timeout", str(timeout), "--device", "cpu"]
        command += ["--jobs", str(WORKERS), *ENGINES[engine]]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                if not first and journal.exists() and journal.stat().st_size:
                    first = time.monotonic()
                time.sleep(GLANCE)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
        end = time.monotonic()
        records = [json.loads(line) for line in journal.read_text().splitlines()]
    work = sum(record["seconds"] for record in records)
    verdicts = {record["index"]: record["verdict"] for record in records}
    return Measured(first - began, end - first, work / (WORKERS * (end - first)), verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    totals = dict.fromkeys(ENGINES, 0.0)
    for number in range(given.rounds):
        order = list(ENGINES) if number % 2 == 0 else list(reversed(ENGINES))
        found = {name: measure(given.run, name, given.samples, given.timeout) for name in order}
        for name in ENGINES:
            one = found[name]
            totals[name] += one.rest
            print(
                f"{name:10} first record after {one.start:6.1f} s, the rest {one.rest:7.1f} s, "
                f"workers busy {one.busy:5.1%}",
                flush=True,
            )
        local, ray = (found[name].verdicts for name in ENGINES)
        other = [i for i in local if {local[i], ray[i]} == {"verified", "falsified"}]
        open_in_one = sum((local[i] == "unknown") != (ray[i] == "unknown") for i in local)
        print(f"contradictions: {len(other)}; open in one of them only: {open_in_one}")
        assert local.keys() == ray.keys() and not other
    overhead = totals["ray"] / totals["processes"] - 1
    verdict = "within" if overhead <= LIMIT else "beyond"
    print(f"overhead of Ray: {overhead:+.1%} ({verdict} the limit of {LIMIT:.0%})")


if __name__ == "__main__":
    main()
