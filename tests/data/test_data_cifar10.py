"""The loader of CIFAR-10: its layouts, and files that are damaged or hostile."""

import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tightrope.data import load_dataset
from tightrope.data.pickles import read_batch
from tightrope.errors import UserError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
NAMES = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]


def arrays(seed, count=4):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    return data, rng.integers(0, 10, count).tolist()


def python2_pickle(data, labels):
    """The bytes Python 2's cPickle (protocol 2) makes of a batch, as in the official archive."""

    def short(text):
        return b"U" + bytes([len(text)]) + text

    def integer(value):
        return b"J" + struct.pack("<i", value)

    raw = data.tobytes()
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + integer(0) + integer(1) + b"\x87R"
    dtype += b"(" + integer(3) + short(b"|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n"
    array += integer(0) + b"\x85" + short(b"b") + b"\x87R"
    array += b"(" + integer(1) + integer(data.shape[0]) + integer(data.shape[1]) + b"\x86"
    array += dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    label_list = b"](" + b"".join(integer(label) for label in labels) + b"e"
    batch_label = short(b"batch_label") + short(b"training batch 1 of 5")
    return (
        b"\x80\x02}("
        + batch_label
        + (short(b"labels") + label_list + short(b"data") + array + b"u.")
    )


def python3_pickle(data, labels):
    return pickle.dumps({b"data": data, b"labels": labels})


def write_folder(folder, dump=python2_pickle):
    folder.mkdir(parents=True)
    for seed, name in enumerate(NAMES):
        (folder / name).write_bytes(dump(*arrays(seed)))


def check_contents(data):
    expected = [arrays(seed) for seed in range(6)]
    images = np.concatenate([part for part, _ in expected[:5]]).reshape(-1, 3, 32, 32)
    assert torch.equal(data.x_train, torch.from_numpy(images))
    assert data.y_train.tolist() == [label for _, part in expected[:5] for label in part]
    assert torch.equal(data.x_test, torch.from_numpy(expected[5][0].reshape(-1, 3, 32, 32)))
    assert data.y_test.tolist() == expected[5][1]


@pytest.mark.parametrize("dump", [python2_pickle, python3_pickle])
def test_folder(tmp_path, dump):
    write_folder(tmp_path / "cifar-10-batches-py", dump)
    data = load_dataset("cifar10", tmp_path)
    check_contents(data)
    assert data.input_shape == (3, 32, 32) and data.num_classes == 10
    augment = data.augment
    assert (augment.flip, augment.crop, augment.padding) == (True, 32, 2)


def test_the_python2_pickle_of_these_tests_is_a_real_one():
    data, labels = arrays(0)
    loaded = pickle.loads(python2_pickle(data, labels), encoding="bytes")
    assert np.array_equal(loaded[b"data"], data) and loaded[b"labels"] == labels


def make_archive(path, names=NAMES):
    with tarfile.open(path, "w:gz") as tar:
        for seed, name in enumerate(names):
            content = python2_pickle(*arrays(seed))
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_archive_is_read_in_place(tmp_path):
    make_archive(tmp_path / "cifar-10-python.tar.gz")
    check_contents(load_dataset("cifar10", tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["cifar-10-python.tar.gz"]


def test_damaged_archives(tmp_path):
    path = tmp_path / "cifar-10-python.tar.gz"
    make_archive(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cifar-10-python.tar.gz.* damaged"):
        load_dataset("cifar10", tmp_path)
    path.write_bytes(b"not an archive")
    with pytest.raises(UserError, match="is damaged"):
        load_dataset("cifar10", tmp_path)
    make_archive(path, NAMES[:4])
    with pytest.raises(UserError, match="lacks data_batch_5, test_batch"):
        load_dataset("cifar10", tmp_path)


def test_missing_data_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(UserError, match="tightrope data fetch cifar10") as caught:
        load_dataset("cifar10", tmp_path)
    assert str(tmp_path / "cifar-10-batches-py") in str(caught.value)


def test_missing_batch_is_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_folder(folder)
    (folder / "data_batch_3").unlink()
    with pytest.raises(UserError, match="data_batch_3"):
        load_dataset("cifar10", tmp_path)


class Touch:
    """Unpickled normally, this creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: {"data": evil, "labels": []}])
def test_hostile_pickle_is_refused_and_does_nothing(tmp_path, protocol, wrap):
    folder = tmp_path / "cifar-10-batches-py"
    write_folder(folder)
    trap = tmp_path / "executed"
    (folder / "data_batch_1").write_bytes(pickle.dumps(wrap(Touch(trap)), protocol))
    with pytest.raises(UserError, match=r"data_batch_1 is refused: it asks for \w+\.mkdir"):
        load_dataset("cifar10", tmp_path)
    assert not trap.exists()
    pickle.loads((folder / "data_batch_1").read_bytes())
    assert trap.exists(), "the pickle of this test would have done no harm anyway"


@pytest.mark.parametrize(
    "name",
    [
        b"builtins\neval",
        b"numpy\nload",
        b"numpy.core.multiarray\nscalar",
        b"builtins\ngetattr",
        b"numpy\nndarray.__class__",
    ],
)
def test_other_names_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="refused"):
        read_batch(io.BytesIO(b"\x80\x04c" + name + b"\n."), tmp_path)


def test_stand_ins_cannot_be_altered_by_a_pickle(tmp_path):
    # Give the class that stands for numpy.ndarray a state with attributes to set on it.
    evil = b"\x80\x02cnumpy\nndarray\nN}U\x05extraU\x04evils\x86b."
    with pytest.raises(UserError, match="damaged"):
        read_batch(io.BytesIO(evil), tmp_path)
    from tightrope.data.pickles import ALLOWED

    assert not any(hasattr(stand_in, "extra") for stand_in in ALLOWED.values())


BATCH = python2_pickle(*arrays(0, count=1))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 260), st.integers(0, 255), st.booleans())
def test_damage_gives_a_batch_or_a_user_error(position, byte, cut):
    content = bytearray(BATCH)
    content[position] = byte
    try:
        read_batch(bytes(content[:position] if cut else content), Path("batch"))
    except UserError as error:
        assert "batch is" in str(error) and "\n" not in str(error)
        return
    assert not cut


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data, labels: {b"data": data}, "KeyError: 'labels'"),
        (lambda data, labels: {b"data": data, b"labels": labels[:-1]}, "4 samples but 3 labels"),
        (lambda data, labels: {b"data": data, b"labels": [0, 1, 2, 10]}, "label 10"),
        (lambda data, labels: {b"data": data, b"labels": [0, 1, 2, -1]}, "negative label -1"),
        (lambda data, labels: {b"data": data, b"labels": [0.5] * 4}, "whole numbers"),
        (lambda data, labels: {b"data": data[:, :-1].copy(), b"labels": labels}, "3071"),
        (lambda data, labels: {b"data": data.astype("f4"), b"labels": labels}, "of bytes"),
        (lambda data, labels: {b"data": [1], b"labels": labels}, "not an array"),
        (lambda data, labels: [data, labels], "not a CIFAR-10 batch"),
    ],
)
def test_wrong_contents(tmp_path, change, message):
    folder = tmp_path / "cifar-10-batches-py"
    write_folder(folder)
    (folder / "test_batch").write_bytes(pickle.dumps(change(*arrays(0))))
    with pytest.raises(UserError, match=message) as caught:
        load_dataset("cifar10", tmp_path)
    assert "test_batch" in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "unpack_cifar10.py").exists(), reason="no shared data here")
def test_sixty_thousand_real_images(tmp_path):
    command = [sys.executable, str(SHARED / "unpack_cifar10.py"), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    data = load_dataset("cifar10", tmp_path)
    assert data.x_train.shape == (50000, 3, 32, 32) and data.x_test.shape == (10000, 3, 32, 32)
    assert data.y_train.bincount().tolist() == [5000] * 10
    means = (data.x_train.double().mean((0, 2, 3)) / 255).tolist()
    assert means == pytest.approx(data.mean, abs=1e-3)
