"""The main job of Tightrope in one short script: TAPS against IBP.

Trains the same small convolutional network on MNIST by both methods, then proves or refutes the
robustness of both on 1,000 test images, and writes a page about it.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import tightrope as tr
from tightrope.cli.compare import print_comparison
from tightrope.cli.output import console, training_bar
from tightrope.training.trainer import Progress

OUT = Path("runs/demo")
METHODS = ("ibp", "taps")
EPOCHS = 10


def main() -> None:
    """Train, attack, certify, compare."""
    started = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    with ExitStack() as stack:

        def watch(method: str, seed: int) -> Progress:
            stack.close()
            console.print(f"training by {method}")
            return stack.enter_context(training_bar(EPOCHS))

        result = tr.compare(METHODS, preset="demo", samples=1000, out=OUT, watch=watch)
    print_comparison(result)
    ibp, taps = (result.entry(method) for method in METHODS)
    console.print(
        f"TAPS proves {100 * (taps.mean('certified') - ibp.mean('certified')):+.2f} points more "
        f"images robust than IBP, with {100 * (taps.mean('natural') - ibp.mean('natural')):+.2f} "
        "points of natural accuracy"
    )
    page = tr.report([run for entry in (ibp, taps) for run in entry.runs], OUT / "report.html").page
    console.print(f"page to look at, in any browser: {page}")
    console.print(f"all of it took {time.perf_counter() - started:.0f} s; runs are in {OUT}")


if __name__ == "__main__":
    main()
