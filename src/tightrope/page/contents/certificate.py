"""The certification of a run as its report shows it: what of it can be read, however little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightrope.page.content import Certificate, Radius, Sample, Stage
from tightrope.radius import parse_radius
from tightrope.runs import Run
from tightrope.runs.coverage import asked, at_radius, summarize_radii
from tightrope.runs.journal import Record, read_journal
from tightrope.runs.summary import LARGEST, Certification, read_summary, summarize


@dataclass(frozen=True)
class Reading:
    """What was read of a certification; `settings` are those of `certify`."""

    certificate: Certificate | None
    samples: tuple[Sample, ...]
    settings: Mapping[str, Any]
    notices: tuple[str, ...]


def read_certification(run: Run) -> Reading:
    """Read the journal and the summary of a run, as far as they can be read."""
    if not run.journal.exists() and not run.certification.exists():
        return Reading(None, (), {}, ())
    journal, summary = read_journal(run.journal), read_summary(run.certification)
    notices = [*journal.notices, *summary.notices]
    settings = summary.content["settings"]
    own = own_records(journal.content, settings)
    known = None
    if not journal.content or journal.damage is not None:
        try:
            known = Certification.from_json(summary.content)
        except ValueError:
            if summary.damage is None:
                notices.append(f"{run.certification.name} is damaged: its numbers are missing")
    # While a certification runs, its summary is behind its journal: that is counted anew.
    if known is None and own:
        known = _count(own, summary.content)
    if known is not None and known.open == known.samples:
        known = None
        notices.append("the certification has begun, but no sample is decided yet")
    elif known is not None and known.open:
        decided = known.samples - known.open
        notices.append(f"the certification is not finished: {decided} of {known.samples} samples")
    radii = _radii(journal.content, summary.content)
    certificate = None if known is None else _certificate(known, settings, radii)
    return Reading(certificate, tuple(map(_sample, own)), settings, tuple(notices))


def own_records(records: Sequence[Record], settings: Mapping[str, Any]) -> list[Record]:
    """Return what is known of samples at the folder's own radius, also from other radii."""
    try:
        own = parse_radius(settings["eps"], largest=None)
    except (KeyError, ValueError):
        return [record for record in records if record.eps is None]
    return list(at_radius(records, own, own).values())


def _radii(records: Sequence[Record], summary: Mapping[str, Any]) -> tuple[Radius, ...]:
    """Return the accuracies at several radii, counted anew; none if the settings are damaged."""
    settings = summary["settings"]
    try:
        own = parse_radius(settings["eps"], largest=None)
        stages = [name for name in settings["stages"] if isinstance(name, str)]
        found = summarize_radii(records, asked(settings), own, own, {**settings, "stages": stages})
    except (KeyError, ValueError, TypeError):
        return ()
    return tuple(
        Radius(
            point["eps"],
            float(parse_radius(point["eps"], largest=None)),
            point["samples"] - point["open"],
            *(point[name] for name in ("natural", "adversarial", "certified", "unknown")),
        )
        for point in found.curve
        if point["samples"] > point["open"]
    )


def _sample(record: Record) -> Sample:
    margin = record.margin
    return Sample(
        index=record.index,
        label=record.label,
        prediction=record.prediction,
        verdict=str(record.verdict),
        stage=record.stage,
        margin=None if margin is None or abs(margin) > LARGEST else margin,
        counterexample=record.counterexample,
        fingerprint=record.fingerprint,
    )


def _count(records: Sequence[Record], summary: Mapping[str, Any]) -> Certification:
    listed, samples = summary["settings"].get("stages"), summary.get("samples")
    stages = [s for s in listed if isinstance(s, str)] if isinstance(listed, list) else []
    stages = list(dict.fromkeys([*stages, *(r.stage for r in records)]))
    total = max(samples if type(samples) is int else 0, len(records))
    return summarize(records, total, {"stages": [name for name in stages if name != "natural"]})


def known_norm(settings: Mapping[str, Any]) -> str | None:
    """Return the norm that settings name; None if it is the usual one."""
    norm = settings.get("norm")
    return norm if isinstance(norm, str) else None


def _certificate(
    known: Certification, settings: Mapping[str, Any], radii: tuple[Radius, ...]
) -> Certificate:
    eps = settings.get("eps")
    return Certificate(
        samples=known.samples,
        verified=known.verified,
        falsified=known.falsified,
        unknown=known.unknown,
        open=known.open,
        natural=known.natural,
        adversarial=known.adversarial,
        certified=known.certified,
        seconds=known.seconds,
        eps=None if eps is None else str(eps),
        norm=known_norm(settings),
        stages=tuple(Stage(name, **stage) for name, stage in known.stages.items()),
        reasons=known.reasons,
        radii=radii,
    )
