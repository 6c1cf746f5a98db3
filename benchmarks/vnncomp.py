"""Verdict, seconds and subproblems for each instance of a VNN-COMP folder, and the total.

    python benchmarks/vnncomp.py FOLDER [--timeout 120] [--only mnistfc] [--threads 2]

FOLDER holds `instances.csv` with columns benchmark, onnx, vnnlib and verdict. For instances that
alpha-beta-CROWN was timed on (two CPU cores, its solving time without start-up), its seconds
stand beside ours.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch

from tightrope.certification.verifying import verify_file
from tightrope.cli.verify import competition_word

# Seconds of solving on two cores, VNN-COMP 2021 instances; limit 120 s.
ALPHA_BETA_CROWN = {
    "prop_2_0.03": 0.1,
    "prop_0_0.03": 3.6,
    "prop_1_0.03": 8.9,
    "prop_3_0.03": 6.2,
    "prop_5_0.03": 3.6,
    "prop_6_0.05": 2.9,
    "prop_7_0.03": 1.7,
    "prop_0_0.05": 82.0,
    "base_kw-img4549": 3.3,
    "base_kw-img2908": 6.5,
    "base_kw-img5303": 6.3,
    "base_kw-img1697": 1.7,
    "base_kw-img6638": 8.5,
    "wide_kw-img19-": 38.5,
}


def peer(name: str) -> float | None:
    """Return alpha-beta-CROWN's seconds for an instance, if it was timed."""
    return next((seconds for key, seconds in ALPHA_BETA_CROWN.items() if key in name), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = list(csv.DictReader((arguments.folder / "instances.csv").open(encoding="utf-8")))
    head = ("instance", "known", "ours", "stage", "s", "domains", "peer")
    print("{:<58} {:>6} {:>8} {:>7} {:>8} {:>8} {:>6}".format(*head))
    wrong = undecided = 0
    total = timed = theirs = 0.0
    for row in rows:
        name = Path(row["vnnlib"]).stem
        if arguments.only not in f"{row['benchmark']} {name}":
            continue
        started = time.perf_counter()
        found = verify_file(
            arguments.folder / row["onnx"],
            arguments.folder / row["vnnlib"],
            timeout=arguments.timeout,
        )
        seconds = time.perf_counter() - started
        word = competition_word(found)
        total += seconds
        undecided += word not in ("sat", "unsat")
        wrong += word in ("sat", "unsat") and word != row["verdict"]
        other = peer(name)
        if other is not None:
            timed, theirs = timed + seconds, theirs + other
        beside = "" if other is None else f"{other:.1f}"
        print(
            f"{row['benchmark'] + ' ' + name:<58} {row['verdict']:>6} {word:>8} "
            f"{found.stage:>7} {seconds:>8.2f} {found.domains:>8} {beside:>6}",
            flush=True,
        )
    print(f"total {total:.1f} s, {wrong} wrong, {undecided} undecided")
    if theirs:
        print(f"timed instances: {timed:.1f} s, alpha-beta-CROWN {theirs:.1f} s")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
