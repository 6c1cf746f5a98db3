"""Making runs on machines that share no disk: what there is of one goes out, all of it comes back.

The machine makes the run in a folder that is gone afterwards. Only this process writes to the run
folders that users see.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from tightrope.errors import UserError
from tightrope.parallel import Send, Watcher
from tightrope.parallel.task import Item
from tightrope.runs import Run
from tightrope.runs.lock import Wait
from tightrope.runs.transport import Files, digest, pack, unpack

# Makes a run in a folder.
Make = Callable[[Item, Path, Send], Any]


@dataclass(frozen=True)
class Errand(Generic[Item]):
    """An item on its way out, with the files that there are of its run."""

    item: Item
    name: str
    files: Files


@dataclass(frozen=True)
class Return:
    """What came of an item, and the files of its run."""

    result: Any
    files: Files


class Traveller(Generic[Item]):
    """The work on another machine."""

    def __init__(self, make: Make[Item]) -> None:
        self.make = make

    def __call__(self, errand: Any, send: Send) -> Return:
        """Make a run from what there is of it: an `Errand`."""
        with tempfile.TemporaryDirectory(prefix="tightrope-") as scratch:
            run = Run(Path(scratch) / errand.name)
            unpack(run, errand.files)
            result = self.make(errand.item, run.folder, send)
            return Return(result, pack(run))


class Home(Watcher[Item]):
    """Sends items out with their runs, and writes down what comes back, for another watcher."""

    def __init__(self, watcher: Watcher[Item], folder: Callable[[Item], Path], wait: Wait) -> None:
        self.watcher, self.folder, self.wait = watcher, folder, wait
        self.sent: dict[Path, str] = {}

    def give(self, item: Item) -> Any:
        """Pack what there is of a run."""
        folder = self.folder(item)
        files = pack(Run(folder))
        self.sent[folder] = digest(files)
        return Errand(self.watcher.give(item), folder.name, files)

    def message(self, item: Item, message: Any) -> None:
        """Pass on a message."""
        self.watcher.message(item, message)

    def finished(self, item: Item, result: Return) -> None:
        """Write down a run, unless somebody has changed it meanwhile."""
        run = Run(self.folder(item))
        try:
            with run.lock("compare", self.wait):
                if digest(pack(run)) != self.sent[run.folder]:
                    raise UserError(f"{run.folder} was changed while its run was made elsewhere")
                unpack(run, result.files)
        except UserError as error:
            self.watcher.failed(item, error)
        else:
            self.watcher.finished(item, result.result)

    def failed(self, item: Item, error: Exception) -> None:
        """Pass on an error."""
        self.watcher.failed(item, error)
