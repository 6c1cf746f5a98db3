"""`tightrope.reproduce`: a table or figure of the paper, our numbers beside the paper's."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tightrope import data
from tightrope.errors import UserError, shorten, unknown_name
from tightrope.files import refuse_links, remove_leftovers
from tightrope.parallel import choose_engine
from tightrope.runs.found import read_result
from tightrope.study.experiment import SCALES, Experiment, Result
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.measured import Measured, Measurements, Missing
from tightrope.study.output import NAMES, draw, write_result
from tightrope.study.plans import Plan, adjust
from tightrope.study.remaining import unfinished
from tightrope.study.runner import Display, Session, carry_out_all
from tightrope.training.settings import Settings, flatten
from tightrope.version import __version__


def reproduce(
    name: str,
    *,
    scale: str = "laptop",
    out: str | Path | None = None,
    jobs: int | None = None,
    only: str | None = None,
    samples: int | None = None,
    timeout: float | None = None,
    engine: str = "local",
    address: str | None = None,
    gpus_per_task: float = 0.0,
    wait: bool = False,
    display: Display | None = None,
    **settings: Any,
) -> Result:
    """Make the runs of an experiment and say which claims of the paper they bear out.

    Runs lie in `out/runs` and are shared by all experiments there; finished ones are used
    again, interrupted ones continue. Tables, figures and verdicts are in `out/NAME`. `out` is
    by default `runs/reproduce/SCALE`. `jobs` runs are made at a time, each with its part of the
    threads: by default as many as there are cores, on a GPU and at paper scale one; with
    `engine="ray"`, as many as the cluster has room for (see `compare`). `only` is a pattern such
    as `mnist-0.1-*` for the names of runs to make; `samples` and `timeout` limit every
    evaluation. `settings` are those of `train` and go to every run. A run that fails is
    reported, and what depends on it is not tested. So is one that another command is working on,
    unless `wait` queues for it.
    """
    experiment = find_experiment(name)
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    _check(jobs, samples, timeout)
    folder = Path("runs") / "reproduce" / scale if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder as --out")
    refuse_links(folder, ("logs", experiment.name))
    for part in ("logs", experiment.name):
        refuse_links(folder / part)
    as_asked = partial(adjust, settings=flatten(settings), samples=samples, timeout=timeout)
    plans = as_asked(_choose(experiment.plans(scale), only))
    for plan in plans:
        Settings.parse(plan.wanted())  # refuses bad settings before anything is trained
    cluster = choose_engine(engine, address, gpus_per_task, jobs)
    workers = _jobs(jobs, scale, len(plans))
    threads = max(1, torch.get_num_threads() // workers)
    began = time.monotonic()
    how = {"threads": threads, "wait": wait, "display": display, "cluster": cluster}
    many = workers if cluster is None else jobs
    session = carry_out_all(plans, folder, jobs=many, **how)  # type: ignore[arg-type]
    elapsed = time.monotonic() - began
    # The analysis looks at runs of earlier calls, too.
    names = {plan.name for plan in plans}
    plans += [
        plan
        for plan in as_asked(experiment.plans(scale))
        if plan.name not in names and not unfinished(plan, folder / "runs" / plan.name)
    ]
    return _conclude(experiment, scale, folder, plans, session, elapsed)


def find_experiment(name: str) -> Experiment:
    """Return an experiment by name."""
    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def _check(jobs: int | None, samples: int | None, timeout: float | None) -> None:
    for name, value in (("jobs", jobs), ("samples", samples)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {shorten(value)}")
    if timeout is not None and not 0 < timeout < float("inf"):
        raise UserError(f"timeout must be a positive number of seconds, got {timeout}")


def _choose(plans: Sequence[Plan], only: str | None) -> list[Plan]:
    """Return the plans to carry out: those asked for whose data is there, if it may be absent."""
    here = {d.name for d in data.describe() if d.available}
    chosen = [p for p in plans if p.optional is None or p.optional in here]
    if only is None:
        return chosen
    matching = [plan for plan in chosen if fnmatchcase(plan.name, only)]
    if not matching:
        names = ", ".join(plan.name for plan in chosen) or "none"
        raise UserError(f"no run matches {shorten(only)}; the runs are: {names}")
    return matching


def _jobs(jobs: int | None, scale: str, plans: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # One process at a time on a GPU, unless more are asked for.
    default = 1 if scale == "paper" or torch.cuda.is_available() else cores or 1
    return max(1, min(default if jobs is None else jobs, plans))


def _conclude(
    experiment: Experiment,
    scale: str,
    folder: Path,
    plans: Sequence[Plan],
    session: Session,
    elapsed: float,
) -> Result:
    """Analyse what is there and write it down."""
    measurements = Measurements(folder / "runs", scale, session.failures)
    findings = experiment.analyse(measurements)
    home = folder / experiment.name
    if home.is_dir():
        remove_leftovers(home, NAMES, own_folder=True)
    figures = draw(findings.pictures, home)
    result = Result(
        name=experiment.name,
        scale=scale,
        claim=experiment.claim,
        where=experiment.where,
        tables=findings.tables,
        claims=findings.claims,
        failures=session.failures,
        problems=findings.problems,
        figures=tuple(figures or ()),
        folder=str(home),
        record={
            **_record(plans, folder, home, measurements, session, elapsed),
            "plots": figures is not None,
        },
    )
    write_result(result, home)
    return result


def _record(
    plans: Sequence[Plan],
    folder: Path,
    home: Path,
    measurements: Measurements,
    session: Session,
    elapsed: float,
) -> dict[str, Any]:
    """Return what it takes to repeat a result: commands, seeds, versions, seconds."""
    runs = _recorded(home, measurements)
    runs |= {
        plan.name: {
            "seed": plan.seed,
            "commands": plan.commands(folder / "runs" / plan.name),
            "reused": plan.name not in session.seconds,
            **_seconds(measurements.get(plan.name)),
        }
        for plan in plans
    }
    if not runs:
        runs = {run.name: _seconds(run) for run in measurements}
    return {
        "runs": runs,
        "seconds": elapsed,
        "versions": {
            "tightrope": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {"cpus": os.cpu_count()},
    }


def _recorded(home: Path, measurements: Measurements) -> dict[str, Any]:
    """Return what the result before this one says of runs that are still measured.

    Their weights may be elsewhere by now: tables need only the small files of a run folder.
    """
    runs = read_result(home / "table.json", "a result").content.get("runs")
    known = runs if isinstance(runs, dict) else {}
    return {
        name: {**run, "reused": True}
        for name, run in known.items()
        if isinstance(run, dict) and measurements.get(name) is not None
    }


def _seconds(run: Measured | None) -> dict[str, Any]:
    seconds: dict[str, Any] = {}
    if run is not None:
        try:
            seconds["training_seconds"] = run.training_seconds
            seconds["certification_seconds"] = float(run.certification["seconds"])
        except (Missing, UserError):
            pass  # of a run that failed
    return seconds
