"""`config.toml` as plain values: what is checked of it, and what is left to training."""

from __future__ import annotations

import copy
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import tightrope as tr
from tightrope.reading import flatten
from tightrope.runs.config import METHODS as OPTIONS
from tightrope.runs.config import SETTINGS, Config, read_config, unknown_settings
from tightrope.training.objectives import METHODS
from tightrope.training.settings import Settings, describe_settings

MADE_WITH = {"tightrope": "0.0.9", "torch": "2.0", "threads": 3}


def table(**given: Any) -> dict[str, Any]:
    settings = Settings.parse(given).resolve(normalize=False, network={"width": 4})
    return {**settings.to_table(), "made_with": MADE_WITH}


def test_the_names_are_those_that_training_knows() -> None:
    assert list(SETTINGS) == [name for name, _, _ in describe_settings()]
    declared = {n: (m.section, tuple(m.hyperparameters())) for n, m in METHODS.items()}
    assert {n: (table, set(o)) for n, (table, o) in OPTIONS.items()} == {
        n: (table, set(o)) for n, (table, o) in declared.items()
    }


def test_plain_values() -> None:
    written = table(method="taps", eps="8/255", clip="none", **{"taps.weight": 3})
    config = Config.of(written)
    assert config.eps == Fraction(8, 255) and (config.data, config.data_dir) == ("mnist", None)
    assert (config.net, config.method, config.epochs, config.device) == ("cnn3", "taps", 70, "auto")
    assert config.options["weight"] == 3
    # The rest as the file has it.
    assert config.batch_size == 256 and config.clip is None and config.average_from is None
    with pytest.raises(AttributeError, match="wings"):
        config.wings  # noqa: B018
    assert config.to_table() == {k: v for k, v in written.items() if k != "made_with"}
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_options_of_every_method_are_settings(method: str) -> None:
    assert unknown_settings(flatten(table(method=method))) == []
    assert unknown_settings(flatten({**table(method=method), "wings": {"a": 1}})) == ["wings.a"]


@pytest.mark.parametrize(
    ("values", "unknown"),
    [
        ({"nett": 1}, ["nett"]),
        ({"method": "taps", "taps": {"weight": 1}}, []),
        ({"method": "taps", "taps": {"weigth": 1}}, ["taps.weigth"]),
        ({"method": "taps", "taps": {"weight": {"a": 1}}}, ["taps.weight"]),
        ({"method": "mtl-ibp", "mtl-ibp": {"alpha": 1}}, ["mtl-ibp.alpha"]),
        ({"method": "own", "own": {"a": 1}}, []),
        ({"method": "own", "mine": {"a": 1}}, []),  # a method may call its options as it likes
        ({"method": "own", "own": {"a": 1}, "mine": {"a": 1}}, ["mine.a"]),
        ({"method": "own", "mine": {"a": 1}, "other": {"b": 1}}, ["mine.a", "other.b"]),
        ({"width": {"a": 3}}, ["width.a"]),
        ({"a": {"b": {"c": 1}}}, ["a.b"]),
        ({"\x1b": {"a": 3}, "b": {"\x1b": 1}}, ["\x1b.a", "b.\x1b"]),
        ({"made_with": {"a": 3}}, []),
    ],
)
def test_names_that_are_no_settings(values: dict[str, Any], unknown: list[str]) -> None:
    assert unknown_settings(flatten(values)) == unknown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nett": "mlp"}, "unknown setting 'nett'; did you mean 'net'?"),
        (
            {"method": "taps", "taps": {"weigth": 3}},
            "unknown setting 'taps.weigth'; did you mean 'taps.weight'?",
        ),
        ({"method": "taps", "sabr": {"ratio": 0.4}}, "unknown setting 'sabr.ratio'"),
        ({"net": "cnn8"}, "did you mean 'cnn7'?"),
        ({"net": None}, "net is missing"),
        ({"data": 3}, "data must be a name or a path, got 3"),
        ({"data_dir": "a\0b"}, "data_dir must be a name or a path"),
        ({"eps": 2}, "eps must lie in (0, 1]"),
        ({"epochs": 0}, "epochs must be a whole number from 1 on, got 0"),
        ({"epochs": True}, "epochs must be a whole number from 1 on, got True"),
    ],
)
def test_errors_are_one_line_that_names_the_file(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = {k: v for k, v in {**table(), **changes}.items() if v is not None}
    run = tr.Run(tmp_path)
    run.config.write_text(tomli_w.dumps(values))
    with pytest.raises(tr.UserError) as caught:
        run.settings()
    assert str(caught.value).startswith(f"{run.config}: ") and message in str(caught.value)


def test_a_method_that_is_not_known_here_can_be_certified(tmp_path: Path) -> None:
    """Methods of users are known where they are trained, and nobody else needs them."""
    run = tr.Run(tmp_path)
    run.config.write_text(tomli_w.dumps({**table(), "method": "flying", "flying": {"height": 3}}))
    assert run.settings().options == {"height": 3}


def test_what_it_was_made_with_is_no_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(Settings().to_toml(MADE_WITH))
    assert read_config(path).content["made_with"] == MADE_WITH
    assert Settings.parse(flatten(read_config(path).whole())) == Settings.parse({})


def test_readers_of_runs_do_not_load_training() -> None:
    program = (
        "import sys, tightrope.certification.certifying, tightrope.page.contents.reporting\n"
        "print([name for name in sys.modules if name.startswith('tightrope.training')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
