"""Names, paths and the folder for data."""

from pathlib import Path

import numpy as np
import pytest

from tightrope.data import dataset_names, default_data_dir, describe, load_dataset
from tightrope.errors import UserError


def test_data_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("TIGHTROPE_DATA", str(tmp_path))
    assert default_data_dir() == tmp_path
    with pytest.raises(UserError, match=str(tmp_path)):
        load_dataset("cifar10")
    monkeypatch.delenv("TIGHTROPE_DATA")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_data_dir() == Path("/home/someone/.cache/tightrope")


def test_unknown_names():
    with pytest.raises(UserError, match="unknown data set 'minst'; did you mean 'mnist'"):
        load_dataset("minst")
    with pytest.raises(UserError, match="choose one of: cifar10, mnist"):
        load_dataset("/does/not/exist")


def test_a_path_is_never_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"neither an \.npz file nor a folder"):
        load_dataset(Path("mnist"))
    (tmp_path / "mnist").mkdir()
    with pytest.raises(UserError, match="mnist/train is missing"):
        load_dataset(Path("mnist"))
    assert len(load_dataset("mnist").x_test) == 10000


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    x, y = np.arange(32, dtype=np.uint8).reshape(2, 16), np.arange(2)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert load_dataset("~/a.npz").input_shape == (16,)


def test_description_agrees_with_the_data(tmp_path):
    described = {entry.name: entry for entry in describe(tmp_path)}
    assert tuple(described) == dataset_names()
    mnist = load_dataset("mnist")
    assert described["mnist"].shape == mnist.input_shape
    assert described["mnist"].classes == mnist.num_classes
    assert [entry.name for entry in described.values() if entry.available] == ["mnist"]
    assert described["tinyimagenet"].shape == (3, 56, 56)
    assert described["tinyimagenet-64"].shape == (3, 64, 64)
    assert described["cifar10"].origin.startswith("https://")


def test_description_notices_what_is_there(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").touch()
    (tmp_path / "tiny-imagenet-200").mkdir()
    assert all(entry.available for entry in describe(tmp_path))
    locations = {entry.name: entry.location for entry in describe(tmp_path)}
    assert locations["cifar10"] == tmp_path / "cifar-10-python.tar.gz"
