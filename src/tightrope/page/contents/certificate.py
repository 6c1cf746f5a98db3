"""The certification of a run as its report shows it, read without changing anything.

A report is asked for at any time: while a certification runs, after a kill, years later. So
whatever can be read is shown, and what cannot is said.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightrope.errors import UserError
from tightrope.files import read_json
from tightrope.page.content import Certificate, Sample, Stage
from tightrope.reading import parse_json, read_records
from tightrope.runs import Run
from tightrope.runs.journal import Record
from tightrope.runs.summary import summarize

# Larger numbers are damage, and would only flatten the charts.
LARGEST = 1e30
_FIELDS = frozenset(field.name for field in dataclasses.fields(Record))


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
    records, notices = _read_journal(run)
    damaged = any("damaged" in notice for notice in notices)
    summary: dict[str, Any] = {}
    try:
        summary = _mapping(read_json(run.certification, "the summary of the certification"))
        _mapping(summary.get("settings"))
    except UserError as error:
        notices.append(str(error))
    except OSError as error:
        notices.append(f"{run.certification.name} cannot be read: {error.strerror}")
    except TypeError:
        notices.append(f"{run.certification.name} is damaged: not a summary of a certification")
    given = summary.get("settings")
    settings = given if isinstance(given, dict) else {}
    certificate = None
    if records and not damaged:
        certificate = _count(records, summary, settings)
    elif summary:
        try:
            certificate = _from_summary(summary, settings)
        except (KeyError, TypeError, ValueError):
            notices.append(f"{run.certification.name} is damaged: its numbers are missing")
    if certificate is None and records:
        certificate = _count(records, summary, settings)
    if certificate is not None and certificate.open == certificate.samples:
        certificate = None
        notices.append("the certification has begun, but no sample is decided yet")
    elif certificate is not None and certificate.open:
        decided = certificate.samples - certificate.open
        notices.append(
            f"the certification is not finished: {decided} of {certificate.samples} samples"
        )
    return Reading(certificate, tuple(map(_sample, records)), settings, tuple(notices))


def _read_journal(run: Run) -> tuple[list[Record], list[str]]:
    """Read the lines that are whole, leaving the file as it is: a certification may be running."""
    try:
        content = read_records(run.journal)
    except FileNotFoundError:
        return [], []
    except UserError as error:
        return [], [f"{run.journal.name} is damaged: {error}"]
    except OSError as error:
        return [], [f"{run.journal.name} is damaged: it cannot be read ({error.strerror})"]
    whole = content[: content.rfind(b"\n") + 1].decode("utf-8", "replace")
    records: dict[int, Record] = {}
    bad: list[int] = []
    strange: set[str] = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            values = _mapping(parse_json(line))
            strange |= values.keys() - _FIELDS
            known = {name: value for name, value in values.items() if name in _FIELDS}
            record = Record.from_line(json.dumps(known))
            if record.index in records:
                raise ValueError("two records of one sample")
            records[record.index] = record
        except (ValueError, TypeError, KeyError, AttributeError):
            bad.append(number)
    notices = []
    if bad:
        rest = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        notices.append(
            f"{run.journal.name} is damaged at line {bad[0]}{rest}; what can be read is shown"
        )
    if strange:
        notices.append(
            f"{run.journal.name} has fields that this version does not know "
            f"({', '.join(sorted(strange)[:5])}): a newer version wrote it"
        )
    return list(records.values()), notices


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("an object is expected")
    return value


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


def _count(
    records: Sequence[Record], summary: Mapping[str, Any], settings: Mapping[str, Any]
) -> Certificate:
    """Count the records anew: while a certification runs, its summary is behind its journal."""
    listed = settings.get("stages")
    stages = [s for s in listed if isinstance(s, str)] if isinstance(listed, list) else []
    stages = list(dict.fromkeys([*stages, *(r.stage for r in records)]))
    samples = summary.get("samples")
    stated = samples if type(samples) is int and samples < LARGEST else 0
    total = max(stated, len(records))
    given = {"stages": [name for name in stages if name != "natural"]}
    return _from_summary(summarize(records, total, given).to_json(), settings)


def _from_summary(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Certificate:
    """Take the numbers from a summary; raises KeyError, TypeError or ValueError if it is wrong."""
    counts = {
        name: _whole(summary[name])
        for name in ("samples", "verified", "falsified", "unknown", "open")
    }
    adversarial = summary["adversarial"]
    stages = tuple(
        Stage(str(name), _whole(s["verified"]), _whole(s["falsified"]), _amount(s["seconds"]))
        for name, s in _mapping(summary["stages"]).items()
    )
    eps = settings.get("eps")
    return Certificate(
        **counts,
        natural=_share(summary["natural"]),
        adversarial=None if adversarial is None else _share(adversarial),
        certified=_share(summary["certified"]),
        seconds=_amount(summary["seconds"]),
        eps=None if eps is None else str(eps),
        stages=stages,
        reasons={str(k): _whole(n) for k, n in _mapping(summary.get("reasons", {})).items()},
    )


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise TypeError("a count is expected")
    return value


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < LARGEST:
        raise TypeError("a number is expected")
    return float(value)


def _share(value: Any) -> float:
    number = _amount(value)
    if math.isnan(number) or number > 1:
        raise ValueError("an accuracy is expected")
    return number
