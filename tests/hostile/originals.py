"""Good files of every kind, of which hostile ones are made."""

from __future__ import annotations

import gzip
import pickle
import tarfile
from pathlib import Path

import numpy as np
from badfiles import write_npz
from commands import Commands, Outcome
from onnx_files import random_layers, write_onnx, write_vnnlib
from PIL import Image

RUN = "runs/ibp-0"
# Settings of the trainings: a second each.
SMALL = (
    *("--net", "mlp", "--epochs", "2", "--set", "width=4", "--set", "depth=1"),
    *("--set", "batch_norm=false", "--set", "validation=8", "--set", "batch_size=16"),
    *("--set", "annealing_epochs=1"),
)
TRAIN = ("--data", "data.npz", "--eps", "0.05", *SMALL)
CERTIFY = ("--samples", "8", "--timeout", "5", "--steps", "5", "--restarts", "1")
CIFAR_BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")


def make_originals(place: Path, commands: Commands) -> None:
    """Fill a folder with a run and everything that commands read."""
    place.mkdir(parents=True)
    write_npz(place / "data.npz")
    _write_images(place / "images")
    _write_cifar(place / "cifar" / "cifar-10-batches-py")
    _write_archive(place / "cifar", place / "archive")
    _write_tinyimagenet(place / "tiny" / "tiny-imagenet-200")
    layers = random_layers([3, 8, 8, 4])
    for name in ("net.onnx", "net.onnx.gz"):
        write_onnx(place / name, *layers)
    for name in ("spec.vnnlib", "spec.vnnlib.gz"):
        unsafe = "(or (and (<= Y_0 Y_1) (<= Y_0 (* 0.5 Y_2))) (>= (+ Y_3 (- 1)) 90.25))"
        write_vnnlib(place / name, [("0.1", "0.4"), ("-0.5", "0.25"), ("0", "1e-3")], 4, unsafe)
    (place / "instances.csv").write_text("onnx,vnnlib,timeout\nnet.onnx,spec.vnnlib,2\n")
    random = np.random.default_rng(0)
    np.savez(place / "samples.npz", x_test=random.random((4, 3)), y_test=np.arange(4))
    for arguments in (
        ("verify", "--instances", "instances.csv"),
        ("train", "--out", RUN, "--method", "ibp", *TRAIN),
        ("certify", RUN, *CERTIFY),
        ("attack", RUN, "--samples", "4", "--steps", "3", "--restarts", "1"),
        ("estimate", RUN, "--samples", "4", "--steps", "2"),
        ("export", RUN, "--onnx", "exported.onnx"),
    ):
        _succeed(commands.run(*arguments, cwd=place))


def _succeed(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.err


def _write_images(folder: Path) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("ant", "bee"):
            (folder / part / name).mkdir(parents=True)
            for i in range(8):
                pixels = random.integers(0, 256, (6, 6), dtype=np.uint8)
                suffix = ("png", "jpg")[i % 2]
                Image.fromarray(pixels).save(folder / part / name / f"{i}.{suffix}")


def _write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in CIFAR_BATCHES:
        images = random.integers(0, 256, (10, 3072), dtype=np.uint8)
        batch = {b"data": images, b"labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(batch))


def _write_archive(source: Path, target: Path) -> None:
    target.mkdir()
    with tarfile.open(target / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(source / "cifar-10-batches-py", "cifar-10-batches-py")


def _write_tinyimagenet(folder: Path) -> None:
    """Two hundred classes of one image each; the images are all alike."""
    wnids = [f"n{k:08d}" for k in range(200)]
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for wnid in wnids:
        (folder / "train" / wnid / "images").mkdir(parents=True)
        image.save(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG", "JPEG", quality=10)
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for k in range(20):
        image.save(folder / "val" / "images" / f"val_{k}.JPEG", "JPEG", quality=10)
        lines.append(f"val_{k}.JPEG\t{wnids[k]}\t0\t0\t62\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines))
    (folder / "wnids.txt").write_text("\n".join(wnids))
    (folder / "words.txt").write_text("\n".join(f"{w}\tthing {i}" for i, w in enumerate(wnids)))


def pack(content: bytes, path: Path) -> bytes:
    """Compress content if the file's name says so."""
    return gzip.compress(content, 9) if path.suffix == ".gz" else content


def unpack(content: bytes, path: Path) -> bytes:
    """Undo `pack`."""
    return gzip.decompress(content) if path.suffix == ".gz" else content
