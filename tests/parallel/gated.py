"""Certification that waits: a test decides when workers go on with what they have in hand."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ray
from hangs import PATIENCE

from tightrope.certification.deciding import Decider
from tightrope.certification.work_items import Batch, Portion
from tightrope.parallel import Send, current_wishes

GATE = "GATE"  # the variable that names the folder of the gate


def folder() -> Path:
    """Return where workers say that they wait."""
    return Path(os.environ[GATE])


class Gated(Decider):
    """Decides the first item at once; before the second it waits until the gate is opened."""

    items = 0

    def __call__(self, item: Portion, send: Send) -> None:
        """Send a record per sample, some time."""
        self.items += 1
        if self.items == 2:
            node = ray.get_runtime_context().get_node_id()
            (folder() / f"{node}-{os.getpid()}").touch()
            end = time.monotonic() + PATIENCE
            while not (folder() / "open").exists() and time.monotonic() < end:
                time.sleep(0.05)
        super().__call__(item, send)


class Patient(Decider):
    """Begins when others are idle and it was wished that it shares: then its search is divided."""

    def __call__(self, item: Portion, send: Send) -> None:
        """Send a record per sample, some time."""
        end = time.monotonic() + PATIENCE
        while isinstance(item, Batch) and not current_wishes().share and time.monotonic() < end:
            time.sleep(0.05)
        super().__call__(item, send)


def pids(node: str) -> list[int]:
    """Return the workers of a node that wait."""
    return [int(path.name.rpartition("-")[2]) for path in folder().glob(f"{node}-*")]


def nodes() -> set[str]:
    """Return the nodes that have workers which wait."""
    return {path.name.partition("-")[0] for path in folder().glob("*-*")}
