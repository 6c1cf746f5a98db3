"""Analyses of experiments on run folders made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from handmade_runs import make_run

from tightrope.study.experiment import Claim, Findings, Verdict
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.measured import Measurements

HOLDS, FAILS, UNTESTED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNTESTED
METHODS = ("pgd", "ibp", "sabr", "taps", "staps")


def analyse(name: str, folder: Path, **options: Any) -> Findings:
    return EXPERIMENTS[name].analyse(Measurements(folder, **options))


def verdicts(findings: Findings) -> list[Verdict]:
    return [claim.verdict for claim in findings.claims]


def claim(findings: Findings, fragment: str) -> Claim:
    (found,) = [claim for claim in findings.claims if fragment in claim.text]
    return found


def solved(exact: list[float], program: list[float] | None = None) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [
        {"index": i, "by": "search", "lower": v, "upper": v + 1e-4} for i, v in enumerate(exact)
    ]
    for record, value in zip(records, program or [], strict=False):
        record["milp"] = {"lower": value, "upper": value + 1e-6, "finished": True}
    return records


def precision_runs(
    folder: Path, accuracies: dict[str, float], taps_error: float = 0.02, shift: float = 0.0
) -> None:
    exact = [-2.0, -1.0, 0.5, -0.25]
    for method in METHODS:
        margins = {
            "ibp": [v + d for v, d in zip(exact, (0.9, 1.9, 0.9, 0.9), strict=True)],
            "pgd": [v + d for v, d in zip(exact, (-0.5, 0, -0.5, 0), strict=True)],
            "sabr": [v + d for v, d in zip(exact, (0.3, -0.3, 0.3, 0.3), strict=True)],
            "taps": [v + d * taps_error for v, d in zip(exact, (1, -1, 1, 1), strict=True)],
        }
        program = [value + shift for value in exact[:2]]
        make_run(
            folder,
            f"tiny-{method}",
            accuracies=(92.0, accuracies[method], accuracies[method]),
            samples=10_000,
            margins=margins,
            exact=solved(exact, program),
        )
        for ending, change in (("-seed1", 0.3), ("-seed2", -0.3)):
            other = accuracies[method] + change
            make_run(folder, f"tiny-{method}{ending}", accuracies=(92.0, other, other))
