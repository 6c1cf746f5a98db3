"""Verdict, seconds and subproblems for each instance of a VNN-COMP folder, and totals.

    python benchmarks/vnncomp.py FOLDER [FOLDER ...] [--timeout 120] [--only acasxu] [--out FILE]

A folder holds `instances.csv` with columns benchmark, onnx, vnnlib and verdict; columns timeout
(the competition's limit) and fastest (its best tool's seconds, mostly on a GPU) are used where
they are. Each instance gets the smaller of its own limit and `--timeout`. For instances that
alpha-beta-CROWN was timed on (two CPU cores, its solving time without start-up), its seconds and
subproblems stand beside ours. `--out` writes one JSON line per instance; instances that it has
already are not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch

from tightrope.certification.verifying import verify_file
from tightrope.cli.verify import competition_word
from tightrope.errors import UserError

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


def instances(folders: Iterable[Path], only: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of all folders, with whole paths."""
    for folder in folders:
        with (folder / "instances.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                name = f"{row['benchmark']} {Path(row['onnx']).name} {Path(row['vnnlib']).name}"
                if only in name:
                    yield {**row, "folder": folder, "name": name}


def decide(row: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Run one instance; what ends in an error is an answer, too: none."""
    limit = min(timeout, float(row.get("timeout") or math.inf))
    started = time.perf_counter()
    found: dict[str, Any] = {"word": "error", "stage": "", "subproblems": 0, "reason": ""}
    try:
        answer = verify_file(
            row["folder"] / row["onnx"], row["folder"] / row["vnnlib"], timeout=limit
        )
        found |= {"word": competition_word(answer), "stage": answer.stage, "reason": answer.reason}
        found["subproblems"] = answer.subproblems
    except UserError as error:
        found["reason"] = str(error)
    except Exception as error:  # a benchmark of a hundred instances goes on with the next one
        found["reason"] = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    other = peer(row["onnx"], row["vnnlib"])
    return {
        "benchmark": row["benchmark"],
        "name": row["name"],
        "known": row["verdict"],
        "limit": limit,
        "seconds": round(seconds, 3),
        "late": seconds > 1.1 * limit + 2,
        "wrong": {found["word"], row["verdict"]} == {"sat", "unsat"},
        "fastest": _number(row.get("fastest") or row.get("best_competition_seconds")),
        "peer": other,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="file of JSON lines to continue")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = []
    if arguments.out and arguments.out.exists():
        results = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    done = {result["name"] for result in results}
    for row in instances(arguments.folders, arguments.only):
        if row["name"] in done:
            continue
        result = decide(row, arguments.timeout)
        results.append(result)
        print_instance(result)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    print_families(results)
    sys.exit(any(result["wrong"] for result in results))


def print_instance(result: dict[str, Any]) -> None:
    """Print one line about an instance."""
    other = "" if result["peer"] is None else "{:.1f} s, {}".format(*result["peer"])
    why = result["reason"][:60] if result["word"] not in ("sat", "unsat") else ""
    flags = " WRONG" * result["wrong"] + " LATE" * result["late"]
    print(
        f"{result['name'][:74]:<74} {result['known']:>6} {result['word']:>8} {result['stage']:>9} "
        f"{result['seconds']:>8.2f} {result['subproblems']:>8} {other:>14} {why}{flags}",
        flush=True,
    )


def print_families(results: list[dict[str, Any]]) -> None:
    """Print a table by family, and totals."""
    head = ("family", "decided", "geo. mean s", "subproblems", "best tool s")
    print("\n{:<28} {:>8} {:>12} {:>12} {:>12}".format(*head))
    for family in sorted({result["benchmark"] for result in results}):
        mine = [result for result in results if result["benchmark"] == family]
        good = [result for result in mine if result["word"] in ("sat", "unsat")]
        best = [result["fastest"] for result in mine if result["fastest"]]
        print(
            f"{family:<28} {len(good):>4}/{len(mine):<3} {mean(r['seconds'] for r in mine):>12} "
            f"{sum(r['subproblems'] for r in mine):>12} {mean(best):>12}"
        )
    count = sum(result["word"] in ("sat", "unsat") for result in results)
    total = sum(result["seconds"] for result in results)
    wrong, late = (sum(result[key] for result in results) for key in ("wrong", "late"))
    print(f"total {total:.1f} s, {count} of {len(results)} decided, {wrong} wrong, {late} late")
    timed = [result for result in results if result["peer"] is not None]
    if timed:
        ours, theirs = sum(r["seconds"] for r in timed), sum(r["peer"][0] for r in timed)
        print(f"{len(timed)} timed instances: {ours:.1f} s, alpha-beta-CROWN {theirs:.1f} s")


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def mean(seconds: Iterable[float]) -> str:
    """Return the geometric mean, of what is at least a hundredth of a second."""
    logs = [math.log(max(s, 0.01)) for s in seconds]
    return f"{math.exp(sum(logs) / len(logs)):.2f}" if logs else ""


if __name__ == "__main__":
    main()
