"""The embedded MNIST."""

import lzma
import shutil

import pytest
import torch

from tightrope.data import as_float, load_dataset
from tightrope.data.mnist import CHECKSUMS, EMBEDDED, load_mnist, read_idx
from tightrope.errors import UserError

LABELS = "t10k-labels-idx1-ubyte"


def test_mnist_is_mnist():
    data = load_dataset("mnist")
    assert data.x_train.shape == (60000, 1, 28, 28) and data.x_test.shape == (10000, 1, 28, 28)
    assert data.x_train.dtype == torch.uint8 and data.y_train.dtype == torch.int64
    assert data.y_train[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert data.y_test[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]
    assert data.y_train.bincount().tolist()[:3] == [5923, 6742, 5958]
    assert data.input_shape == (1, 28, 28) and data.classes == tuple("0123456789")
    assert not data.augment.active


def test_suggested_normalisation_is_that_of_the_data():
    data = load_dataset("mnist")
    pixels = as_float(data.x_train)
    assert abs(float(pixels.mean()) - data.mean[0]) < 1e-4
    assert abs(float(pixels.std()) - data.std[0]) < 1e-4


def test_decoded_once():
    assert load_dataset("mnist") is load_dataset("mnist")


def test_labels_decode():
    labels = read_idx(EMBEDDED / f"{LABELS}.xz", CHECKSUMS[LABELS])
    assert labels.shape == (10000,) and labels.dtype == torch.uint8


@pytest.mark.parametrize("damage", ["truncate", "garbage", "flip", "other", "missing"])
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / f"{LABELS}.xz"
    shutil.copy(EMBEDDED / path.name, path)
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(content[:-100])
    elif damage == "garbage":
        path.write_bytes(b"no xz at all")
    elif damage == "flip":
        content[2000] ^= 1
        path.write_bytes(content)
    elif damage == "other":
        path.write_bytes(lzma.compress(b"\0\0\x08\x01\0\0\0\x01\x07"))
    else:
        path.unlink()
    with pytest.raises(UserError, match=f"{path.name} is (damaged|missing)") as caught:
        read_idx(path, CHECKSUMS[LABELS])
    assert "\n" not in str(caught.value)


def test_a_broken_installation_is_an_error(tmp_path):
    with pytest.raises(UserError, match="install Tightrope again"):
        load_mnist(tmp_path)
