"""Is a training step slower than in another version? Both are measured in turn, several times.

    git worktree add ../old COMMIT
    python benchmarks/in_turn.py ../old . [--rounds 3] [-- --net cnn3]

Each checkout runs its own `benchmarks/steps.py`, by this interpreter; what follows `--` is for it.
Steps that both know are compared by the median of their milliseconds over the rounds; how their
ratio to a standard step has changed is shown beside it. Nothing else should run meanwhile. Ends
with exit code 1 if one of them is slower by more than the limit.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

LIMIT = 0.05
LINE = re.compile(r"  (?P<step>\S.*?) {2,}(?P<ms>[0-9.]+) +(?P<ratio>[0-9.]+) +[0-9a-z.]+$")
Figures = dict[str, tuple[float, float]]


def read(text: str) -> Figures:
    """Return milliseconds and ratio of each step that a benchmark has printed, by net and name."""
    found: Figures = {}
    net = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            net = line.split()[0]
        elif match := LINE.fullmatch(line):
            found[f"{net}: {match['step']}"] = float(match["ms"]), float(match["ratio"])
    return found


def measure(checkout: Path, options: list[str]) -> Figures:
    """Run the benchmark of a checkout."""
    source = str(checkout.resolve() / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "benchmarks/steps.py", *options]
    done = subprocess.run(
        command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return read(done.stdout)


def slower(old: list[Figures], new: list[Figures]) -> list[str]:
    """Print a table; return the steps that have become slower."""
    found = []
    print(f"{'step':<28}{'old ms':>10}{'new ms':>10}{'change':>9}{'of ratio':>10}")
    for step in [name for name in old[0] if name in new[0]]:
        ms, ratio = (
            [statistics.median(one[step][k] for one in several) for several in (old, new)]
            for k in (0, 1)
        )
        changes = [after / before - 1 for before, after in (ms, ratio)]
        print(f"{step:<28}{ms[0]:10.1f}{ms[1]:10.1f}{changes[0]:+9.1%}{changes[1]:+10.1%}")
        if changes[0] > LIMIT:
            found.append(step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    own, passed = sys.argv[1:], []
    if "--" in own:
        own, passed = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    for checkout in (given.old, given.new):
        if not (checkout / "src" / "tightrope").is_dir():
            parser.error(f"{checkout} is not a checkout of Tightrope: it has no src/tightrope")
    figures: dict[Path, list[Figures]] = defaultdict(list)
    for number in range(given.rounds):
        for checkout in (given.old, given.new):
            figures[checkout].append(measure(checkout, passed))
            print(f"round {number + 1} of {given.rounds}: {checkout}", file=sys.stderr, flush=True)
    found = slower(figures[given.old], figures[given.new])
    print(f"slower by more than {LIMIT:.0%}: {', '.join(found) or 'none'}")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
