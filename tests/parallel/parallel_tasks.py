"""Tasks that workers can import: they die, fail or have workers of their own, as asked."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hangs import PATIENCE

from tightrope.errors import UserError
from tightrope.parallel import Send, Watcher, run_in_processes


@dataclass(frozen=True)
class Item:
    """A number, and how many workers die of it, or what error they end with."""

    number: int
    deaths: int = 0
    error: str = ""

    def __str__(self) -> str:
        return f"number {self.number}"


@dataclass
class Squares:
    """Sends a number, then returns its square. Each worker notes when it sets up."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / f"worker-{os.getpid()}").touch()

    def __call__(self, item: Item, send: Send) -> int:
        send((item.number, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]))
        tried = len(list(self.folder.glob(f"tried-{item.number}-*")))
        (self.folder / f"tried-{item.number}-{tried}").touch()
        if tried < item.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        if item.error:
            raise (UserError if item.error == "user" else KeyError)(item.error)
        return item.number**2


@dataclass
class Nested:
    """Hands its items to workers of its own."""

    folder: Path

    def __call__(self, item: Item, send: Send) -> int:
        seen = Seen()
        items = [Item(item.number), Item(item.number + 1)]
        run_in_processes(partial(Squares, self.folder), items, seen, workers=1, threads=1)
        return sum(seen.results.values())


@dataclass
class Cards:
    """Sends who it is, and which GPUs it sees, once as many workers as were hoped for are there."""

    folder: Path
    hoped: int

    def __post_init__(self) -> None:
        (self.folder / f"worker-{os.getpid()}").touch()

    def __call__(self, item: Item, send: Send) -> int:
        end = time.monotonic() + PATIENCE
        while len(list(self.folder.iterdir())) < self.hoped and time.monotonic() < end:
            time.sleep(0.05)
        send((item.number, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")))
        return 0


def unable() -> Any:
    """Fail before the first item."""
    raise FileNotFoundError(2, "No such file or directory", "weights")


@dataclass
class Seen(Watcher[Item]):
    """Notes everything."""

    given: list[int] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    results: dict[int, int] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def give(self, item: Item) -> Item:
        self.given.append(item.number)
        return item

    def message(self, item: Item, message: Any) -> None:
        assert message[0] == item.number
        self.messages.append(message)

    def finished(self, item: Item, result: int) -> None:
        self.results[item.number] = result

    def failed(self, item: Item, error: Exception) -> None:
        self.errors[item.number] = error
