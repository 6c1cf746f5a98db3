"""Checkpoints: what is written is read, damage is reported, nothing is executed."""

import copy
import os
import pickle
import zipfile

import pytest
import torch
from patience import within

from tightrope.errors import UserError
from tightrope.training.checkpoints import (
    Checkpoint,
    epoch_seed,
    load_checkpoint,
    save_checkpoint,
)


def example():
    torch.manual_seed(0)
    layer = torch.nn.Linear(20, 10)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.rand(3, 20)).sum().backward()
    optimizer.step()
    return Checkpoint(3, layer.state_dict(), optimizer.state_dict(), 0.75, 2)


def assert_same(found, expected):
    """Compare nested containers bit by bit."""
    assert type(found) is type(expected) or isinstance(expected, dict)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected


def test_round_trip(tmp_path):
    path = tmp_path / "sub" / "checkpoint.pt"
    save_checkpoint(example(), path)
    assert_same(vars(load_checkpoint(path)), vars(example()))
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint.pt"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(example(), path)
    before = path.read_bytes()
    unwritable = example()
    unwritable.model["w"] = lambda: None
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(unwritable, path)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(example(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def refuse(path):
    with pytest.raises(UserError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"hello", b"PK\x03\x04", b"\x80\x02}q\x00.", bytes(1000)],
    ids=repr,
)
def test_other_files(content, tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    assert "damaged" in refuse(path)


def test_truncated_files(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(example(), path)
    content = path.read_bytes()
    for length in [*range(0, len(content), 211), len(content) - 1]:
        path.write_bytes(content[:length])
        assert "damaged" in refuse(path)


def test_a_flipped_bit_never_goes_unnoticed(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(example(), path)
    content = path.read_bytes()
    expected = vars(example())
    silent = []
    for position in range(0, len(content), 31):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            found = vars(load_checkpoint(path))
            assert_same(found, expected)  # some bytes of a zip file carry no meaning
        except UserError:
            continue
        except (AssertionError, AttributeError):
            silent.append(position)
    assert not silent, f"{len(silent)} positions give another state without an error"


@pytest.mark.parametrize(
    "content",
    [
        [1, 2, 3],
        torch.zeros(3),
        {},
        {"format": 1},
        {"format": 1, "epoch": 1},
        {"format": 1, **vars(example()), "more": 1},
        {**vars(example())},
    ],
    ids=["list", "tensor", "empty", "format", "part", "more", "no format"],
)
def test_files_with_other_content(content, tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    assert "damaged" in refuse(path)


def compressed(path):
    """Compress a checkpoint, as it would be to become gigabytes when it is read."""
    save_checkpoint(example(), path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def overlapping(path):
    """Let many members of an archive share the same content."""
    save_checkpoint(example(), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("checkpoint/more", bytes(1 << 10))
        first = archive.infolist()[-1]
        for i in range(1000):
            twin = copy.copy(first)
            twin.filename = f"checkpoint/more{i}"
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin


def widened(path):
    """Claim a tensor of many elements that has one."""
    weight = torch.zeros(1).expand(1000, 1000)
    torch.save({"format": 1, **vars(example()), "model": {"weight": weight}}, path)


@pytest.mark.parametrize("write", [compressed, overlapping, widened, os.mkfifo])
def test_hostile_files(write, tmp_path):
    path = tmp_path / "checkpoint.pt"
    write(path)
    with within(60):
        refuse(path)


def test_lists_that_hold_each_other(tmp_path):
    value = [1.0]
    for _ in range(100):
        value = [value, value]
    value.append(value)
    path = tmp_path / "checkpoint.pt"
    torch.save({"format": 1, **vars(example()), "optimizer": {"state": value}}, path)
    with within(60):
        assert len(load_checkpoint(path).optimizer["state"]) == 3


def test_other_versions(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"format": 999, **vars(example())}, path)
    assert "another version" in refuse(path)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt")


class Bomb:
    """Leaves a trace when it is unpickled by a reader that executes code."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (eval, (f"open({str(self.target)!r}, 'w').close()",))


@pytest.mark.parametrize("kind", ["pickle", "zip", "inside", "legacy"])
def test_nothing_in_a_file_is_executed(kind, tmp_path):
    path, target = tmp_path / "checkpoint.pt", tmp_path / "executed"
    bomb = Bomb(target)
    if kind == "pickle":
        path.write_bytes(pickle.dumps(bomb, protocol=2))
    elif kind == "inside":
        content = {"format": 1, **vars(example())}
        content["optimizer"] = {"state": bomb}
        torch.save(content, path)
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=kind == "zip")
    assert "damaged" in refuse(path)
    assert not target.exists()
    if kind in ("zip", "inside", "legacy"):  # the bomb works, so its silence means something
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())
    assert target.exists()


def test_seeds_of_epochs_are_distinct():
    seeds = [epoch_seed(seed, epoch) for seed in range(40) for epoch in range(300)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= epoch_seed(s, e) < 2**63 for s in (0, 2**62, 2**63 - 1) for e in (0, 10**6))
    assert epoch_seed(0, 0) == epoch_seed(0, 0)
