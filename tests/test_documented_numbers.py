"""The numbers on the results page are those of the recorded runs."""

import json
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs" / "results"


def test_tiny_ibp() -> None:
    page = (DOCS / "README.md").read_text(encoding="utf-8")
    run = json.loads((DOCS / "tiny-ibp" / "certification.json").read_text(encoding="utf-8"))
    accuracies = (run["natural"], run["adversarial"], run["certified"])
    row = " | ".join(f"{100 * value:.2f}" for value in accuracies)
    assert f"| this run (seed 0) | {row} |" in page
    assert f"{run['unknown']} samples stayed undecided" in page
    assert run["samples"] == 10_000 and run["complete"]
    # What this run has to show: learning works.
    assert run["certified"] >= 0.835
