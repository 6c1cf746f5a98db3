"""Which samples of a run were to be certified, at which radii, and what is known of each.

The first radius that a folder was certified at is its own: lines of the journal that name none are
of that one. A proof holds for smaller radii, too, and a counterexample for larger ones, so records
of one radius may answer for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from tightrope.answer import Verdict
from tightrope.radius import format_radius, parse_radius
from tightrope.runs.journal import Record
from tightrope.runs.summary import Certification, summarize

# The settings that say which samples, at which radii; and all that may differ from one
# certification in a folder to the next.
COVERAGE = frozenset({"eps", "start", "samples", "ranges"})
FREE = COVERAGE | {"network", "data"}
# By radius, as people write it: first samples, and those behind the last.
Ranges = dict[str, list[tuple[int, int]]]


def asked(settings: Mapping[str, Any]) -> Ranges:
    """Return the samples that settings of a certification name; `ValueError` if they do not."""
    named = settings.get("ranges")
    try:
        if named is None:
            first = settings.get("start", 0)
            named = {settings["eps"]: [(first, first + settings["samples"])]}
        found = {_radius(eps): [_range(part) for part in parts] for eps, parts in named.items()}
    except (KeyError, TypeError, AttributeError):
        raise ValueError("the samples of a certification are missing") from None
    if not found or not all(found.values()):
        raise ValueError("a certification of nothing")
    return found


def joined(*asked_for: Ranges) -> Ranges:
    """Return what was asked for at any time, without gaps between ranges that touch."""
    result: Ranges = {}
    for ranges in asked_for:
        for eps, parts in ranges.items():
            result[eps] = _merged([*result.get(eps, []), *parts])
    return result


def named(ranges: Ranges, own: str) -> dict[str, Any]:
    """Return the settings that name these samples: the folder's own radius, and all others."""
    parts = ranges.get(own, [])
    plain = {
        "eps": own,
        "start": parts[0][0] if parts else 0,
        "samples": sum(stop - start for start, stop in parts),
    }
    if len(ranges) == 1 and len(parts) == 1:
        return plain
    return {**plain, "ranges": {eps: [list(part) for part in r] for eps, r in ranges.items()}}


def places(parts: Iterable[tuple[int, int]]) -> list[int]:
    """Return the samples of some ranges."""
    return [index for start, stop in parts for index in range(start, stop)]


def at_radius(records: Iterable[Record], eps: Fraction, own: Fraction) -> dict[int, Record]:
    """Return what is known of samples at one radius, by index.

    What another radius settles took no time at this one.
    """
    direct: dict[int, Record] = {}
    implied: dict[int, Record] = {}
    for record in records:
        radius = own if record.eps is None else parse_radius(record.eps, largest=None)
        if radius == eps:
            direct[record.index] = record
        elif record.verdict == (Verdict.VERIFIED if radius > eps else Verdict.FALSIFIED):
            implied[record.index] = replace(record, seconds=0.0, times={})
    open_here = {i: r for i, r in direct.items() if r.verdict == Verdict.UNKNOWN}
    return {**open_here, **implied, **{i: r for i, r in direct.items() if i not in open_here}}


def summarize_radii(
    records: Iterable[Record],
    ranges: Ranges,
    eps: Fraction,
    own: Fraction,
    settings: dict[str, Any],
) -> Certification:
    """Summarise the samples asked for at one radius; with several, the curve has all of them."""
    known = list(records)

    def summary(radius: Fraction) -> Certification:
        text = format_radius(radius)
        samples = places(ranges.get(text, []))
        here = at_radius(known, radius, own)
        found = [here[index] for index in samples if index in here]
        return summarize(found, len(samples), {**settings, "eps": text})

    radii = sorted(parse_radius(text, largest=None) for text in ranges)
    curve = [summary(radius).point() for radius in radii] if len(radii) > 1 else []
    return replace(summary(eps), curve=curve, settings=settings)


def _merged(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _radius(eps: Any) -> str:
    return format_radius(parse_radius(eps, largest=None))


def _range(part: Any) -> tuple[int, int]:
    start, stop = part
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop < 1 << 40:
        raise ValueError("a range of samples is expected")
    return start, stop
