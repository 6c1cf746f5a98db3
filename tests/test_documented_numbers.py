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
def test_every_sample_of_the_smallest_network_is_decided(run: str) -> None:
    proved, estimate = read(run, "certification.json"), read(run, "estimate.json")
    assert proved["samples"] == 10_000 and proved["complete"] and proved["unknown"] == 0
    assert proved["settings"]["eps"] == estimate["settings"]["eps"] == "0.05"
    assert proved["certified"] == proved["adversarial"]
    # Proofs account for rounding, so they may lose a sample on the edge.
    by_intervals = proved["stages"]["ibp"]["verified"] / 10_000
    assert estimate["ibp"] - 0.001 <= by_intervals <= estimate["ibp"]
    # An attack sees less than there is.
    assert proved["certified"] <= estimate["pgd"]


@pytest.mark.parametrize("run", [run for run in RUNS if run.startswith("tiny-")])
def test_the_table_of_stages_is_the_summary(run: str) -> None:
    proved = read(run, "certification.json")
    name = run.removeprefix("tiny-").upper()
    (line,) = [x for x in PAGE.splitlines() if x.startswith(f"| {name} |") and x.count("|") == 11]
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    stages = proved["stages"]
    counts = [
        f"{stages[stage]['verified']}, {stages[stage]['falsified']}"
        for stage in ("ibp", "attack", "crown-ibp", "alpha", "bab")
    ]
    wrong = str(stages["natural"]["falsified"])
    certified, seconds = f"{100 * proved['certified']:.2f}", f"{proved['seconds']:.0f}"
    assert cells[:-1] == [wrong, *counts, certified, seconds]


def test_every_number_with_a_percent_sign_is_somewhere_in_the_records() -> None:
    known = {
        f"{100 * value:.2f}"
        for file in DOCS.glob("*/*.json")
        for value in json.loads(file.read_text(encoding="utf-8")).values()
        if isinstance(value, float)
    }
    for number in re.findall(r"(\d+\.\d\d) %", PAGE):
        assert number in known, f"{number} % is in no record"
