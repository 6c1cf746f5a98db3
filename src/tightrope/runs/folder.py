"""A run is a folder: where each file of it is, and how to read them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tightrope import nets
from tightrope.errors import UserError, check_path
from tightrope.files import Folder, is_leftover, remove_leftovers, write_text
from tightrope.limits import WEIGHTS_BYTES
from tightrope.reading import file_hash, flatten
from tightrope.runs import lock
from tightrope.runs.config import Config, read_config
from tightrope.runs.history import read_history, total

# What `reproduce` adds: estimated and exact margins, accuracies under splits.
ESTIMATED, EXACT, SPLITS = "margins.json", "exact.jsonl", "splits.json"
# The hashes by which results know their network.
FINGERPRINTS = ("weights", "architecture", "normalization")
# The names of counterexamples: of test sample 18, `000018.npy`, and `000018-2_255.npy` of a radius
# that is not the folder's own.
_POINT = re.compile(r"[0-9]{6,}(-[-+_.0-9a-z]{1,40})?\.npy")
_LONGEST = 40


@dataclass(frozen=True)
class Run:
    """A run folder. Making this object touches no file."""

    folder: Path

    def __post_init__(self) -> None:
        check_path(self.folder)

    @property
    def config(self) -> Path:
        """The complete settings of the training."""
        return self.folder / "config.toml"

    @property
    def weights(self) -> Path:
        """The selected weights."""
        return self.folder / nets.WEIGHTS_FILE

    @property
    def checkpoint(self) -> Path:
        """The state after the last finished epoch."""
        return self.folder / "checkpoint.pt"

    @property
    def history_file(self) -> Path:
        """One line per epoch."""
        return self.folder / "history.jsonl"

    @property
    def journal(self) -> Path:
        """One line per certified sample."""
        return self.folder / "certification.jsonl"

    @property
    def certification(self) -> Path:
        """The summary of the certification."""
        return self.folder / "certification.json"

    @property
    def counterexamples(self) -> Path:
        """Folder of the counterexamples found."""
        return self.folder / "counterexamples"

    def counterexample(self, index: int, eps: str | None = None) -> Path:
        """The counterexample to a test sample, at a radius other than the folder's own if named."""
        if eps is None:
            return self.counterexamples / f"{index:06d}.npy"
        name = eps.replace("/", "_")
        name = name if len(name) <= _LONGEST else _hash(eps)[:_LONGEST]
        return self.counterexamples / f"{index:06d}-{name}.npy"

    @property
    def attack(self) -> Path:
        """The result of `tightrope attack`."""
        return self.folder / "attack.json"

    @property
    def estimate(self) -> Path:
        """The result of `tightrope estimate`."""
        return self.folder / "estimate.json"

    @property
    def smoothing(self) -> Path:
        """The result of `tightrope smooth`."""
        return self.folder / "smoothing.json"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.folder / "report.html"

    @property
    def tensorboard(self) -> Path:
        """Folder of the curves."""
        return self.folder / "tensorboard"

    def files(self) -> list[str]:
        """Return the names of all files that a run folder may have."""
        trained = (self.config, self.checkpoint, self.history_file, self.weights)
        found = (self.journal, self.certification, self.attack, self.estimate, self.smoothing)
        others = (nets.ARCHITECTURE_FILE, ESTIMATED, EXACT, SPLITS, lock.FILE)
        return [*(path.name for path in (*trained, *found, self.report)), *others]

    def settings(self) -> Config:
        """Read the settings of the training, and check what others than training use of them."""
        self.check()
        table = read_config(self.config).whole()
        try:
            return Config.of(table)
        except UserError as error:
            raise UserError(f"{self.config}: {error}") from None

    def values(self) -> dict[str, Any]:
        """Read the settings of the training as they are, in one flat table."""
        self.check()
        return flatten(read_config(self.config).whole())

    def network(self) -> tuple[nn.Module, nets.Architecture]:
        """Read the selected network, in evaluation mode."""
        self.check()
        if not self.weights.exists():
            raise UserError(f"{self.folder} has no trained network yet; train it first")
        module, architecture = nets.load(self.folder)
        settings = self.settings()
        configured = {name: settings.table.get(name) for name in architecture.arguments}
        if settings.net != architecture.name or configured != dict(architecture.arguments):
            raise UserError(
                f"{self.folder} holds another network: config.toml describes {settings.net} "
                f"{configured}, model.json {architecture.name} {dict(architecture.arguments)}"
            )
        return module, architecture

    def fingerprints(self) -> dict[str, str]:
        """Return the hashes `FINGERPRINTS` of the network."""
        described = nets.load_architecture(self.folder).to_json()
        normalization = described.pop("normalize")
        del described["format"]
        texts = (json.dumps(part, sort_keys=True) for part in (described, normalization))
        hashes = (file_hash(self.weights, WEIGHTS_BYTES), *map(_hash, texts))
        return dict(zip(FINGERPRINTS, (found[:16] for found in hashes), strict=True))

    def changes(self, recorded: Mapping[str, Any]) -> list[str]:
        """Return in what the network differs from the one of the recorded hashes, if they say."""
        known = {name: recorded[name] for name in FINGERPRINTS if recorded.get(name) is not None}
        present = self.fingerprints() if known else {}
        return [name for name, value in known.items() if present[name] != value]

    def history(self) -> list[dict[str, Any]]:
        """Return the epochs trained so far."""
        return read_history(self.history_file).whole("train again with --force")

    def training_seconds(self) -> float:
        """Return how long the training took, as far as the history says; without validation."""
        return total(self.history(), "seconds")

    def validation_seconds(self) -> float:
        """Return how long the validation of the epochs took, as far as the history says."""
        return total(self.history(), "validation_seconds")

    def write_history(self, records: list[dict[str, Any]]) -> None:
        """Write the epochs trained so far."""
        write_text(self.history_file, "".join(json.dumps(record) + "\n" for record in records))

    def check(self) -> None:
        """Refuse a folder that is not a run."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is not a folder; give the --out of a training run")
        if not self.config.exists():
            raise UserError(f"{self.folder} is not a run folder: it has no config.toml")

    @contextmanager
    def lock(self, command: str, wait: lock.Wait = False) -> Iterator[lock.Lock]:
        """Keep other commands out of the folder; it is made if need be.

        Without `wait` a folder in use is refused. So are links in it: we write to our own files
        only. A link to the folder itself is fine.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock.locked(self.folder, command, wait) as held, Folder(self.folder) as folder:
            own = (self.counterexamples.name, self.tensorboard.name)
            folder.refuse_links([*self.files(), *own])
            yield held

    def foreign(self) -> list[str]:
        """Return what is in the folder besides settings, the lock and leftovers of kills."""
        names = self._names()
        known = (self.config.name, lock.FILE)
        found = sorted(path.name for path in self.folder.iterdir())
        return [name for name in found if name not in known and not is_leftover(name, names)]

    def tidy(self) -> None:
        """Remove what a killed process left half-written."""
        remove_leftovers(self.folder, self._names())
        if self.counterexamples.is_dir():
            remove_leftovers(self.counterexamples, _POINT, own_folder=True)

    def clear(self) -> None:
        """Remove the files of an earlier run from the folder, except its settings."""
        self.clear_certification()
        files = (self.checkpoint, self.history_file, self.weights)
        results = (self.attack, self.estimate, self.smoothing)
        for path in (*files, *results, self.folder / nets.ARCHITECTURE_FILE):
            path.unlink(missing_ok=True)

    def clear_certification(self) -> None:
        """Remove the certification of an earlier run."""
        self.journal.unlink(missing_ok=True)
        self.certification.unlink(missing_ok=True)
        if self.counterexamples.is_dir():
            with Folder(self.counterexamples, own=True) as folder:
                for name in filter(_POINT.fullmatch, folder.files()):
                    folder.remove(name)
            if not any(self.counterexamples.iterdir()):
                self.counterexamples.rmdir()

    def _names(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.files())))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def open_run(run: Run | str | Path) -> Run:
    """Return the run of a folder."""
    return run if isinstance(run, Run) else Run(Path(run))
