"""`make hostile`: hostile files through every command that reads them.

Each file is a good one that was damaged, exaggerated or replaced by something else, at random
with a fixed seed. Commands must answer, or refuse with one line and exit code 2: no traceback, no
crash, no hang, no raw control characters, within bounded memory, and without touching anything
outside the folders they were given.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path


def _numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    """Run from the command line."""
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests / "behaviour")]
    from hunting import FILES, SEED, Hunt

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=FILES, help=f"how many  [{FILES}]")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of what is random  [{SEED}]")
    parser.add_argument("--only", type=_numbers, help="the numbers of some files: 7 or 10-20")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time  [2]")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        hunt = Hunt(Path(folder), seed=given.seed, jobs=given.jobs)
        numbers = range(given.files) if given.only is None else given.only
        findings = hunt.run(numbers, tell=True)
        hunt.close()
    minutes = (time.monotonic() - began) / 60
    codes = ", ".join(f"{count} with exit code {code}" for code, count in hunt.codes.most_common())
    print(f"{len(numbers)} files in {minutes:.1f} minutes: {sum(hunt.codes.values())} commands")
    print(f"({codes}), {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
