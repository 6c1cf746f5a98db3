"""What is left to do of a plan, told from the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightrope import data
from tightrope.errors import UserError
from tightrope.radius import format_radius, parse_radius
from tightrope.runs.examination import load_data
from tightrope.runs.folder import ESTIMATED, EXACT, SPLITS, Run
from tightrope.runs.found import read_objects, read_result
from tightrope.runs.journal import read_journal
from tightrope.study.plans import Plan
from tightrope.training.settings import Settings

EXAMINED = ("certify", "estimate", "exact", "splits")


def unfinished(plan: Plan, folder: Path) -> list[str]:
    """Return which parts of a plan are still to be done, in order."""
    run = Run(folder)
    if not _trained(plan, run):
        return ["train", *(["smooth"] if plan.smooth else EXAMINED)]
    if plan.smooth:
        return [] if _smoothed(plan, run) else ["smooth"]
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
        stored = run.values()
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
    asked = {k: v for k, v in wanted.items() if v is not None}
    return "norm" not in settings and _same(settings, run, asked) and _same_samples(run)


def _same_samples(run: Run) -> bool:
    """Return whether the samples certified are still those of the data, if it is the user's own."""
    settings = run.settings()
    if settings.data in data.dataset_names() or not run.journal.exists():
        return True
    try:
        records = read_journal(run.journal).whole()
        known = {r.index: r.fingerprint for r in records if r.fingerprint is not None}
        return load_data(settings.data, settings.data_dir).changed_sample(known) is None
    except UserError:
        return False  # certifying will say what is wrong


def _smoothed(plan: Plan, run: Run) -> bool:
    samples = read_result(run.smoothing, "a measurement").content.get("samples")
    return _same({**_settings(run.smoothing), "samples": samples}, run, plan.smooth)


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
    found = read_objects(path)
    if found.damage is not None:
        return False  # computing it will say what is wrong
    header, *records = found.content or [{}]
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
    found = read_result(path, "a measurement").content
    settings = found.get("settings")
    done = found.get("complete") or not complete
    return settings if done and isinstance(settings, dict) else {}


def _same(settings: Mapping[str, Any], run: Run, wanted: Mapping[str, Any]) -> bool:
    try:
        known = settings.get("weights") is not None and not run.changes(settings)
    except UserError:
        return False  # what reads the network will say what is wrong
    return known and all(settings.get(name) == value for name, value in wanted.items())
