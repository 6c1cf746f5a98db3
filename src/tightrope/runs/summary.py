"""The summary of a certification: counts that add up, and the three accuracies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tightrope.runs.journal import Record
from tightrope.answer import Verdict

# The stages that look for counterexamples.
REFUTING = frozenset({"attack", "bab", "milp"})


@dataclass(frozen=True)
class Certification:
    """What is known of the samples asked for; `open` ones have no verdict yet.

    `natural`, `adversarial` and `certified` are accuracies over all decided samples: classified
    correctly; correctly and not refuted; proved. `adversarial` is None when no stage ran that
    refutes. `reasons` counts why samples stayed unknown, as far as a stage said so.
    """

    samples: int
    verified: int
    falsified: int
    unknown: int
    open: int
    natural: float
    adversarial: float | None
    certified: float
    stages: dict[str, dict[str, Any]]
    seconds: float
    complete: bool
    reasons: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `certification.json`."""
        return asdict(self)


def summarize(records: Iterable[Record], samples: int, settings: dict[str, Any]) -> Certification:
    """Count records; samples that have none yet are not in any count."""
    known = list(records)
    stages = ["natural", *settings["stages"]]
    counts = {verdict: sum(r.verdict == verdict for r in known) for verdict in Verdict}
    total = max(len(known), 1)
    return Certification(
        samples=samples,
        verified=counts[Verdict.VERIFIED],
        falsified=counts[Verdict.FALSIFIED],
        unknown=counts[Verdict.UNKNOWN],
        open=samples - len(known),
        natural=sum(r.correct for r in known) / total,
        adversarial=(len(known) - counts[Verdict.FALSIFIED]) / total
        if REFUTING.intersection(stages)
        else None,
        certified=counts[Verdict.VERIFIED] / total,
        stages={name: _stage_summary(name, known) for name in stages},
        seconds=sum(r.seconds for r in known),
        complete=len(known) == samples,
        reasons=_reasons(known),
        settings=settings,
    )


def _reasons(records: list[Record]) -> dict[str, int]:
    """Count the reasons of unknown samples, the most frequent first."""
    unknown = (r.reason for r in records if r.verdict == Verdict.UNKNOWN and r.reason)
    # What follows the colon is about one sample.
    counts = Counter(reason.partition(":")[0] for reason in unknown)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _stage_summary(name: str, records: list[Record]) -> dict[str, Any]:
    decided = [r for r in records if r.stage == name]
    return {
        "verified": sum(r.verdict == Verdict.VERIFIED for r in decided),
        "falsified": sum(r.verdict == Verdict.FALSIFIED for r in decided),
        "seconds": sum(r.times.get(name, 0.0) for r in records),
    }
