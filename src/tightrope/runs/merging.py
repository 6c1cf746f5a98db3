"""`tightrope.merge`: parts of a certification, made on several machines, joined into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from tightrope.answer import Verdict
from tightrope.errors import UserError
from tightrope.files import refuse_links, write_bytes, write_json, write_text
from tightrope.limits import IMAGE_BYTES
from tightrope.radius import format_radius, parse_radius
from tightrope.reading import read_bytes
from tightrope.runs.coverage import (
    COVERAGE,
    FREE,
    Ranges,
    asked,
    joined,
    named,
    places,
    summarize_radii,
)
from tightrope.runs.folder import FINGERPRINTS, Run, open_run
from tightrope.runs.journal import Record, read_journal
from tightrope.runs.lock import Wait
from tightrope.runs.shards import found_shards
from tightrope.runs.summary import Certification, read_summary

AGAIN = "certify it again with --force"


def merge(
    run: Run | str | Path, parts: Sequence[str | Path] = (), *, wait: Wait = False
) -> Certification:
    """Join parts of a certification into a run folder; by default all its `shards`.

    A part is any folder that `certify` has written to: a shard, or a copy of a run certified
    elsewhere. What the run folder holds already is kept. Parts of another network, with other
    settings or of other samples are refused, and so are verdicts that contradict each other; then
    nothing is written. A sample that some part left unknown and another one decided is decided.
    Returns the summary of everything that the folder then holds.
    """
    run = open_run(run)
    folders = [Path(part) for part in parts] or found_shards(run.folder)
    if not folders:
        raise UserError(f"{run.folder} has no shards to merge; name the folders of the parts")
    with run.lock("merge", wait):
        found = [_read(Run(folder)) for folder in folders]
        mine = [_read(run)] if run.journal.exists() and run.journal.stat().st_size else []
        if run.config.exists():
            _check_network(run, found)
        everything = [*mine, *found]
        for part in everything[1:]:
            _check_settings(everything[0], part)
        own = _own_radius(run, everything)
        return _write(run, mine, _join(everything, own), own, everything)


@dataclass(frozen=True)
class _Part:
    """What a folder says of a certification; `own` is the radius of records that name none."""

    run: Run
    settings: dict[str, Any]
    ranges: Ranges
    own: Fraction
    records: list[Record]

    def radius(self, record: Record) -> Fraction:
        """Return the radius of a record."""
        return self.own if record.eps is None else parse_radius(record.eps, largest=None)


@dataclass(frozen=True)
class _Joined:
    """A record, with the radius as the merged folder names it, and the part that it is from."""

    record: Record
    original: Record
    part: _Part


def _read(run: Run) -> _Part:
    """Read all of a part; what is damaged is refused."""
    if not run.folder.is_dir():
        raise UserError(f"{run.folder} is not a folder; name one that `certify` has written to")
    if not run.certification.exists():
        raise UserError(f"{run.folder} has no certification: {run.certification.name} is missing")
    settings = read_summary(run.certification).whole(AGAIN)["settings"]
    try:
        ranges = asked(settings)
        own = parse_radius(settings["eps"], largest=None)
    except (ValueError, KeyError) as error:
        raise UserError(f"{run.certification} is damaged: {error}; {AGAIN}") from None
    records = read_journal(run.journal).whole(AGAIN)
    samples = {text: frozenset(places(parts)) for text, parts in ranges.items()}
    part = _Part(run, settings, ranges, own, records)
    for record in records:
        if record.index not in samples.get(format_radius(part.radius(record)), ()):
            raise UserError(
                f"{run.journal} is damaged: it has test sample {record.index}, which was not asked "
                f"for; {AGAIN}"
            )
        if record.fingerprint is None:
            raise UserError(f"{run.journal} is of an earlier version; {AGAIN}")
    return part


def _check_network(run: Run, parts: Iterable[_Part]) -> None:
    """Refuse parts of another network than that of the run folder."""
    present = run.fingerprints()
    for part in parts:
        other = [name for name in FINGERPRINTS if part.settings.get(name) != present[name]]
        if other:
            raise UserError(
                f"{part.run.folder} is of another network than {run.folder} (other "
                f"{', '.join(other)}); leave it out"
            )


def _check_settings(first: _Part, part: _Part) -> None:
    """Refuse a part with other settings than the first."""
    names = sorted({*first.settings, *part.settings} - FREE)
    other = [name for name in names if first.settings.get(name) != part.settings.get(name)]
    if other:
        raise UserError(
            f"{part.run.folder} was certified with other settings than {first.run.folder} "
            f"({', '.join(other)}); certify it again with those, or leave it out"
        )


def _own_radius(run: Run, parts: Sequence[_Part]) -> Fraction:
    """Return the radius that records of the merged folder need not name."""
    usual = run.settings().eps if run.config.exists() else None
    held = parts[0].run.folder == run.folder
    radii = {parse_radius(text, largest=None) for part in parts for text in part.ranges}
    return usual if usual in radii and usual is not None and not held else parts[0].own


def _join(parts: Sequence[_Part], own: Fraction) -> list[_Joined]:
    """Return one record for each sample and radius, unless some contradict each other."""
    found: dict[tuple[int, Fraction], _Joined] = {}
    for part in parts:
        for record in part.records:
            radius = part.radius(record)
            named = replace(record, eps=None if radius == own else format_radius(radius))
            key = record.index, radius
            before = found.get(key)
            if before is not None:
                _check_pair(before, _Joined(named, record, part))
            if before is None or before.record.verdict is Verdict.UNKNOWN:
                found[key] = _Joined(named, record, part)
    _check_radii(found)
    return list(found.values())


def _check_pair(one: _Joined, other: _Joined) -> None:
    """Refuse two records of a sample that cannot both be right."""
    index = one.record.index
    where = f"{one.part.run.folder} and {other.part.run.folder}"
    if one.record.fingerprint != other.record.fingerprint:
        raise UserError(f"{where} are of other samples: test sample {index} is not the same")
    verdicts = {one.record.verdict, other.record.verdict}
    if verdicts == {Verdict.VERIFIED, Verdict.FALSIFIED}:
        raise UserError(
            f"{where} contradict each other: test sample {index} is verified in one and falsified "
            "in the other; one of them is wrong, so nothing is merged"
        )


def _check_radii(found: dict[tuple[int, Fraction], _Joined]) -> None:
    """Refuse a proof at a radius with a counterexample at a smaller one."""
    samples: dict[int, list[tuple[Fraction, _Joined]]] = {}
    for (index, radius), joined_one in found.items():
        samples.setdefault(index, []).append((radius, joined_one))
    for several in samples.values():
        for radius, one in several:
            for other_radius, other in several:
                if other_radius < radius and one.record.verdict is Verdict.VERIFIED:
                    _check_pair(one, other)


def _write(
    run: Run, mine: list[_Part], records: list[_Joined], own: Fraction, parts: Sequence[_Part]
) -> Certification:
    """Write the joined certification; a kill at any moment leaves the old one or the new one."""
    lines, points = [], {}
    for found in records:
        record, original, source = found.record, found.original, found.part.run
        if original.counterexample is not None and source.folder != run.folder:
            place = run.counterexample(record.index, record.eps)
            points[place] = _point(source.counterexample(original.index, original.eps))
            record = replace(record, counterexample=f"{place.parent.name}/{place.name}")
        lines.append(record)
    ranges = joined(*(part.ranges for part in parts))
    kept = {k: v for k, v in parts[0].settings.items() if k not in COVERAGE}
    settings = {**named(ranges, format_radius(own)), **kept}

    def summary(known: Iterable[Record]) -> Certification:
        return summarize_radii(known, ranges, own, own, settings)

    if not mine:
        run.clear_certification()  # without a journal, what else is there is a remnant
    run.tidy()
    for place, content in points.items():
        write_bytes(place, content, own_folder=True)
    # First which samples it is about, so that the journal always has its settings beside it.
    write_json(run.certification, summary(mine[0].records if mine else ()).to_json())
    write_text(run.journal, "".join(record.to_line() for record in lines))
    result = summary(lines)
    write_json(run.certification, result.to_json())
    return result


def _point(path: Path) -> bytes:
    """Read a counterexample."""
    refuse_links(path.parent.parent, (path.parent.name,))
    refuse_links(path.parent, (path.name,))
    try:
        return read_bytes(path, IMAGE_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the part is not complete; copy all of it") from None
