"""The numbers on the results page are those of the recorded runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs" / "results"
PAGE = (DOCS / "README.md").read_text(encoding="utf-8")
RUNS = sorted(file.parent.name for file in DOCS.glob("*/estimate.json"))


def read(run: str, file: str) -> Any:
    return json.loads((DOCS / run / file).read_text(encoding="utf-8"))


def row(run: str) -> list[str]:
    """The cells of the page's line about a run."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{run}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_there_are_runs() -> None:
    assert {"tiny-ibp", "tiny-sabr", "tiny-taps", "tiny-staps"} <= set(RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_the_row_of_a_run_is_its_record(run: str) -> None:
    estimate = read(run, "estimate.json")
    assert estimate["samples"] == 10_000
    columns = ("natural", "pgd", "taps", "ibp")
    accuracies = [f"{100 * estimate[column]:.2f}" for column in columns]
    history = (DOCS / run / "history.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = sum(json.loads(line)["seconds"] for line in history)
    assert row(run)[-5:] == [*accuracies, f"{seconds:.0f}"]


@pytest.mark.parametrize("run", [run for run in RUNS if run.startswith("tiny-")])
def test_what_is_proved_is_what_intervals_say(run: str) -> None:
    proved, estimate = read(run, "certification.json"), read(run, "estimate.json")
    assert proved["samples"] == 10_000 and proved["complete"]
    assert proved["settings"]["eps"] == estimate["settings"]["eps"] == "0.05"
    # Proofs account for rounding, so they may lose a sample on the edge.
    assert estimate["ibp"] - 0.001 <= proved["certified"] <= estimate["ibp"]


def test_every_number_with_a_percent_sign_is_somewhere_in_the_records() -> None:
    known = {
        f"{100 * value:.2f}"
        for file in DOCS.glob("*/*.json")
        for value in json.loads(file.read_text(encoding="utf-8")).values()
        if isinstance(value, float)
    }
    for number in re.findall(r"(\d+\.\d\d) %", PAGE):
        assert number in known, f"{number} % is in no record"
