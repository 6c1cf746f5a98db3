"""What users may choose about a search, side by side: instances decided, seconds, subproblems.

    python benchmarks/choices.py FOLDER --what branching|cuts|split [--timeout 60] [--only 256x4]

A folder holds `instances.csv`, as for `vnncomp.py`. Every value of the choice gets each instance,
one after the other, in turn; the results go to `--out`, one file for each value, from which it
continues. Totals are of all instances, and of those that every value decided. Ends with 1 if an
answer is not the known one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

from tightrope.certification.instances import Outcome, read_instances, verify_instances
from tightrope.certification.names import BRANCHING, CUTS, SPLITS
from tightrope.certification.problem import CHOICES

VALUES = {"branching": BRANCHING, "cuts": CUTS, "split": SPLITS}
Found = Mapping[str, Outcome]  # by the value that was chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--what", choices=VALUES, default="branching")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--only", default="", help="instances whose line contains this")
    parser.add_argument("--out", type=Path, help="folder of the results", default=Path("choices"))
    arguments = parser.parse_args()
    values = VALUES[arguments.what]
    listed = read_instances(
        arguments.folder / "instances.csv", timeout=arguments.timeout, only=arguments.only
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"{'instance':<60} {'known':>6} " + "".join(f"{value:>26}" for value in values))
    rows: list[Found] = []
    for instance in listed:
        found = {}
        for value in values:
            results = arguments.out / f"{arguments.folder.resolve().name}-{value}.csv"
            choices = replace(CHOICES, **{arguments.what: value})
            (found[value],) = verify_instances([instance], results, choices=choices)
        print_row(found)
        rows.append(found)
    print_totals(values, rows)
    sys.exit(any(outcome.wrong for found in rows for outcome in found.values()))


def print_row(found: Found) -> None:
    """Print an instance: answer, seconds and subproblems by value."""
    one = next(iter(found.values()))
    name = f"{Path(one.onnx).stem} {Path(one.vnnlib).name.removesuffix('.gz')}"
    cells = (f"{o.result:>8} {o.seconds:>8.2f} {o.subproblems:>8}" for o in found.values())
    print(f"{name[:60]:<60} {one.known:>6} " + " ".join(cells), flush=True)


def print_totals(values: Sequence[str], rows: Sequence[Found]) -> None:
    """Print what each value decided, and what it took for those that all values decided."""
    common = [found for found in rows if all(o.decided for o in found.values())]
    print(f"\n{'':<12} {'decided':>9} {'seconds':>9} {'of common':>10} {'subproblems':>12}")
    for value in values:
        mine, shared = [f[value] for f in rows], [f[value] for f in common]
        print(
            f"{value:<12} {sum(o.decided for o in mine):>4}/{len(mine):<4} "
            f"{sum(o.seconds for o in mine):>9.1f} {sum(o.seconds for o in shared):>10.1f} "
            f"{sum(o.subproblems for o in shared):>12}"
        )


if __name__ == "__main__":
    main()
