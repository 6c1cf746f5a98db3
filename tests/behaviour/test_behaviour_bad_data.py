"""Data that is wrong, damaged or changed: one line, exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from badfiles import truncate, with_value, write_npz
from commands import Commands, assert_refused, unchanged

TINY_NET = ("--net", "mlp", "--set", "width=4", "--epochs", "2", "--set", "validation=8")


# --- data ---------------------------------------------------------------------------------------

NAN = float("nan")
DATA = [
    ("NaN pixel to train on", {"x_train": with_value((64, 4), NAN)}, "NaN"),
    ("NaN pixel to test on", {"x_test": with_value((16, 4), NAN)}, "NaN"),
    ("infinite pixel", {"x_test": with_value((16, 4), float("inf"))}, "infinite"),
    ("pixel above 1", {"x_train": with_value((64, 4), 1.001)}, "outside [0, 1]"),
    ("pixels up to 255", {"x_train": with_value((64, 4), 255.0)}, "divide by 255"),
    ("negative pixel", {"x_train": with_value((64, 4), -0.01)}, "outside [0, 1]"),
    ("label of no class", {"y_test": np.arange(16) % 3}, "label 2"),
    ("negative label", {"y_train": np.arange(64) % 2 - 1}, "negative label -1"),
    ("huge label", {"y_test": np.full(16, 10**12)}, "label 1000000000000"),
    ("class without a sample", {"y_train": np.arange(64) % 2 * 2}, "label 1"),
    ("one class only", {"y_train": np.zeros(64, int)}, "at least two"),
    ("fractional labels", {"y_train": np.linspace(0, 1, 64)}, "integers"),
    ("too few labels", {"y_train": np.arange(63) % 2}, "64 samples but 63 labels"),
    ("other shapes to test on", {"x_test": np.zeros((16, 5), np.float32)}, "shape"),
    ("no test labels", {"y_test": None}, "lacks y_test"),
    ("no samples", {"x_test": np.zeros((0, 4), np.float32)}, "empty"),
    ("text", {"x_train": np.full((64, 4), "a")}, "numbers"),
    ("objects", {"x_train": np.array([{}] * 64)}, "damaged"),
]


@pytest.mark.parametrize(
    ("changes", "fragment"), [d[1:] for d in DATA], ids=[d[0].replace(" ", "-") for d in DATA]
)
def test_bad_data(
    commands: Commands, tmp_path: Path, changes: dict[str, np.ndarray], fragment: str
) -> None:
    write_npz(tmp_path / "data.npz", **changes)
    with unchanged(tmp_path):
        outcome = commands.run(
            "train", "--out", "run", "--data", "data.npz", *TINY_NET, cwd=tmp_path
        )
        assert_refused(outcome, "data.npz", fragment)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_data_file(commands: Commands, tmp_path: Path, share: float) -> None:
    truncate(write_npz(tmp_path / "data.npz"), share)
    with unchanged(tmp_path):
        outcome = commands.run(
            "train", "--out", "run", "--data", "data.npz", *TINY_NET, cwd=tmp_path
        )
        assert_refused(outcome, "data.npz is damaged")


def test_a_data_file_with_a_flipped_bit(commands: Commands, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "data.npz")
    content = bytearray(path.read_bytes())
    content[400] ^= 0x10
    path.write_bytes(content)
    with unchanged(tmp_path):
        outcome = commands.run(
            "train", "--out", "run", "--data", "data.npz", *TINY_NET, cwd=tmp_path
        )
        assert_refused(outcome, "data.npz is damaged")


@pytest.fixture
def own_data(commands: Commands, tmp_path: Path) -> Path:
    """A run trained on the user's own file."""
    write_npz(tmp_path / "data.npz")
    outcome = commands.run("train", "--out", "run", "--data", "data.npz", *TINY_NET, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    return tmp_path


AFTERWARDS = [
    ("gone", None, "data.npz does not exist"),
    ("wider", {"x_train": np.zeros((64, 5)), "x_test": np.zeros((16, 5))}, "another network"),
    ("more classes", {"y_train": np.arange(64) % 3}, "another network"),
    ("now with NaN", {"x_test": with_value((16, 4), NAN)}, "NaN"),
]


@pytest.mark.parametrize("command", ["attack", "certify"])
@pytest.mark.parametrize(
    ("changes", "fragment"), [a[1:] for a in AFTERWARDS], ids=[a[0] for a in AFTERWARDS]
)
def test_data_that_changed_after_training(
    commands: Commands, own_data: Path, command: str, changes: dict[str, np.ndarray], fragment: str
) -> None:
    (own_data / "data.npz").unlink()
    if changes is not None:
        write_npz(own_data / "data.npz", **changes)
    with unchanged(own_data):
        assert_refused(commands.run(command, "run", "--steps", "2", cwd=own_data), fragment)


def test_data_that_got_shorter_after_a_certification(commands: Commands, own_data: Path) -> None:
    """Ten samples were certified; now there are eight."""
    assert commands.run("certify", "run", "--steps", "2", cwd=own_data).code == 0
    write_npz(own_data / "data.npz", x_test=np.zeros((8, 4), np.float32), y_test=np.arange(8) % 2)
    with unchanged(own_data):
        assert_refused(commands.run("certify", "run", "--steps", "2", cwd=own_data), "has changed")
