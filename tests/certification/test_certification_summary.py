"""The summary of any journal: counts that add up, accuracies in their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tightrope.certification.journal import Record
from tightrope.certification.properties import Verdict
from tightrope.certification.summary import summarize

OUTCOMES = [
    (Verdict.FALSIFIED, "natural", False),
    (Verdict.FALSIFIED, "attack", True),
    (Verdict.VERIFIED, "ibp", True),
    (Verdict.UNKNOWN, "attack", True),
]


def record(index: int, outcome: tuple[Verdict, str, bool]) -> Record:
    verdict, stage, correct = outcome
    return Record(index, 1, 1 if correct else 0, verdict, stage, None, 0.25, {stage: 0.25})


@given(st.lists(st.sampled_from(OUTCOMES), max_size=12), st.integers(0, 5))
def test_counts_and_accuracies(outcomes: list[tuple[Verdict, str, bool]], missing: int) -> None:
    records = [record(i, outcome) for i, outcome in enumerate(outcomes)]
    asked = max(len(records) + missing, 1)
    summary = summarize(records, asked, {"stages": ["ibp", "attack"]})
    verdicts = [r.verdict for r in records]
    assert summary.samples == asked
    assert summary.complete == (len(records) == asked)
    assert summary.verified == verdicts.count(Verdict.VERIFIED)
    assert summary.falsified == verdicts.count(Verdict.FALSIFIED)
    decided = sum(s["verified"] + s["falsified"] for s in summary.stages.values())
    assert decided == summary.verified + summary.falsified
    if summary.complete:
        assert summary.unknown == verdicts.count(Verdict.UNKNOWN)
        assert summary.natural == sum(r.correct for r in records) / asked
        assert summary.certified == summary.verified / asked
        broken = sum(v == Verdict.FALSIFIED for v in verdicts)
        assert summary.adversarial is not None
        assert abs(summary.adversarial - (asked - broken) / asked) < 1e-12
    # Also halfway, and before the first sample, nothing is claimed that contradicts itself.
    if summary.adversarial is not None:
        assert summary.certified <= summary.adversarial + 1e-12
        assert summary.adversarial <= summary.natural + 1e-12


def test_records_survive_the_journal() -> None:
    first = record(3, OUTCOMES[1])
    assert Record.from_line(first.to_line()) == first
    assert first.to_line().endswith("\n") and first.to_line().count("\n") == 1
