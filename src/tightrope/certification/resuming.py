"""Going on from what a folder holds of earlier certifications, if it is of the same question."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from tightrope import data
from tightrope.certification.problem import CHOICES
from tightrope.errors import UserError
from tightrope.radius import parse_radius
from tightrope.runs.coverage import FREE, Ranges, asked, places
from tightrope.runs.folder import FINGERPRINTS, Run
from tightrope.runs.journal import Journal, Record
from tightrope.runs.summary import read_summary

AGAIN = "start over with --force"


@dataclass(frozen=True)
class Earlier:
    """The records in a folder, which samples they were to be of, and the folder's own radius."""

    records: list[Record]
    ranges: Ranges
    own: Fraction


def earlier(run: Run, settings: dict[str, Any], dataset: data.Dataset, radius: Fraction) -> Earlier:
    """Return what a folder holds; the radius is its own if it holds nothing yet."""
    if not run.journal.exists() or not run.journal.stat().st_size:
        return Earlier([], {}, radius)
    summary = read_summary(run.certification).whole(AGAIN)
    _check_settings(run, settings, summary["settings"])
    try:
        before = asked(summary["settings"])
        own = parse_radius(summary["settings"]["eps"], largest=None)
    except (ValueError, KeyError) as error:
        raise UserError(f"{run.certification} is damaged: {error}; {AGAIN}") from None
    wanted = {index for parts in before.values() for index in places(parts)}
    records = Journal(run.journal).read(wanted)
    _check_samples(run, records, dataset)
    return Earlier(records, before, own)


def _check_settings(run: Run, settings: dict[str, Any], before: dict[str, Any]) -> None:
    """Refuse to go on with other settings, or with another network, than before."""
    network = [name for name in FINGERPRINTS if before.get(name) not in (None, settings[name])]
    if network:
        raise UserError(
            f"{run.folder} was certified with another network (since then changed: "
            f"{', '.join(network)}); restore it, or start over with --force"
        )
    missing = [name for name in FINGERPRINTS if before.get(name) is None]
    usual = (*asdict(CHOICES), "domain", "norm")  # not named where they are the usual ones
    named = [*settings, *(name for name in usual if name not in settings)]
    changed = [n for n in named if before.get(n) != settings.get(n) and n not in missing]
    changed = [name for name in changed if name not in FREE]
    if changed:
        raise UserError(
            f"{run.folder} was certified with other settings ({', '.join(changed)}); "
            "repeat those, or start over with --force"
        )
    if missing:
        raise _untraceable(run)


def _untraceable(run: Run) -> UserError:
    return UserError(
        f"{run.folder} was certified by an earlier version, which did not note the network and the "
        "samples that its verdicts are of; start over with --force"
    )


def _check_samples(run: Run, records: list[Record], dataset: data.Dataset) -> None:
    """Refuse records of samples that are not those of the data set any more."""
    known = {record.index: record.fingerprint for record in records if record.fingerprint}
    if any(record.fingerprint is None for record in records):
        raise _untraceable(run)
    changed = dataset.changed_sample(known)
    if changed is not None:
        labels = {record.index: record.label for record in records}
        inside = changed < len(dataset.y_test)
        same = inside and labels[changed] == int(dataset.y_test[changed])
        what = "image" if same else "label"
        raise UserError(
            f"{dataset.name} has changed since {run.folder} was certified: test sample {changed} "
            f"has another {what}; restore it, or start over with --force"
        )
