"""Samples whose search is in parts, on several machines: when all have ended, there is a record."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from tightrope.answer import Verdict
from tightrope.certification.work_items import Part, Partial
from tightrope.runs.journal import Record


@dataclass
class _Family:
    """The parts of one search: how many are at work or wait, and what came of the others."""

    parts: int = 1  # the root
    root_ended: bool = False
    records: list[Record] = field(default_factory=list)


class Families:
    """All searches in parts, by sample and by the attempt at it."""

    def __init__(self) -> None:
        self.members: dict[tuple[int, int], _Family] = {}

    def add(self, part: Part) -> None:
        """Note that a part was given away."""
        key = part.index, part.family
        if key not in self.members:
            self.members[key] = _Family()
        self.members[key].parts += 1

    def knows(self, part: Part) -> bool:
        """Return whether anybody waits for a part."""
        return (part.index, part.family) in self.members

    def forget(self, family: int) -> None:
        """Forget the searches of an attempt whose roots have not ended: others begin anew."""
        gone = [k for k, one in self.members.items() if k[1] == family and not one.root_ended]
        for key in gone:
            del self.members[key]

    def end(self, partial: Partial) -> Record | None:
        """Note the end of a part; return the record of the sample when there is one."""
        key = partial.record.index, partial.family
        family = self.members.get(key)
        if family is None:
            return None
        family.parts -= 1
        family.root_ended |= partial.root
        family.records.append(partial.record)
        if family.parts and partial.record.verdict is not Verdict.FALSIFIED:
            return None
        del self.members[key]
        return combined(family.records)


def combined(records: list[Record]) -> Record:
    """Return what parts of a search say together.

    A counterexample of one is one of the sample; a proof needs all of them.
    """
    by_verdict = {record.verdict: record for record in reversed(records)}
    for verdict in (Verdict.FALSIFIED, Verdict.UNKNOWN, Verdict.VERIFIED):
        if verdict in by_verdict:
            chosen = by_verdict[verdict]
            break
    margin = chosen.margin
    if chosen.verdict is Verdict.VERIFIED:
        margins = [record.margin for record in records if record.margin is not None]
        margin = min(margins, default=None)
    times: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for stage, seconds in record.times.items():
            times[stage] += seconds
    return replace(
        chosen,
        margin=margin,
        times=dict(times),
        seconds=sum(times.values()),
        domains=sum(record.domains or 0 for record in records) or None,
    )
