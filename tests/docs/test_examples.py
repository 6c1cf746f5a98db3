"""Every example runs, small, and does what its page says."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tightrope as tr
from tightrope.cli import main
from tightrope.nets import NETS
from tightrope.training.objectives import METHODS

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "epochs": 1,
    "annealing_epochs": 0,
    "train_samples": 300,
    "validation": 50,
    "batch_size": 50,
    "device": "cpu",
}

pytestmark = pytest.mark.usefixtures("one_thread")


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.fixture(autouse=True)
def _own_names() -> Iterator[None]:
    """What an example registers is forgotten after its test."""
    before = dict(NETS), dict(METHODS)
    yield
    for table, names in zip((NETS, METHODS), before, strict=True):
        table.clear()
        table.update(names)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tr.Run:
    out = tmp_path_factory.mktemp("run") / "first"
    small = {**SMALL, "net": "mlp", "width": 8, "depth": 1, "batch_norm": False, "eps": 0.01}
    return tr.train(method="ibp", out=out, **small)


def test_own_objective(tmp_path: Path) -> None:
    result = load("own_objective")["compare"](
        tmp_path, samples=20, net="mlp", width=8, eps=0.01, **SMALL
    )
    assert [entry.method for entry in result.entries] == ["ibp", "hinge-ibp"]
    assert not any(entry.errors for entry in result.entries)
    assert "target = 3.0" in (tmp_path / "hinge-ibp-0" / "config.toml").read_text()


def test_own_network(tmp_path: Path) -> None:
    result = load("own_network")["main"](tmp_path / "run", images=2, samples=20, **SMALL)
    assert result.samples == 20 and result.complete


def test_own_data(tmp_path: Path) -> None:
    small = {**SMALL, "width": 8, "depth": 1}
    results = load("own_data")["main"](tmp_path, samples=300, **small)
    # The same pictures, read in another order.
    assert set(results) == {"parity.npz", "parity"}
    assert all(result.samples == 100 and result.complete for result in results.values())


def test_properties(tmp_path: Path) -> None:
    example = load("properties")
    module, x, label = example["network"]()
    for ask in ("inputs", "outputs"):
        answers = example[ask](module, x, label)
        assert {answer.verdict for answer in answers} <= {tr.Verdict.VERIFIED, tr.Verdict.FALSIFIED}
    result = example["main"](tmp_path / "out")
    assert result.complete and [point["eps"] for point in result.curve] == ["0.01", "0.05"]


def test_onnx_files(tmp_path: Path) -> None:
    answer = load("onnx_files")["main"](tmp_path / "example.onnx")
    assert answer.verdict in (tr.Verdict.VERIFIED, tr.Verdict.FALSIFIED)


def test_one_image_as_a_module_and_as_files(run: tr.Run, tmp_path: Path) -> None:
    load("robustness_property")["main"](tmp_path / "image.vnnlib", 0, "0.01")
    tr.export(run, tmp_path / "net.onnx")
    by_file = tr.verify_file(tmp_path / "net.onnx", tmp_path / "image.vnnlib")
    directly = load("one_image")["main"](run.folder, 0, "0.01")
    assert by_file.verdict is directly.verdict


def run_command(words: list[str]) -> None:
    """Run a command of the command line in this process."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0, words


def options(settings: dict[str, Any]) -> list[str]:
    return [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]


def test_own_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert "hinge-ibp" not in METHODS
    load("own_commands")
    run = str(tmp_path / "mine")
    small = options({**SMALL, "net": "mlp", "width": 4, "depth": 1})
    run_command(["train", "--method", "hinge-ibp", *small, "--out", run])
    run_command(["certify", run, "--samples", "10"])
    assert (tmp_path / "mine" / "certification.json").exists()


# Stands in for `tightrope`: notes its arguments, one per line, instead of starting Python.
NOTE = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word" >> "$NOTES"; done
echo END >> "$NOTES"
"""


def test_tasks_of_an_array_job_make_a_comparison(tmp_path: Path) -> None:
    out, notes = tmp_path / "array", tmp_path / "notes"
    small = {**SMALL, "net": "mlp", "width": 4, "depth": 1, "batch_norm": "false"}
    stand_in = tmp_path / "bin" / "tightrope"
    stand_in.parent.mkdir()
    stand_in.write_text(NOTE)
    stand_in.chmod(0o755)
    path = os.pathsep.join((str(stand_in.parent), os.environ.get("PATH", "")))
    choices = {"OUT": str(out), "METHODS": "standard ibp", "SEEDS": "1", "SAMPLES": "10"}
    for task in ("0", "1", "1"):  # a task that is started again has nothing left to do
        script = ["sh", str(EXAMPLES / "array_job.sh"), *options(small)]
        environment = {"PATH": path, "NOTES": str(notes), "TASK": task, **choices}
        subprocess.run(script, check=True, env=environment)
    commands = [part.splitlines() for part in notes.read_text().split("END\n")[:-1]]
    assert [words[0] for words in commands] == ["train", "certify"] * 3
    for words in commands:
        run_command(words)
    runs = [out / name / "history.jsonl" for name in ("standard-0", "ibp-0")]
    before = [path.read_bytes() for path in runs]
    result = tr.compare(("standard", "ibp"), out=out, samples=10, eps=0.1, **small)
    assert not any(entry.errors for entry in result.entries)
    after = [path.read_bytes() for path in runs]
    assert after == before, "compare must use the runs of the tasks as they are"
