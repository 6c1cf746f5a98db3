"""Carrying out one plan: train, certify, and measure what the experiments want to know.

`python -m tightrope.study.work` does so in a process of its own: the plan comes as one line of
JSON on standard input, progress goes to standard output as lines of JSON. When standard input is
closed, which is what happens when the parent is gone, the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tightrope.errors import UserError
from tightrope.study.plans import Plan

# Says how far a part has come: part, done, total.
Watch = Callable[[str, int, int], None]


def carry_out(
    plan: Plan, folder: Path, *, threads: int = 1, wait: bool = False, watch: Watch
) -> None:
    """Do what is left of a plan; everything goes on where it was interrupted.

    With `wait`, a run folder that somebody else is working on is waited for.
    """
    from tightrope.certification.certifying import certify
    from tightrope.runs import Run
    from tightrope.study import remaining
    from tightrope.study.margins import estimate_margins, exact_margins, measure_splits
    from tightrope.training.training import train

    run = Run(folder)
    queue = (lambda reason: watch("waiting", 0, 1)) if wait else False
    if "train" in remaining.unfinished(plan, folder):
        train(
            out=folder,
            preset=plan.preset,
            resume=run.config.exists(),
            wait=queue,
            progress=_Epochs(int(plan.wanted().get("epochs", 70)), watch),
            **{**plan.settings, "seed": plan.seed},
        )
    if "certify" in remaining.unfinished(plan, folder):
        certify(
            run,
            jobs=threads,
            **plan.certify,
            wait=queue,
            progress=lambda s: watch("certify", s.samples - s.open, s.samples),
        )
    if not remaining.unfinished(plan, folder):
        return
    with run.lock("reproduce", queue):
        todo = remaining.unfinished(plan, folder)  # who had the lock may have done it
        if "estimate" in todo:
            options = remaining.estimate_settings(plan)
            estimate_margins(run, options, lambda *counts: watch("estimate", *counts))
        if "exact" in todo:
            counts = plan.exact["samples"], plan.exact["milp"]
            options = remaining.exact_settings(plan)
            exact_margins(run, options, *counts, lambda *done: watch("exact", *done))
        if "splits" in todo:
            options = remaining.split_settings(plan)
            measure_splits(run, options, lambda *counts: watch("splits", *counts))


class _Epochs:
    """Counts the epochs of a training."""

    def __init__(self, epochs: int, watch: Watch) -> None:
        self.epochs, self.watch = epochs, watch

    def step(self, epoch: int, iteration: int, result: Any, radius: float) -> None:
        """Do nothing: once per epoch is enough."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Report an epoch."""
        self.watch("train", record["epoch"] + 1, self.epochs)


def main() -> int:
    """Carry out the plan on standard input."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    threads = int(request["threads"])
    torch.set_num_threads(threads)
    try:
        plan = Plan.from_json(request["plan"])
        folder, wait = Path(request["folder"]), bool(request.get("wait"))
        carry_out(plan, folder, threads=threads, wait=wait, watch=_report)
    except UserError as error:
        text = " ".join(str(error).split())
        # `reproduce` itself overwrites nothing.
        hint = f"; here: remove {request['folder']}" if "--force" in text else ""
        _say({"error": text + hint})
        return 1
    except Exception as error:
        traceback.print_exc()
        _say({"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]})
        return 1
    return 0


def _report(part: str, done: int, total: int) -> None:
    _say({"part": part, "done": done, "total": total})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """Wait for the end of standard input, then end this process, whatever it is doing."""
    while sys.stdin.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    # Threads of libraries that are still at work must not keep the process alive.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
