"""The numbers in README and on the results page are those of the recorded files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tightrope.study.experiments import EXPERIMENTS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGE = (RESULTS / "README.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUDGET = sorted(folder.name for folder in RESULTS.glob("equal-budget-*"))
RECORDED = sorted(file.parent.name for file in RESULTS.glob("*/table.json"))


def read(path: str) -> Any:
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def row(run: str) -> list[str]:
    """The cells of the page's line about a run."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{run}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("run", BUDGET)
def test_the_row_of_a_run_is_its_record(run: str) -> None:
    estimate = read(f"{run}/estimate.json")
    assert estimate["samples"] == 10_000
    columns = ("natural", "pgd", "taps", "ibp")
    accuracies = [f"{100 * estimate[column]:.2f}" for column in columns]
    history = (RESULTS / run / "history.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = sum(json.loads(line)["seconds"] for line in history)
    assert row(run) == [*accuracies, f"{seconds:.0f}"]


def test_means_of_the_equal_budget() -> None:
    assert len(BUDGET) == 3
    found = [read(f"{run}/estimate.json") for run in BUDGET]
    for name, column in (
        ("natural", "natural"),
        ("TAPS accuracy", "taps"),
        ("IBP-certified", "ibp"),
    ):
        mean = 100 * sum(estimate[column] for estimate in found) / len(found)
        assert re.search(rf"Means:[^.]*[^:]*{name} {mean:.2f}", PAGE), name


def test_every_recorded_experiment_is_listed_with_its_files() -> None:
    assert RECORDED and set(RECORDED) <= set(EXPERIMENTS)
    for name in RECORDED:
        command, numbers, verdicts = row(name)
        assert command.startswith(f"`tightrope reproduce {name}")
        for link in re.findall(r"\(([^()]+)\)", numbers + verdicts):
            assert (RESULTS / link).is_file(), link


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_experiment_is_whole(name: str) -> None:
    result = read(f"{name}/table.json")
    assert result["scale"] == "laptop"
    assert not result["failures"] and not result["problems"]
    assert result["claims"] and all(claim["evidence"] for claim in result["claims"])
    assert set(result["versions"]) >= {"tightrope", "torch", "python"}
    assert result["runs"] and all(run["training_seconds"] > 0 for run in result["runs"].values())
    for figure in result["figures"]:
        assert (RESULTS / name / figure).is_file(), figure


def test_precision_is_decided_in_full_and_confirmed() -> None:
    accuracies, errors, comparison = read("precision/table.json")["tables"]
    assert {r["undecided"] for r in accuracies["rows"]} == {0}
    assert {r["samples"] for r in errors["rows"]} == {2000}
    assert {(r["open"], r["contradictions"]) for r in comparison["rows"]} == {(0, 0)}
    # Of 500; the others of a row had one answer only, the program's.
    assert min(r["compared"] for r in comparison["rows"]) > 480
    assert max(r["largest"] for r in comparison["rows"]) < 2e-4


def test_the_demo_in_readme_is_what_it_printed() -> None:
    printed = [
        line.rstrip() for line in (RESULTS / "demo" / "output.txt").read_text("utf-8").splitlines()
    ]
    (block,) = [
        text for text in re.findall(r"```\n(.*?)```", README, re.S) if "training by" in text
    ]
    shown = [line.rstrip() for line in block.splitlines() if line.strip() not in ("", "...")]
    assert len(shown) > 10
    position = 0
    for line in shown:
        assert line in printed[position:], line
        position = printed.index(line, position) + 1


def test_the_demo_printed_its_record() -> None:
    printed = (RESULTS / "demo" / "output.txt").read_text(encoding="utf-8")
    for entry in read("demo/comparison.json")["entries"]:
        (line,) = [x for x in printed.splitlines() if x.strip().startswith(f"{entry['method']} ")]
        columns = ("natural", "adversarial", "taps", "certified")
        assert line.split()[1:5] == [f"{100 * entry['values'][c][0]:.2f}%" for c in columns]


def test_other_percentages_in_readme_are_recorded() -> None:
    """README has no numbers of ours but the demo's and those of recorded tables."""
    known = {
        f"{value:.2f}"
        for name in RECORDED
        for table in read(f"{name}/table.json")["tables"]
        for line in table["rows"]
        for value in line.values()
        if isinstance(value, float)
    }
    prose = re.sub(r"```.*?```", "", README, flags=re.S).replace("Python 3.11", "")
    for number in re.findall(r"\b\d{1,2}\.\d\d\b", prose):
        assert number in known, f"{number} is in no record"
