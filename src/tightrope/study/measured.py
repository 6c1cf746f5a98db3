"""What is known of runs, read from their folders."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tightrope.errors import UserError
from tightrope.runs.folder import ESTIMATED, EXACT, SPLITS, Run
from tightrope.runs.found import read_objects, read_result
from tightrope.runs.history import total
from tightrope.runs.summary import Certification
from tightrope.study.experiment import Claim, Verdict
from tightrope.training.settings import Settings, stored_settings

Array = np.ndarray


class Missing(Exception):
    """A measurement is not there; the text says which and why."""


class Damaged(Missing):
    """A measurement is there, but nobody can tell what it says."""


class Measured:
    """One run folder; every reader raises `Missing` if what it needs is not there."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self.name = folder.name

    def _read(self, file: str) -> dict[str, Any]:
        path = self.run.folder / file
        if not path.exists():
            raise Missing(f"{path} is missing (a measurement)")
        with _damaged():
            return read_result(path, "a measurement").whole()

    @cached_property
    def settings(self) -> Settings:
        """The settings of the training."""
        with _damaged():
            return stored_settings(self.run)

    @cached_property
    def certification(self) -> dict[str, Any]:
        """The summary of a certification that came to its end."""
        found = self._read(self.run.certification.name)
        if found.get("complete") is False:
            raise Missing(f"the certification of {self.name} is not finished")
        try:
            Certification.from_json(found)
        except ValueError as error:
            raise Damaged(f"the certification of {self.name} is damaged: {error}") from None
        with _damaged():
            changed = self.run.changes(found["settings"]) if self.run.weights.exists() else []
        if changed:
            names = " and ".join(changed)
            raise Damaged(f"the certification of {self.name} is of another network: other {names}")
        return found

    @cached_property
    def votes(self) -> dict[str, Any]:
        """What votes under noise say; none of it is a proof."""
        found = self._read(self.run.smoothing.name)
        numbers = [found.get(name) for name in ("accuracy", "abstained", "samples")]
        shares = found.get("certified")
        whole = isinstance(shares, dict) and all(map(_is_number, [*numbers, *shares.values()]))
        if not whole or not isinstance(found.get("settings"), dict):
            raise Damaged(f"the votes of {self.name} are damaged")
        return found

    @cached_property
    def estimates(self) -> dict[str, Any]:
        """The estimated margins: `settings`, and a list of numbers by estimator."""
        found = self._read(ESTIMATED)
        if not all(isinstance(found.get(part), dict) for part in ("settings", "margins")):
            raise Damaged(f"{ESTIMATED} of {self.name} is damaged")
        return found

    def margins(self, estimator: str) -> Array:
        """Return the worst margins `max_i (o_i - o_y)` as an estimator sees them."""
        margins = self.estimates["margins"]
        if estimator not in margins:
            raise Missing(f"{self.name} has no estimates by {estimator}")
        values = margins[estimator]
        if not isinstance(values, list) or not values or not all(map(_is_number, values)):
            raise Damaged(f"{ESTIMATED} of {self.name} is damaged: no margins by {estimator}")
        return np.asarray(values, dtype=float)

    def accuracy(self, estimator: str, samples: int | None = None) -> float:
        """Return the share in % of (the first) samples with a negative worst margin."""
        return 100 * float((self.margins(estimator)[:samples] < 0).mean())

    @cached_property
    def exact(self) -> list[dict[str, Any]]:
        """The exact margins, one record per sample."""
        path = self.run.folder / EXACT
        with _damaged():
            records = read_objects(path).whole("remove it, and it is computed again")[1:]
        if not records:
            raise Missing(f"{self.name} has no exact margins")
        if not all(map(_is_exact, records)):
            raise Damaged(f"{EXACT} of {self.name} is damaged")
        return records

    @cached_property
    def splits(self) -> dict[int, float]:
        """TAPS accuracy in % by the number of ReLUs in the classifier."""
        found = self._read(SPLITS)
        try:
            return {int(k): 100 * float(v) for k, v in found["accuracies"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Damaged(f"{SPLITS} of {self.name} is damaged") from None

    @property
    def natural(self) -> float:
        """Natural accuracy in %, on the samples that were certified."""
        return 100 * float(self.certification["natural"])

    @property
    def adversarial(self) -> float:
        """Accuracy under attack in %."""
        value = self.certification["adversarial"]
        if value is None:
            raise Missing(f"{self.name} was certified without an attack")
        return 100 * float(value)

    @property
    def certified(self) -> float:
        """Certified accuracy in %."""
        return 100 * float(self.certification["certified"])

    @property
    def samples(self) -> int:
        """How many samples were certified."""
        return int(self.certification["samples"])

    @property
    def noise(self) -> float:
        """Two standard errors of the certified accuracy, in points."""
        share = self.certified / 100
        return 200 * math.sqrt(share * (1 - share) / self.samples)

    def certified_by(self, *stages: str) -> float:
        """Return in % what those stages, the first ones of the cascade, certified."""
        table = self.certification["stages"]
        return 100 * sum(table.get(s, {}).get("verified", 0) for s in stages) / self.samples

    @property
    def training_seconds(self) -> float:
        """Seconds of training, without validation."""
        return total(self.history, "seconds")

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The epochs of the training."""
        with _damaged():
            found = self.run.history()
        if not found:
            raise Missing(f"{self.name} is not trained")
        if not all(_is_number(record.get("seconds")) for record in found):
            raise Damaged(f"{self.run.history_file} is damaged: it lacks seconds")
        return found

    @property
    def certify_seconds(self) -> float:
        """Seconds of certification per sample."""
        return float(self.certification["seconds"]) / self.samples


class Measurements:
    """The runs that an analysis may look at, and why others are not there."""

    def __init__(
        self, folder: Path, scale: str = "laptop", failures: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.scale = folder, scale
        self.failures = failures or {}

    def get(self, name: str) -> Measured | None:
        """Return a finished run, None if it is missing or failed."""
        if name in self.failures or not (self.folder / name).is_dir():
            return None
        return Measured(self.folder / name)

    def tried(self, name: str) -> bool:
        """Return whether a run was begun, whatever came of it."""
        return name in self.failures or (self.folder / name).is_dir()

    def __iter__(self) -> Iterator[Measured]:
        """All runs there are."""
        if self.folder.is_dir():
            for path in sorted(self.folder.iterdir()):
                if (path / "config.toml").exists() and path.name not in self.failures:
                    yield Measured(path)

    def value(self, name: str, read: Callable[[Measured], Any]) -> Any:
        """Return a number of a run, None if it is missing."""
        run = self.get(name)
        try:
            return None if run is None else read(run)
        except Missing:
            return None

    def values(self, names: Sequence[str], read: Callable[[Measured], float]) -> list[float]:
        """Return a number of each run that is there."""
        return [value for name in names if (value := self.value(name, read)) is not None]

    def mean(self, names: Sequence[str], read: Callable[[Measured], float]) -> float | None:
        """Return the mean over the runs that are there, None if there are none."""
        values = self.values(names, read)
        return statistics.fmean(values) if values else None

    def deviation(self, names: Sequence[str], read: Callable[[Measured], float]) -> float | None:
        """Return the standard deviation over the runs that are there, None for a single one."""
        values = self.values(names, read)
        return statistics.stdev(values) if len(values) > 1 else None

    def reason(self, name: str) -> str:
        """Say why a run is not there."""
        if name in self.failures:
            return f"run {name} failed: {self.failures[name]}"
        return f"run {name} was not made"

    def judge(
        self,
        text: str,
        where: str,
        names: Sequence[str],
        test: Callable[..., tuple[bool, str]],
    ) -> Claim:
        """Test a claim on some runs; `test` gets them and returns the answer and its numbers."""
        runs = [self.get(name) for name in names]
        for name, run in zip(names, runs, strict=True):
            if run is None:
                return Claim(text, where, Verdict.UNTESTED, self.reason(name))
        try:
            holds, evidence = test(*runs)
        except Missing as missing:
            return Claim(text, where, Verdict.UNTESTED, str(missing))
        return Claim(text, where, Verdict.HOLDS if holds else Verdict.FAILS, evidence)


@contextmanager
def _damaged() -> Iterator[None]:
    """Turn what cannot be read into `Damaged`."""
    try:
        yield
    except UserError as error:
        raise Damaged(str(error)) from None
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_exact(record: Mapping[str, Any]) -> bool:
    """Return whether a record brackets a worst margin."""
    return (
        _is_count(record.get("index"))
        and isinstance(record.get("by"), str)
        and all(_is_number(record.get(end)) for end in ("lower", "upper"))
    )


def over_seeds(values: Sequence[float]) -> str:
    """Return mean and standard deviation as text, a single value alone."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def doubt(groups: Iterable[Sequence[float]]) -> str:
    """Return what the seeds leave open about means that are compared, as text to append."""
    groups = list(groups)
    if min(map(len, groups)) < 2:
        return " (one seed each)" if max(map(len, groups)) < 2 else ""
    means = list(map(statistics.fmean, groups))
    if max(means) - min(means) < max(map(statistics.stdev, groups)):
        return " (within the deviation over seeds)"
    return ""
