"""`tightrope.compare`: several methods on equal data, schedule and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tightrope.certification.certifying import certify
from tightrope.certification.smoothing.smoothing import smooth
from tightrope.errors import UserError, shorten
from tightrope.files import refuse_links, write_json
from tightrope.page.scatter import Point, draw_scatter
from tightrope.parallel import Send, Watcher, choose_engine, run_tasks
from tightrope.runs import Run
from tightrope.runs.examination import choose_samples
from tightrope.runs.lock import Wait
from tightrope.study.afar import Home, Traveller
from tightrope.training.estimating import estimate
from tightrope.training.objectives import Guarantee, find_method, section
from tightrope.training.settings import flatten
from tightrope.training.trainer import Progress
from tightrope.training.training import check_training, train

MOST_SEEDS = 1000
COLUMNS = ("natural", "adversarial", "taps", "certified", "seconds")
TEACHER = ("teacher", "teacher_weights")  # settings of methods that learn from one


@dataclass(frozen=True)
class Entry:
    """One method: its runs, and the values of each column over the seeds.

    Methods whose `guarantee` is probabilistic have other columns than the others: those of their
    votes, with l2 radii.
    """

    method: str
    runs: list[str]
    values: dict[str, list[float]]
    errors: list[str] = field(default_factory=list)
    guarantee: Guarantee = Guarantee.DETERMINISTIC

    def mean(self, column: str) -> float | None:
        """Return the mean over the seeds."""
        values = self.values.get(column)
        return statistics.fmean(values) if values else None

    def deviation(self, column: str) -> float | None:
        """Return the standard deviation over the seeds, if there are several."""
        values = self.values.get(column, [])
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

    def group(self, guarantee: str) -> list[Entry]:
        """Return the entries of the methods with a guarantee."""
        return [entry for entry in self.entries if entry.guarantee == guarantee]


def compare(
    methods: Sequence[str],
    *,
    out: str | Path,
    seeds: int = 1,
    samples: int | None = 1000,
    preset: str | None = None,
    jobs: int | None = None,
    engine: str = "local",
    address: str | None = None,
    gpus_per_task: float = 0.0,
    wait: Wait = False,
    watch: Callable[[str, int], Progress | None] = lambda method, seed: None,
    **settings: Any,
) -> Comparison:
    """Train and certify `methods` with the same settings and seeds 0, 1, ... .

    Each run lies in `out/METHOD-SEED`; finished ones are used again, interrupted ones continue.
    `settings` are those of `train`, options of a method (`taps={"weight": 2}`) going to that
    method only, a `teacher` to those that learn from one; a `preset` may contain `{method}`.
    Accuracies are those of `certify` and
    `estimate` (TAPS, with the largest classifier that one of them is trained with) on the first
    `samples` test samples, all of them if None. Bad settings of any method are refused before
    the first training. A run that fails is reported in its entry and does not stop the others;
    so is one that another command is working on, unless `wait` queues for it. Networks of methods
    with a probabilistic guarantee (`noise`) are smoothed instead of certified, with the draws and
    radii that `smooth` has by default.
    `watch(method, seed)` may return a progress display for a training. `jobs` runs are made at a
    time, in processes that have their part of the threads: the values are the same as far as
    rounding does not depend on the number of threads. With `engine="ray"` a cluster makes them, as
    in `certify`; run folders come back when they are finished, and data sets and the teacher have
    to be found by each machine. Writes `comparison.json` and `figures/comparison.png`.
    """
    out, flat = Path(out), flatten(settings)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder as --out")
    refuse_links(out, ("comparison.json", "figures"))
    refuse_links(out / "figures")
    _check(methods, seeds, flat)
    cluster = choose_engine(engine, address, gpus_per_task, jobs)
    asked = {method: _asked(method, seeds, out, preset, flat) for method in methods}
    runs = [run for several in asked.values() for run in several]
    relus = _check_runs(runs, samples)
    made = _Made(watch, wait)
    maker, local = partial(_Maker, samples, relus), jobs or 1
    if cluster is None:
        threads = max(1, torch.get_num_threads() // local)
        task = partial(maker, bool(wait))
        run_tasks(task, runs, made, workers=min(local, len(runs)), threads=threads)
    else:
        home = Home(made, lambda asked: asked.run.folder, wait)
        away = partial(Traveller, maker(False).make)
        run_tasks(away, runs, home, workers=jobs, cluster=cluster)
    entries = [made.entry(method, several) for method, several in asked.items()]
    picture = draw_scatter(_points(entries), out / "figures" / "comparison.png")
    drawn = None if picture is None else str(picture)
    result = Comparison(samples, entries, str(out), drawn, relus)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "comparison.json", asdict(result))
    return result


@dataclass(frozen=True)
class _Asked:
    """A run that is asked for: the arguments of its training."""

    arguments: dict[str, Any]
    watched: bool = False

    def __str__(self) -> str:
        return str(self.run.folder)

    @property
    def run(self) -> Run:
        return Run(self.arguments["out"])

    @property
    def guarantee(self) -> Guarantee:
        return find_method(self.arguments["method"]).guarantee

    def now(self) -> _Asked:
        """Return it as it is now: a training that has begun is to be resumed."""
        return replace(self, arguments={**self.arguments, "resume": self.run.config.exists()})


def _asked(
    method: str, seeds: int, out: Path, preset: str | None, settings: dict[str, Any]
) -> list[_Asked]:
    """Return the runs of one method."""
    own = f"{section(method)}."
    shared = {
        "preset": None if preset is None else preset.replace("{method}", method),
        "method": method,
        **{k: v for k, v in settings.items() if "." not in k or k.startswith(own)},
    }
    if not _learns(method, settings):
        shared = {k: v for k, v in shared.items() if k not in TEACHER}
    return [
        _Asked({**shared, "out": out / f"{method}-{seed}", "seed": seed}).now()
        for seed in range(seeds)
    ]


class _Maker:
    """Makes runs, in whatever process: train, certify, estimate."""

    def __init__(self, samples: int | None, relus: int | None, wait: bool) -> None:
        self.samples, self.relus, self.wait = samples, relus, wait

    def make(self, asked: _Asked, folder: Path, send: Send) -> dict[str, float]:
        """Make a run in another folder than the one asked for, from what is there."""
        return self(replace(asked, arguments={**asked.arguments, "out": folder}).now(), send)

    def __call__(self, asked: _Asked, send: Send) -> dict[str, float]:
        """Return the values of the columns; send what a display wants to know."""
        relay = _Relay(send)
        wait = self.wait and relay.waiting
        train(progress=relay if asked.watched else None, wait=wait, **asked.arguments)
        probabilistic = asked.guarantee is Guarantee.PROBABILISTIC
        examined = self._smoothed(asked, wait) if probabilistic else self._certified(asked, wait)
        return {**examined, "seconds": asked.run.training_seconds()}

    def _certified(self, asked: _Asked, wait: Wait) -> dict[str, float]:
        certified = certify(asked.run, samples=self.samples, wait=wait)
        latent = estimate(asked.run, samples=self.samples, classifier_relus=self.relus, wait=wait)
        assert certified.adversarial is not None
        return {
            "natural": certified.natural,
            "adversarial": certified.adversarial,
            "taps": latent.taps,
            "certified": certified.certified,
        }

    def _smoothed(self, asked: _Asked, wait: Wait) -> dict[str, float]:
        """Smooth a network with the noise that it was trained with."""
        sigma = asked.run.settings().options["sigma"]
        votes = smooth(asked.run, sigma=sigma, samples=self.samples, wait=wait)
        shares = {f"certified at {radius}": share for radius, share in votes.certified.items()}
        return {"accuracy": votes.accuracy, "abstained": votes.abstained, **shares}


class _Relay:
    """A progress display whose calls are those of another one, in the parent."""

    def __init__(self, send: Send) -> None:
        self.send = send

    def step(self, *values: Any) -> None:
        """Pass on an iteration."""
        self.send(("step", values))

    def epoch(self, *values: Any) -> None:
        """Pass on an epoch."""
        self.send(("epoch", values))

    def waiting(self, *values: Any) -> None:
        """Pass on what is waited for."""
        self.send(("waiting", values))


class _Made(Watcher[_Asked]):
    """Collects what came of the runs, by their folders."""

    def __init__(self, watch: Callable[[str, int], Progress | None], wait: Wait) -> None:
        self.watch, self.wait = watch, wait
        self.displays: dict[str, Progress | None] = {}
        self.values: dict[str, dict[str, float]] = {}
        self.errors: dict[str, str] = {}

    def give(self, asked: _Asked) -> _Asked:
        """Show that a run begins."""
        if str(asked) not in self.displays:
            which = asked.arguments["method"], asked.arguments["seed"]
            self.displays[str(asked)] = self.watch(*which)
        return replace(asked.now(), watched=self.displays[str(asked)] is not None)

    def message(self, asked: _Asked, message: tuple[str, tuple[Any, ...]]) -> None:
        """Show how far a run has come."""
        name, values = message
        if name != "waiting":
            getattr(self.displays[str(asked)], name)(*values)
        elif callable(self.wait):
            self.wait(*values)

    def finished(self, asked: _Asked, result: dict[str, float]) -> None:
        """Note the values of a run."""
        self.values[str(asked)] = result

    def failed(self, asked: _Asked, error: Exception) -> None:
        """Note what a user can mend; the other runs go on."""
        if not isinstance(error, UserError):
            raise error
        self.errors[str(asked)] = f"{asked}: {error}"

    def entry(self, method: str, asked: Sequence[_Asked]) -> Entry:
        """Return the entry of a method."""
        runs = [str(run) for run in asked if str(run) in self.values]
        guarantee = find_method(method).guarantee
        known = () if guarantee is Guarantee.PROBABILISTIC else COLUMNS
        columns = dict.fromkeys((*known, *(c for run in runs for c in self.values[run])))
        values = {column: [self.values[run][column] for run in runs] for column in columns}
        errors = [self.errors[str(run)] for run in asked if str(run) in self.errors]
        return Entry(method, runs, values, errors, guarantee)


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


def _learns(method: str, settings: dict[str, Any]) -> bool:
    """Return whether a teacher has a part in the training of a method."""
    return find_method(method).needs_teacher or settings.get("initialization") == "teacher"


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
        if name in TEACHER and not any(_learns(method, settings) for method in methods):
            known = ", ".join(methods)
            raise UserError(f"none of the methods {known} learns from a teacher: leave out {name}")


def _check_runs(asked: Sequence[_Asked], samples: int | None) -> int | None:
    """Refuse what a training would refuse; return the split to estimate TAPS accuracy with."""
    splits = set()
    for run in asked:
        settings, dataset = check_training(**run.arguments)
        choose_samples(dataset, samples)
        splits.add(int(settings.options.get("classifier_relus", 0)))
    return max(splits) or None
