"""What a run was made with: kept in its files, no setting, and not needed to go on."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from click.testing import CliRunner

import tightrope as tr
from tightrope.cli.train import parse_pairs, train
from tightrope.training.settings import Settings, stored_settings

pytestmark = pytest.mark.usefixtures("one_thread")

VERSIONS = {"tightrope": tr.__version__, "torch": str(torch.__version__)}
GIVEN: dict[str, Any] = {
    **{"net": "mlp", "width": 4, "depth": 1, "batch_norm": False, "eps": "8/255", "epochs": 3},
    **{"validation": 8, "batch_size": 8, "annealing_epochs": 1, "method": "pgd", "pgd.steps": 2},
    **{"device": "cpu", "seed": 5},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    x, y = generator.random((40, 1, 4, 4), dtype=np.float32), np.arange(40) % 3
    np.savez(tmp_path / "data set.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return tmp_path / "data set.npz"


@pytest.fixture
def run(data: Path, tmp_path: Path) -> tr.Run:
    return tr.train(out=tmp_path / "run", data=str(data), **GIVEN)


def config(run: tr.Run) -> dict[str, Any]:
    return tomllib.loads(run.config.read_text())


def test_every_file_says_what_it_was_made_with(run: tr.Run) -> None:
    made_with = config(run)["made_with"]
    assert made_with.pop("command").startswith("tightrope train --data ")
    assert made_with == {**VERSIONS, "device": "cpu", "threads": 1}
    assert [record["made_with"] for record in run.history()] == [VERSIONS] * 3
    assert json.loads((run.folder / "model.json").read_text())["made_with"] == VERSIONS


def test_the_command_repeats_the_run(run: tr.Run, tmp_path: Path) -> None:
    command = config(run)["made_with"]["command"]
    assert "--out" not in command and "learning_rate" not in command
    again = tmp_path / "again"
    options: dict[str, Any] = train.make_context(
        "train", [*shlex.split(command)[2:], "--out", str(again)]
    ).params
    pairs = parse_pairs(options.pop("pairs"))
    tr.train(**{k: v for k, v in options.items() if v is not None and k != "as_json"}, **pairs)
    for name in ("config.toml", "model.json", "model.safetensors"):
        assert (again / name).read_bytes() == (run.folder / name).read_bytes()


def test_it_is_no_setting(run: tr.Run) -> None:
    assert not [name for name in run.values() if "made_with" in name]
    assert "made_with" not in run.settings().to_table()
    assert stored_settings(run).to_table() == run.settings().to_table()
    with pytest.raises(tr.UserError, match="unknown setting 'made_with"):
        Settings.parse({"made_with.torch": "2"})


@pytest.mark.parametrize("made_with", [None, {"tightrope": "9.9", "threads": 64}])
def test_other_machines_and_versions_go_on(
    run: tr.Run, data: Path, tmp_path: Path, made_with: dict[str, Any] | None
) -> None:
    """A run that was begun elsewhere, or by a version that did not say, comes to the same end."""
    half = tr.Run(tmp_path / "half")

    class Stop(Exception):
        pass

    class After:
        def step(self, *_: Any) -> None: ...

        def epoch(self, record: dict[str, Any]) -> None:
            if record["epoch"] == 2:
                raise Stop

    with pytest.raises(Stop):
        tr.train(out=half.folder, data=str(data), progress=After(), **GIVEN)
    values = {k: v for k, v in config(half).items() if k != "made_with"}
    half.config.write_text(tomli_w.dumps(values | ({"made_with": made_with} if made_with else {})))
    half.write_history([{k: v for k, v in r.items() if k != "made_with"} for r in half.history()])
    before = half.config.read_bytes()
    tr.train(out=half.folder, resume=True)
    assert half.config.read_bytes() == before
    assert half.weights.read_bytes() == run.weights.read_bytes()
    assert [r.get("made_with") for r in half.history()] == [None, None, VERSIONS]


def test_the_printed_total_includes_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tr.Run(tmp_path)
    run.write_history([{"epoch": n, "seconds": 60.0, "validation_seconds": 20.0} for n in (0, 1)])
    monkeypatch.setattr(tr, "train", lambda **_: run, raising=False)
    done = CliRunner().invoke(train, ["--out", "x"])
    assert done.exit_code == 0, done.output
    assert run.training_seconds() == 120
    printed = re.sub(r"\s+", " ", done.output)
    assert "2 epochs in 160 s (40 s of validation), training accuracy" in printed
