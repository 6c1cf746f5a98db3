"""A run is a folder: where each file of it is, and how to read them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tightrope import nets
from tightrope.errors import UserError
from tightrope.files import remove_leftovers, write_text
from tightrope.training.settings import Settings, read_toml


@dataclass(frozen=True)
class Run:
    """A run folder. Making this object touches no file."""

    folder: Path

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

    @property
    def attack(self) -> Path:
        """The result of `tightrope attack`."""
        return self.folder / "attack.json"

    @property
    def estimate(self) -> Path:
        """The result of `tightrope estimate`."""
        return self.folder / "estimate.json"

    def settings(self) -> Settings:
        """Read the settings of the training."""
        self.check()
        try:
            settings = Settings.parse(read_toml(self.config))
            nets.find(settings.net)
            return settings
        except UserError as error:
            raise UserError(f"{self.config}: {error}") from None

    def network(self) -> tuple[nn.Module, nets.Architecture]:
        """Read the selected network, in evaluation mode."""
        self.check()
        if not self.weights.exists():
            raise UserError(f"{self.folder} has no trained network yet; train it first")
        module, architecture = nets.load(self.folder)
        settings = self.settings()
        configured = {name: getattr(settings, name) for name in architecture.arguments}
        if settings.net != architecture.name or configured != dict(architecture.arguments):
            raise UserError(
                f"{self.folder} holds another network: config.toml describes {settings.net} "
                f"{configured}, model.json {architecture.name} {dict(architecture.arguments)}"
            )
        return module, architecture

    def fingerprint(self) -> str:
        """Return a hash of the selected weights, by which results know their network."""
        return hashlib.sha256(self.weights.read_bytes()).hexdigest()[:16]

    def history(self) -> list[dict[str, Any]]:
        """Return the epochs trained so far."""
        if not self.history_file.exists():
            return []
        records: list[dict[str, Any]] = []
        text = self.history_file.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines()):
            try:
                records.append(json.loads(line))
                if records[number]["epoch"] != number:
                    raise ValueError
            except (ValueError, TypeError, KeyError):
                raise UserError(
                    f"{self.history_file} is damaged at line {number + 1}; train again with --force"
                ) from None
        return records

    def write_history(self, records: list[dict[str, Any]]) -> None:
        """Write the epochs trained so far."""
        write_text(self.history_file, "".join(json.dumps(record) + "\n" for record in records))

    def check(self) -> None:
        """Refuse a folder that is not a run."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder} is not a folder; give the --out of a training run")
        if not self.config.exists():
            raise UserError(f"{self.folder} is not a run folder: it has no config.toml")

    def tidy(self) -> None:
        """Remove what a killed process left half-written."""
        for folder in (self.folder, self.counterexamples):
            remove_leftovers(folder)

    def clear(self) -> None:
        """Remove the files of an earlier run from the folder, except its settings."""
        self.clear_certification()
        files = (self.checkpoint, self.history_file, self.weights, self.attack, self.estimate)
        for path in (*files, self.folder / nets.ARCHITECTURE_FILE):
            path.unlink(missing_ok=True)

    def clear_certification(self) -> None:
        """Remove the certification of an earlier run."""
        self.journal.unlink(missing_ok=True)
        self.certification.unlink(missing_ok=True)
        if self.counterexamples.is_dir():
            for path in self.counterexamples.glob("*.npy"):
                path.unlink()
            if not any(self.counterexamples.iterdir()):
                self.counterexamples.rmdir()


def open_run(run: Run | str | Path) -> Run:
    """Return the run of a folder."""
    return run if isinstance(run, Run) else Run(Path(run))
