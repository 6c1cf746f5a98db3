"""Everything a report shows of one run folder, read as far as it can be read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from tightrope.errors import UserError
from tightrope.page.content import Contents, Epoch, Skipped
from tightrope.page.contents.certificate import Reading, known_norm, read_certification
from tightrope.page.contents.commands import repeat_commands
from tightrope.page.contents.gallery import OTHER_DATA, Pictures
from tightrope.page.contents.votes import read_votes
from tightrope.page.numbers import count, percent
from tightrope.reading import MADE_WITH, flatten
from tightrope.runs import Run
from tightrope.runs.config import Config, read_config, unknown_settings
from tightrope.runs.found import read_result
from tightrope.runs.history import read_history
from tightrope.runs.summary import LARGEST


def read_contents(run: Run, pictures: Pictures) -> Contents | Skipped:
    """Read a run folder; `Skipped` if there is nothing in it to show."""
    folder = str(run.folder)
    if not run.folder.is_dir():
        return Skipped(folder, "not a folder; give the --out of a training run")
    if not any(f.exists() for f in (run.config, run.history_file, run.journal, run.certification)):
        empty = not any(run.folder.iterdir())
        return Skipped(folder, "empty" if empty else "not a run folder: it has no config.toml")
    table, settings, notices = _read_settings(run)
    raw = flatten(table)
    found = read_history(run.history_file)
    history = [Epoch(number, _numbers(record)) for number, record in enumerate(found.content)]
    reading = read_certification(run)
    brought = "network" in reading.settings and not run.config.exists()
    if brought:  # not trained here: what is known of it is what it was certified with
        raw, module = _brought(reading.settings), None
        notices, more = [], list[str]()
    else:
        module, more = _read_network(run, settings, len(history), reading)
    further, unread = _further(run)
    votes, strange = read_votes(run.smoothing)
    # The size of a change is that of a pixel, which radii of other norms say nothing about.
    eps = None if known_norm(reading.settings) else reading.settings.get("eps")
    gallery = pictures.gallery(run, raw, reading.samples, module, eps)
    if gallery.problem == OTHER_DATA:
        text = "the certification is of other samples than those in the data set"
        more.append(f"{text}; certify again with --force")
    notices += found.notices + more + list(reading.notices) + unread + strange
    within = re.compile(rf"(?<![\w./-]){re.escape(folder)}/")  # and not another folder of that name
    notices = [within.sub("", notice) for notice in notices]
    if not raw and not history and reading.certificate is None:
        return Skipped(folder, "; ".join(notices))
    return Contents(
        name=run.folder.name or folder,
        folder=folder,
        settings={name: _text(value) for name, value in {**raw, **_made_with(table)}.items()},
        history=tuple(history),
        annealing=_annealing(settings, history),
        certificate=reading.certificate,
        votes=votes,
        samples=reading.samples,
        gallery=gallery,
        commands=repeat_commands(table if settings else None, run.folder, reading.settings),
        further=further,
        notices=tuple(notices),
    )


def _read_settings(run: Run) -> tuple[dict[str, Any], Config | None, list[str]]:
    """Return what config.toml says, and the settings it means if this version knows them all."""
    found = read_config(run.config)
    strange = unknown_settings(flatten(found.content))
    if found.damage is not None:
        return {}, None, found.notices
    if strange:
        names = ", ".join(strange[:5])
        text = f"config.toml has settings that this version does not know ({names})"
        return found.content, None, [f"{text}: a newer version wrote it, or another method"]
    try:
        return found.content, Config.of(found.content), []
    except UserError as error:
        return found.content, None, [f"{run.config}: {error}"]


def _brought(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a network that was trained elsewhere, and of its samples."""
    return {
        name: settings[name]
        for name in ("network", "data", "shape", "domain")
        if settings.get(name)
    }


def _made_with(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run was made with, by the names that the page shows."""
    values = table.get(MADE_WITH)
    shown = values.items() if isinstance(values, Mapping) else ()
    return {f"{MADE_WITH}.{name}": value for name, value in shown if name != "command"}


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in record.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST


def _read_network(
    run: Run, settings: Config | None, trained: int, reading: Reading
) -> tuple[nn.Module | None, list[str]]:
    """Return the network if it is there and belongs to the results beside it."""
    notices = []
    if settings is not None and trained < settings.epochs:
        notices.append(f"the training is not finished: {trained} of {settings.epochs} epochs")
    if not run.weights.exists():
        return None, [*notices, "there is no trained network yet"]
    try:
        changed = run.changes(reading.settings)
        if changed:
            text = f"the certification is of other {' and '.join(changed)} than in the folder"
            return None, [*notices, f"{text}; certify again with --force"]
        return (None if settings is None else run.network()[0]), notices
    except UserError as error:
        return None, [*notices, str(error)]
    except OSError as error:
        return None, [*notices, f"the network cannot be read: {error.strerror}"]


def _annealing(settings: Config | None, history: list[Epoch]) -> tuple[int, int] | None:
    """Return the epochs between which the radius grows; the history shows it, too."""
    table = {} if settings is None else settings.table
    start, length = (table.get(name) for name in ("warmup_epochs", "annealing_epochs"))
    if type(start) is int and type(length) is int:
        return (start, start + length) if length > 0 else None
    radii = [epoch.values.get("radius", 0.0) for epoch in history]
    growing = [i for i, radius in enumerate(radii) if 0 < radius < max(radii)]
    return (growing[0], growing[-1] + 1) if growing else None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return str(value)


def _further(run: Run) -> tuple[dict[str, str], list[str]]:
    """Return the results of `attack` and `estimate`, and what of them cannot be read."""
    results: dict[str, str] = {}
    notices: list[str] = []
    sources = (
        (run.attack, {"adversarial": "under attack"}),
        (run.estimate, {"pgd": "PGD", "sabr": "SABR box", "taps": "TAPS", "ibp": "IBP"}),
    )
    for path, columns in sources:
        if not path.exists():
            continue
        result = read_result(path, "a result")
        notices += result.notices
        if result.damage is not None:
            continue
        found = result.content
        if not all(_is_number(found.get(column)) for column in columns):
            notices.append(f"{path.name} is damaged: its numbers are missing")
        for column, name in columns.items():
            if _is_number(found.get(column)):
                results[f"{name}{_where(found)}"] = percent(float(found[column]))
    return results, notices


def _where(values: Mapping[str, Any]) -> str:
    settings = values.get("settings")
    table = settings if isinstance(settings, Mapping) else {}
    eps, norm = table.get("eps"), known_norm(table)
    samples = values.get("samples")
    parts = [f"{count(samples)} samples"] if type(samples) is int else []
    parts += [f"ε {eps} ({norm})" if norm else f"ε {eps}"] if eps is not None else []
    return f" ({', '.join(parts)})" if parts else ""
