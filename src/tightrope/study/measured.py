"""What is known of runs, read from their folders."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tightrope.errors import UserError
from tightrope.files import read_json
from tightrope.radius import format_radius, parse_radius
from tightrope.runs import Run
from tightrope.study.experiment import Claim, Verdict
from tightrope.study.plans import Plan
from tightrope.training.settings import Settings, read_toml

ESTIMATED, EXACT, SPLITS = "margins.json", "exact.jsonl", "splits.json"
Array = np.ndarray
_SUMMARY = {"samples", "natural", "adversarial", "certified", "unknown", "stages", "seconds"}
_SUMMARY |= {"complete", "settings"}


class Missing(Exception):
    """A measurement is not there; the text says which and why."""


class Measured:
    """One run folder; every reader raises `Missing` if what it needs is not there."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self.name = folder.name

    def _read(self, file: str) -> Any:
        try:
            return read_json(self.run.folder / file, "a measurement")
        except UserError as error:
            raise Missing(str(error)) from None

    @cached_property
    def settings(self) -> Settings:
        """The settings of the training."""
        try:
            return self.run.settings()
        except UserError as error:
            raise Missing(str(error)) from None

    @cached_property
    def certification(self) -> dict[str, Any]:
        """The summary of a certification that came to its end."""
        found = self._read(self.run.certification.name)
        if not isinstance(found, dict) or not set(found) >= _SUMMARY:
            raise Missing(f"the certification of {self.name} is damaged")
        if not found.get("complete"):
            raise Missing(f"the certification of {self.name} is not finished")
        return found

    @cached_property
    def estimates(self) -> dict[str, Any]:
        """The estimated margins: `settings`, and a list of numbers by estimator."""
        found = self._read(ESTIMATED)
        parts = [found.get(n) for n in ("settings", "margins")] if isinstance(found, dict) else [0]
        if not all(isinstance(part, dict) for part in parts):
            raise Missing(f"{ESTIMATED} of {self.name} is damaged")
        return found

    def margins(self, estimator: str) -> Array:
        """Return the worst margins `max_i (o_i - o_y)` as an estimator sees them."""
        margins = self.estimates["margins"]
        if estimator not in margins:
            raise Missing(f"{self.name} has no estimates by {estimator}")
        return np.asarray(margins[estimator], dtype=float)

    def accuracy(self, estimator: str, samples: int | None = None) -> float:
        """Return the share in % of (the first) samples with a negative worst margin."""
        return 100 * float((self.margins(estimator)[:samples] < 0).mean())

    @cached_property
    def exact(self) -> list[dict[str, Any]]:
        """The exact margins, one record per sample."""
        path = self.run.folder / EXACT
        try:
            records = read_lines(path)[1:] if path.exists() else []
        except UserError as error:
            raise Missing(str(error)) from None
        if not records:
            raise Missing(f"{self.name} has no exact margins")
        return records

    @cached_property
    def splits(self) -> dict[int, float]:
        """TAPS accuracy in % by the number of ReLUs in the classifier."""
        found = self._read(SPLITS)
        try:
            return {int(k): 100 * v for k, v in found["accuracies"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Missing(f"{SPLITS} of {self.name} is damaged") from None

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
        return float(sum(record["seconds"] for record in self.history))

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The epochs of the training."""
        try:
            found = self.run.history()
        except UserError as error:
            raise Missing(str(error)) from None
        if not found:
            raise Missing(f"{self.name} is not trained")
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


def over_seeds(values: Sequence[float]) -> str:
    """Return mean and standard deviation as text, a single value alone."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a .jsonl file, without a last line that a kill left torn."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        records = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
    except ValueError:
        raise UserError(f"{path} is damaged; remove it, and it is computed again") from None
    return records


# --- is there anything left to do? --------------------------------------------------------------


def unfinished(plan: Plan, folder: Path) -> list[str]:
    """Return which parts of a plan are still to be done, in order."""
    run = Run(folder)
    if not _trained(plan, run):
        return ["train", "certify", "estimate", "exact", "splits"]
    checks = {
        "certify": _certified,
        "estimate": _estimated,
        "exact": _exact,
        "splits": _split,
    }
    return [part for part, done in checks.items() if not done(plan, run)]


def _trained(plan: Plan, run: Run) -> bool:
    if not (run.config.exists() and run.weights.exists() and run.checkpoint.exists()):
        return False
    try:
        stored = read_toml(run.config)
        before = Settings.parse(stored)
        wanted = Settings.parse({**stored, **plan.wanted()})
        return wanted.to_table() == before.to_table() and len(run.history()) == before.epochs
    except UserError:
        return False  # the training will say what is wrong


def _certified(plan: Plan, run: Run) -> bool:
    settings = _settings(run.certification, complete=True)
    wanted = dict(plan.certify)
    if "eps" in wanted:
        wanted["eps"] = format_radius(parse_radius(wanted["eps"]))
    if "stages" in wanted:
        wanted["stages"] = list(wanted["stages"])
    return _same(settings, run, {k: v for k, v in wanted.items() if v is not None})


def _estimated(plan: Plan, run: Run) -> bool:
    return not plan.estimate or _same(
        _settings(run.folder / ESTIMATED), run, estimate_settings(plan)
    )


def _exact(plan: Plan, run: Run) -> bool:
    path = run.folder / EXACT
    if not plan.exact:
        return True
    if not path.exists():
        return False
    try:
        header, *records = read_lines(path) or [{}]
    except UserError:
        return False  # computing it will say what is wrong
    compared = sum("milp" in record for record in records)
    enough = len(records) >= plan.exact["samples"] and compared >= plan.exact["milp"]
    return enough and _same(header, run, exact_settings(plan))


def _split(plan: Plan, run: Run) -> bool:
    return not plan.splits or _same(_settings(run.folder / SPLITS), run, split_settings(plan))


def estimate_settings(plan: Plan) -> dict[str, Any]:
    """Return what estimated margins depend on, apart from the weights."""
    return {"eps": _eps(plan), **{k: _plain(v) for k, v in plan.estimate.items()}}


def exact_settings(plan: Plan) -> dict[str, Any]:
    """Return what exact margins depend on, apart from the weights."""
    return {"eps": _eps(plan)}


def split_settings(plan: Plan) -> dict[str, Any]:
    """Return what accuracies under splits depend on, apart from the weights."""
    return {"eps": _eps(plan), **{k: _plain(v) for k, v in plan.splits.items()}}


def _eps(plan: Plan) -> str:
    return format_radius(parse_radius(plan.certify["eps"]))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _settings(path: Path, *, complete: bool = False) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if complete and not found["complete"]:
            return {}
        return dict(found["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _same(settings: Mapping[str, Any], run: Run, wanted: Mapping[str, Any]) -> bool:
    return settings.get("weights") == run.fingerprint() and all(
        settings.get(name) == value for name, value in wanted.items()
    )
