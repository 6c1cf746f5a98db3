"""How the instances of VNN-COMP folders are decided: each, by family, and in total.

    python benchmarks/vnncomp.py FOLDER | RESULTS ... [--timeout 120] [--only acasxu] [--jobs 1]

A folder holds `instances.csv` with columns benchmark, onnx, vnnlib and verdict; columns timeout
(the competition's limit) and fastest (its best tool's seconds, mostly on a GPU) are used where
they are. It is run as `tightrope verify --instances` does it, each instance with the smaller of its
own limit and `--timeout`; the results go to `--out`, from which it continues, one file for each
folder. A file of results is only tabulated. For instances that alpha-beta-CROWN was timed on (two
CPU cores, its solving time without start-up), its seconds and subproblems stand beside ours.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

from tightrope.certification.instances import (
    Outcome,
    read_instances,
    read_outcomes,
    verify_instances,
)
from tightrope.certification.problem import CHOICES

# Seconds and subproblems of solving on two cores, VNN-COMP 2021 instances; limit 120 s.
ALPHA_BETA_CROWN = {
    ("net_256x2", "prop_2_0.03"): (0.1, 0),
    ("net_256x2", "prop_0_0.03"): (3.6, 256),
    ("net_256x2", "prop_1_0.03"): (8.9, 3346),
    ("net_256x2", "prop_3_0.03"): (6.2, 2202),
    ("net_256x2", "prop_5_0.03"): (3.6, 752),
    ("net_256x2", "prop_6_0.05"): (2.9, 256),
    ("net_256x2", "prop_7_0.03"): (1.7, 0),
    ("net_256x2", "prop_0_0.05"): (82.0, 57946),
    ("net_256x4", "prop_13_0.03"): (5.9, 2288),
    ("net_256x4", "prop_1_0.05"): (2.5, 0),
    ("cifar_base_kw", "img4549"): (3.3, 64),
    ("cifar_base_kw", "img2908"): (6.5, 256),
    ("cifar_base_kw", "img5303"): (6.3, 224),
    ("cifar_base_kw", "img1697"): (1.7, 0),
    ("cifar_base_kw", "img6638"): (8.5, 660),
    ("cifar_wide_kw", "img19-"): (38.5, 2458),
    ("cifar_wide_kw", "img4720"): (4.7, 160),
    ("cifar_deep_kw", "img6051"): (7.3, 64),
    ("cifar_deep_kw", "img5168"): (18.4, 336),
}


def peer(onnx: str, vnnlib: str) -> tuple[float, int] | None:
    """Return alpha-beta-CROWN's seconds and subproblems for an instance, if it was timed."""
    for (network, spec), measured in ALPHA_BETA_CROWN.items():
        if network in onnx and spec in f"{Path(vnnlib).name.removesuffix('.gz')}-":
            return measured
    return None


def fastest(folder: Path) -> dict[tuple[str, str], float]:
    """Return the seconds of the best tool, by the files of an instance."""
    with (folder / "instances.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = ((row, row.get("fastest") or row.get("best_competition_seconds")) for row in rows)
    return {(row["onnx"], row["vnnlib"]): float(seconds) for row, seconds in found if seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", type=Path, nargs="+", metavar="FOLDER | RESULTS")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--only", default="", help="instances whose line contains this")
    parser.add_argument("--jobs", type=int, default=1, help="instances at a time")
    parser.add_argument("--out", type=Path, help="folder of the results", default=Path("vnncomp"))
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    best: dict[tuple[str, str], float] = {}
    for place in arguments.places:
        if not place.is_dir():
            found = read_outcomes(place)
            found = [o for o in found if arguments.only in f"{o.benchmark} {o.onnx} {o.vnnlib}"]
            for outcome in found:
                print_instance(outcome)
        else:
            best |= fastest(place)
            listed = read_instances(
                place / "instances.csv", timeout=arguments.timeout, only=arguments.only
            )
            arguments.out.mkdir(parents=True, exist_ok=True)
            found = verify_instances(
                listed,
                arguments.out / f"{place.resolve().name}.csv",
                jobs=arguments.jobs,
                choices=CHOICES,
                progress=lambda outcome, done, total: print_instance(outcome),
            )
        outcomes += found
    print_families(outcomes, best)
    sys.exit(any(outcome.wrong for outcome in outcomes))


def print_instance(outcome: Outcome) -> None:
    """Print one line about an instance."""
    timed = peer(outcome.onnx, outcome.vnnlib)
    other = "" if timed is None else "{:.1f} s, {}".format(*timed)
    why = "" if outcome.decided else outcome.reason[:60]
    flags = " WRONG" * outcome.wrong + " LATE" * outcome.late
    name = f"{outcome.benchmark} {Path(outcome.onnx).name} {Path(outcome.vnnlib).name}"
    print(
        f"{name[:74]:<74} {outcome.known:>6} {outcome.result:>8} {outcome.stage:>9} "
        f"{outcome.seconds:>8.2f} {outcome.subproblems:>8} {other:>14} {why}{flags}",
        flush=True,
    )


def print_families(outcomes: list[Outcome], best: dict[tuple[str, str], float]) -> None:
    """Print a table by family, and totals."""
    head = ("family", "decided", "geo. mean s", "subproblems", "best tool s")
    print("\n{:<28} {:>8} {:>12} {:>12} {:>12}".format(*head))
    for family in sorted({outcome.benchmark for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.benchmark == family]
        known = [best[o.onnx, o.vnnlib] for o in mine if (o.onnx, o.vnnlib) in best]
        print(
            f"{family:<28} {sum(o.decided for o in mine):>4}/{len(mine):<3} "
            f"{mean(o.seconds for o in mine):>12} {sum(o.subproblems for o in mine):>12} "
            f"{mean(known):>12}"
        )
    count, total = sum(o.decided for o in outcomes), sum(o.seconds for o in outcomes)
    wrong, late = sum(o.wrong for o in outcomes), sum(o.late for o in outcomes)
    print(f"total {total:.1f} s, {count} of {len(outcomes)} decided, {wrong} wrong, {late} late")
    timed = [(o, peer(o.onnx, o.vnnlib)) for o in outcomes]
    both = [(o.seconds, other[0]) for o, other in timed if other is not None]
    if both:
        ours, theirs = map(sum, zip(*both, strict=True))
        print(f"{len(both)} timed instances: {ours:.1f} s, alpha-beta-CROWN {theirs:.1f} s")


def mean(seconds: Iterable[float]) -> str:
    """Return the geometric mean, of what is at least a hundredth of a second."""
    logs = [math.log(max(s, 0.01)) for s in seconds]
    return f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else ""


if __name__ == "__main__":
    main()
