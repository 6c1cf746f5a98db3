"""How long `make demo` takes from an empty clone beside busy processes.

    python benchmarks/busy_demo.py [--neighbours 2] [--limit 480]

Clones the last commit into a temporary folder, starts processes that only count, and runs `make
demo` there: first what sets up the environment (packages are downloaded), then the demo itself.
The command fails if both together take longer than the limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from busy import CHOICES, neighbours

ROOT = Path(__file__).parent.parent
# Of the environment that this script may run in; the clone has its own.
FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", *CHOICES)


def seconds_of(*command: str, cwd: Path) -> float:
    """Run a command, which must succeed, and return how long it took."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    started = time.perf_counter()
    subprocess.run(command, cwd=cwd, env=environment, check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--neighbours", type=int, default=2)
    parser.add_argument("--limit", type=float, default=480.0, help="in seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "tightrope"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
        with neighbours(arguments.neighbours):
            setting_up = seconds_of("make", ".venv/.installed", cwd=clone)
            demo = seconds_of("make", "demo", cwd=clone)
    print(f"make demo from an empty clone beside {arguments.neighbours} busy processes:")
    print(f"  setting up {setting_up:.0f} s, demo {demo:.0f} s, together {setting_up + demo:.0f} s")
    sys.exit(setting_up + demo > arguments.limit)


if __name__ == "__main__":
    main()
