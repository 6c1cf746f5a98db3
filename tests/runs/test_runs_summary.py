"""The summary of any journal: counts that add up, accuracies in their order."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightrope.answer import Verdict
from tightrope.runs.journal import Record
from tightrope.runs.summary import summarize

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


@pytest.mark.parametrize(
    ("stages", "defined"),
    [
        (["ibp"], False),
        (["ibp", "crown-ibp", "alpha"], False),
        (["ibp", "attack"], True),
        (["crown-ibp", "bab"], True),
        (["milp"], True),
        ([], False),
    ],
)
def test_adversarial_accuracy_needs_a_stage_that_refutes(stages: list[str], defined: bool) -> None:
    records = [record(i, outcome) for i, outcome in enumerate(OUTCOMES)]
    summary = summarize(records, 4, {"stages": stages})
    assert summary.adversarial == (0.5 if defined else None)


def test_reasons_are_those_of_unknown_samples_only() -> None:
    unknown = record(0, OUTCOMES[3])
    reasons = ["timeout", None, "numbers", "timeout", "memory"]
    records = [replace(unknown, index=i, reason=reason) for i, reason in enumerate(reasons)]
    records.append(replace(record(5, OUTCOMES[2]), reason="timeout"))
    for order in (records, records[::-1]):
        summary = summarize(order, 6, {"stages": ["ibp", "attack"]})
        assert list(summary.reasons.items()) == [("timeout", 2), ("memory", 1), ("numbers", 1)]
        assert sum(summary.reasons.values()) <= summary.unknown == 5
    assert summary.to_json()["reasons"] == summary.reasons
    assert summarize([], 6, {"stages": ["ibp"]}).reasons == {}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"reason": "timeout after 60 s"},
        {"domains": 0},
        {"reason": "line\nbreak ü", "domains": 17, "counterexample": "counterexamples/000003.npy"},
    ],
)
def test_records_survive_the_journal(more: dict[str, Any]) -> None:
    first = replace(record(3, OUTCOMES[1]), **more)
    line = first.to_line()
    assert Record.from_json(json.loads(line)) == first
    assert line.endswith("\n") and line.count("\n") == 1
    optional = {"reason", "domains", "counterexample"}
    assert optional & set(json.loads(line)) == set(more)


def test_lines_of_earlier_versions_load() -> None:
    line = (
        '{"index": 2, "label": 0, "prediction": 0, "verdict": "unknown", "stage": "attack", '
        '"margin": null, "seconds": 0.5, "times": {"ibp": 0.5}}'
    )
    loaded = Record.from_json(json.loads(line))
    assert (loaded.index, loaded.reason, loaded.domains) == (2, None, None)


@pytest.mark.parametrize(
    "change",
    [
        *({"reason": value} for value in (3, [], {}, True)),
        *({"domains": value} for value in (1.5, "3", True, [], {})),
        *({"margin": value} for value in ("", [], False, "1", float("nan"), float("inf"))),
        *({"seconds": value} for value in (None, "", True, float("nan"))),
        *({"times": value} for value in ({"ibp": None}, {"ibp": "x"}, [1])),
        *({"stage": value} for value in (None, 3, [])),
        *({"counterexample": value} for value in (3, [], True)),
        {"surprise": 1},
    ],
    ids=str,
)
def test_damaged_values_are_refused(change: dict[str, Any]) -> None:
    values = json.loads(record(3, OUTCOMES[1]).to_line())
    assert Record.from_json(values).index == 3
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        Record.from_json({**values, **change})
