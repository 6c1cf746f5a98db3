"""How many images a second does `certify` decide, stage by stage and in all?

    python benchmarks/throughput.py RUN [--samples 10000] [--jobs 2] [--timeout 60]

RUN is a run folder with a trained network; a copy of it is certified, so it stays as it is. For an
earlier version of Tightrope, put the `src` folder of its checkout into PYTHONPATH: only what every
version has is used. Compiled loops are compiled before, on a few samples. Seconds of a stage are
what the journal says: the shares of all samples that met it. Wall time includes what worker
processes need to start; compare CPU seconds where the machine is not quiet. Samples that a search
decided or left open have a line each: their stage, lowest bound, subproblems and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WARM_UP = 100  # samples that compile the loops


def cpu_seconds() -> float:
    """Return what this process and those that have ended below it have used."""
    usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def copy_run(run: Path, to: Path) -> None:
    """Copy what certify needs of a run, without settings that came later than this version."""
    from tightrope.runs import open_run

    to.mkdir()
    shutil.copy(run / "model.safetensors", to)
    model = json.loads((run / "model.json").read_text(encoding="utf-8"))
    model.pop("made_with", None)
    (to / "model.json").write_text(json.dumps(model), encoding="utf-8")
    settings = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    settings.pop("made_with", None)
    while True:
        plain = {name: value for name, value in settings.items() if not isinstance(value, dict)}
        lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
        (to / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        try:
            open_run(to).settings()
        except ValueError as error:
            unknown = re.search("unknown setting '(.*?)'", str(error))
            if unknown is None:
                raise
            del settings[unknown[1]]
        else:
            return


def peak_gigabytes() -> float:
    """Return the most memory that one process, this one or one below it, has held."""
    usages = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(usage.ru_maxrss for usage in usages) / 2**20


def searched(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each sample that a search decided or left open."""
    for record in records:
        if record["verdict"] != "unknown" and not record.get("domains"):
            continue
        bound = "" if record["margin"] is None else f"bound {record['margin']:.4f}"
        yield (
            f"image {record['index']:<6}{record['verdict']:<10}{record['stage']:<8}{bound:<16}"
            f"{record.get('domains', 0):>9} subproblems{record['seconds']:>9.2f} s "
            f"{record.get('reason', '')}"
        )


def table(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each stage: images that met it, decided by it, and the seconds."""
    met: dict[str, list[float]] = {}
    decided: dict[str, int] = {}
    for record in records:
        for stage, seconds in record["times"].items():
            met.setdefault(stage, []).append(seconds)
        if record["verdict"] != "unknown":
            decided[record["stage"]] = decided.get(record["stage"], 0) + 1
    lines = [f"{'stage':<12}{'images':>8}{'decided':>9}{'seconds':>10}{'images/s':>10}"]
    for stage, times in met.items():
        seconds = sum(times)
        rate = len(times) / max(seconds, 1e-9)
        lines.append(
            f"{stage:<12}{len(times):>8}{decided.get(stage, 0):>9}{seconds:>10.2f}{rate:>10.1f}"
        )
    return lines


def main() -> None:
    """Certify a copy of a run and print what it took."""
    parser = argparse.ArgumentParser(description="Images per second of certify.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="samples certified before")
    parser.add_argument("--keep", type=Path, help="where to leave the certified copy")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

    import tightrope as tr

    with tempfile.TemporaryDirectory() as scratch:
        copies = [Path(scratch) / name for name in ("warm-up", "run")]
        for copy in copies:
            copy_run(arguments.run, copy)
        tr.certify(copies[0], samples=arguments.warm_up, timeout=arguments.timeout)
        wall, cpu = time.perf_counter(), cpu_seconds()
        found = tr.certify(
            copies[1],
            samples=arguments.samples,
            jobs=arguments.jobs,
            timeout=arguments.timeout,
        )
        wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
        journal = (copies[1] / "certification.jsonl").read_text(encoding="ascii").splitlines()
        if arguments.keep is not None:
            shutil.copytree(copies[1], arguments.keep)
    print(f"Tightrope at {Path(tr.__file__).parent}, {arguments.jobs} jobs")
    records = [json.loads(line) for line in journal]
    print("\n".join([*table(records), *searched(records)]))
    total = f"{found.samples} images: {found.verified} verified, {found.falsified} falsified, "
    print(f"{total}{found.unknown} unknown")
    print(f"wall {wall:.1f} s, {found.samples / wall:.1f} images/s")
    print(f"CPU {cpu:.1f} s, {found.samples / cpu:.1f} images per CPU second")
    print(f"at most {peak_gigabytes():.2f} GB in one process")


if __name__ == "__main__":
    main()
