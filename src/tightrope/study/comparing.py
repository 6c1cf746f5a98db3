"""`tightrope.compare`: several methods on equal data, schedule and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tightrope.certification.certifying import certify
from tightrope.errors import UserError, shorten
from tightrope.files import refuse_links, write_json
from tightrope.page.scatter import Point, draw_scatter
from tightrope.runs import Run
from tightrope.runs.examination import choose_samples
from tightrope.runs.lock import Wait
from tightrope.training.estimating import estimate
from tightrope.training.objectives import find_method, section
from tightrope.training.settings import flatten
from tightrope.training.trainer import Progress
from tightrope.training.training import check_training, train

MOST_SEEDS = 1000
COLUMNS = ("natural", "adversarial", "taps", "certified", "seconds")


@dataclass(frozen=True)
class Entry:
    """One method: its runs, and the values of each column over the seeds."""

    method: str
    runs: list[str]
    values: dict[str, list[float]]
    errors: list[str] = field(default_factory=list)

    def mean(self, column: str) -> float | None:
        """Return the mean over the seeds."""
        values = self.values[column]
        return statistics.fmean(values) if values else None

    def deviation(self, column: str) -> float | None:
        """Return the standard deviation over the seeds, if there are several."""
        values = self.values[column]
        return statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`; accuracies on the same `samples` test samples.

    TAPS accuracy is that of one split for all: the one with `classifier_relus` ReLUs in the
    classifier, the fewest that the network allows if None.
    """

    samples: int | None
    entries: list[Entry]
    folder: str
    picture: str | None = None
    classifier_relus: int | None = None

    def entry(self, method: str) -> Entry:
        """Return the entry of a method."""
        return next(entry for entry in self.entries if entry.method == method)


def compare(
    methods: Sequence[str],
    *,
    out: str | Path,
    seeds: int = 1,
    samples: int | None = 1000,
    preset: str | None = None,
    wait: Wait = False,
    watch: Callable[[str, int], Progress | None] = lambda method, seed: None,
    **settings: Any,
) -> Comparison:
    """Train and certify `methods` with the same settings and seeds 0, 1, ... .

    Each run lies in `out/METHOD-SEED`; finished ones are used again, interrupted ones continue.
    `settings` are those of `train`, options of a method (`taps={"weight": 2}`) going to that
    method only; a `preset` may contain `{method}`. Accuracies are those of `certify` and
    `estimate` (TAPS, with the largest classifier that one of them is trained with) on the first
    `samples` test samples, all of them if None. Bad settings of any method are refused before
    the first training. A run that fails is reported in its entry and does not stop the others;
    so is one that another command is working on, unless `wait` queues for it.
    `watch(method, seed)` may return a progress display for a training. Writes
    `comparison.json` and `figures/comparison.png`.
    """
    out, flat = Path(out), flatten(settings)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder as --out")
    refuse_links(out, ("comparison.json", "figures"))
    refuse_links(out / "figures")
    _check(methods, seeds, flat)
    asked = {
        (method, seed): {
            "out": out / f"{method}-{seed}",
            "preset": None if preset is None else preset.replace("{method}", method),
            "method": method,
            "resume": Run(out / f"{method}-{seed}").config.exists(),
            **_settings_of(method, flat),
            "seed": seed,
        }
        for method in methods
        for seed in range(seeds)
    }
    relus = _check_runs(list(asked.values()), samples)
    entries = []
    for method in methods:
        entry = Entry(method, [], {column: [] for column in COLUMNS})
        for seed in range(seeds):
            run = Run(out / f"{method}-{seed}")
            try:
                train(progress=watch(method, seed), wait=wait, **asked[method, seed])
                values = _measure(run, samples, relus, wait)
            except UserError as error:
                entry.errors.append(f"{run.folder}: {error}")
                continue
            entry.runs.append(str(run.folder))
            for column, value in zip(COLUMNS, values, strict=True):
                entry.values[column].append(value)
        entries.append(entry)
    picture = draw_scatter(_points(entries), out / "figures" / "comparison.png")
    drawn = None if picture is None else str(picture)
    result = Comparison(samples, entries, str(out), drawn, relus)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "comparison.json", asdict(result))
    return result


def _points(entries: Sequence[Entry]) -> list[Point]:
    points = []
    for entry in entries:
        natural, adversarial, certified = (
            entry.mean(column) for column in ("natural", "adversarial", "certified")
        )
        if natural is not None and adversarial is not None and certified is not None:
            deviations = entry.deviation("natural"), entry.deviation("certified")
            points.append(Point(entry.method, natural, adversarial, certified, *deviations))
    return points


def _check(methods: Sequence[str], seeds: int, settings: dict[str, Any]) -> None:
    for method in methods:
        find_method(method)
    if not methods or len({*methods}) < len(methods):
        raise UserError("methods must be different names, for instance ibp,taps")
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"seeds must lie in [1, {MOST_SEEDS}], got {shorten(seeds)}")
    if "seed" in settings or "method" in settings:
        raise UserError("compare sets method and seed itself: use methods and seeds")
    sections = {section(method) for method in methods}
    for name in settings:
        head, dot, _ = name.partition(".")
        if dot and head not in sections:
            raise UserError(f"{name} belongs to none of the methods {', '.join(methods)}")


def _check_runs(asked: Sequence[dict[str, Any]], samples: int | None) -> int | None:
    """Refuse what a training would refuse; return the split to estimate TAPS accuracy with."""
    splits = set()
    for arguments in asked:
        settings, dataset = check_training(**arguments)
        choose_samples(dataset, samples)
        splits.add(int(settings.options.get("classifier_relus", 0)))
    return max(splits) or None


def _settings_of(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that concern one method."""
    own = f"{section(method)}."
    return {k: v for k, v in settings.items() if "." not in k or k.startswith(own)}


def _measure(run: Run, samples: int | None, relus: int | None, wait: Wait) -> tuple[float, ...]:
    """Certify a trained run, and return the values of the columns."""
    certified = certify(run, samples=samples, wait=wait)
    latent = estimate(run, samples=samples, classifier_relus=relus, wait=wait)
    adversarial = certified.adversarial
    assert adversarial is not None
    return certified.natural, adversarial, latent.taps, certified.certified, run.training_seconds()
