"""Which files are changed how, and which commands read them."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from zipfile import BadZipFile

from formats import (
    Change,
    change_array,
    change_bytes,
    change_compressed,
    change_json,
    change_json_line,
    change_png,
    change_safetensors,
    change_text,
    change_vnnlib,
    change_zip,
)
from mutations import KINDS, TEXTS
from onnx_changes import change_onnx
from originals import CERTIFY, RUN, SMALL, TRAIN

Arguments = tuple[str, ...]

TIMEOUT = "2"  # seconds of a verification
VERIFY = ("--timeout", TIMEOUT)
ON_RUN: tuple[Arguments, ...] = (
    ("certify", RUN, *CERTIFY),
    ("certify", RUN, *CERTIFY, "--force"),
    ("attack", RUN, "--samples", "4", "--steps", "3", "--restarts", "1"),
    ("estimate", RUN, "--samples", "4", "--steps", "2"),
    ("export", RUN, "--onnx", "new.onnx"),
    ("report", RUN, "-o", "new.html"),
    ("reproduce", "cost", "--out", "."),
    ("reproduce", "proxy", "--out", "."),
    ("train", "--out", RUN, "--resume"),
    ("compare", "--methods", "ibp", "--out", "runs", "--samples", "4", *TRAIN),
    ("train", "--out", RUN, "--force", *TRAIN),
)


def _on_data(*arguments: str) -> tuple[Arguments, ...]:
    return (("train", "--out", "new", "--eps", "0.05", *SMALL, *arguments),)


@dataclass(frozen=True)
class Target:
    """A file to change: how, and who reads it. `needs` is what has to lie beside it."""

    file: str
    changes: tuple[Change, ...]
    readers: tuple[Arguments, ...]
    needs: tuple[str, ...]
    weight: int = 1


def _of_run(name: str, *changes: Change, weight: int = 1) -> Target:
    return Target(f"{RUN}/{name}", changes, ON_RUN, ("runs", "data.npz"), weight)


def _verify(onnx: str, vnnlib: str) -> tuple[Arguments, ...]:
    return (("verify", onnx, vnnlib, *VERIFY),)


_images = _on_data("--data", "images")
_cifar = _on_data("--data", "cifar10", "--data-dir", "cifar")
_archive = _on_data("--data", "cifar10", "--data-dir", "archive")
_tiny = _on_data("--data", "tinyimagenet", "--data-dir", "tiny")
_listing = (("data", "list", "--data-dir", "tiny"),)
_onnx, _vnnlib = (change_onnx, change_onnx, change_bytes), (change_vnnlib, change_bytes)
_TINY = "tiny/tiny-imagenet-200"

_list = (("verify", "--instances", "instances.csv", *VERIFY),)
_listed = ("instances.csv", "net.onnx", "spec.vnnlib")
_brought = (
    ("certify", "net.onnx", "--data", "samples.npz", "--eps", "0.05", "--out", "new", *CERTIFY),
)

TARGETS: tuple[Target, ...] = (
    _of_run("config.toml", change_text, change_text, change_bytes, weight=3),
    _of_run("model.json", change_json, change_text, change_bytes, weight=3),
    _of_run("model.safetensors", change_safetensors, change_bytes, weight=2),
    _of_run("checkpoint.pt", change_zip, change_bytes, weight=2),
    _of_run("history.jsonl", change_json_line, change_text, change_bytes),
    _of_run("certification.jsonl", change_json_line, change_text, change_bytes, weight=2),
    _of_run("certification.json", change_json, change_text, change_bytes, weight=2),
    _of_run("attack.json", change_json, change_text),
    _of_run("estimate.json", change_json, change_text),
    _of_run("counterexamples", change_bytes),
    _of_run("counterexamples/000000.npy", change_array, change_bytes),
    _of_run(".tightrope.lock", change_json, change_text),
    _of_run("report.html", change_bytes),
    _of_run("tensorboard", change_bytes),
    Target("data.npz", (change_zip, change_bytes), ON_RUN[:6], ("runs", "data.npz"), 3),
    Target("images/train/bee/2.png", (change_png, change_bytes), _images, ("images",), 4),
    Target("images/test/ant/1.jpg", (change_bytes,), _images, ("images",), 3),
    Target("cifar/cifar-10-batches-py/test_batch", (change_bytes,), _cifar, ("cifar",), 4),
    Target("archive/cifar-10-python.tar.gz", (change_bytes,), _archive, ("archive",), 2),
    Target(f"{_TINY}/wnids.txt", (change_text,), _tiny + _listing, ("tiny",)),
    Target(f"{_TINY}/words.txt", (change_text,), _tiny, ("tiny",)),
    Target(f"{_TINY}/val/val_annotations.txt", (change_text,), _tiny, ("tiny",)),
    Target("net.onnx", _onnx, _verify("net.onnx", "spec.vnnlib"), ("net.onnx", "spec.vnnlib"), 12),
    Target(
        "net.onnx.gz",
        (change_compressed(change_onnx),),
        _verify("net.onnx.gz", "spec.vnnlib"),
        ("net.onnx.gz", "spec.vnnlib"),
        3,
    ),
    Target(
        "spec.vnnlib", _vnnlib, _verify("net.onnx", "spec.vnnlib"), ("net.onnx", "spec.vnnlib"), 12
    ),
    Target(
        "spec.vnnlib.gz",
        (change_compressed(change_vnnlib),),
        _verify("net.onnx", "spec.vnnlib.gz"),
        ("net.onnx", "spec.vnnlib.gz"),
        3,
    ),
    Target("instances.csv", (change_text, change_bytes), _list, _listed),
    Target("results.csv", (change_text, change_bytes), _list, (*_listed, "results.csv")),
    Target("samples.npz", (change_zip, change_bytes), _brought, ("net.onnx", "samples.npz"), 2),
)


# Raised by changes that know the format when an earlier change has left nothing of it.
DIFFERENT = (ValueError, KeyError, RecursionError, struct.error, zlib.error, OSError, EOFError)
DIFFERENT += (BadZipFile,)


@dataclass(frozen=True)
class Case:
    """One hostile file, and the commands that read it."""

    target: Target
    place: Path
    how: str

    @property
    def written(self) -> tuple[str, ...]:
        """What the commands may make or change, besides the file itself."""
        made = ("new", "new.onnx", "new.html", "results.csv")
        return (*made, "runs", "cost", "proxy", "logs", "tiny")


def choose_target(random: Random) -> Target:
    """Return one of the files, the more important ones more often."""
    return random.choices(TARGETS, [target.weight for target in TARGETS])[0]


def make_case(number: int, seed: int, originals: Path, folder: Path) -> Case:
    """Make the hostile file of a number, in a place of its own with `outside` beside it."""
    random = Random(f"{seed}-{number}")
    target = choose_target(random)
    place = folder / "place"
    place.mkdir(parents=True)
    shutil.copytree(originals.parent / "outside", folder / "outside")
    for name in target.needs:
        source = originals / name
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, place / name)
    return Case(target, place, _spoil(place / target.file, target.changes, random))


def _spoil(path: Path, changes: Sequence[Change], random: Random) -> str:
    """Change a file, or what kind of thing it is; return how."""
    if random.random() < 0.12 or path.is_dir() or not path.exists():
        kind = random.choice(list(KINDS))
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        KINDS[kind](path)
        return kind
    content, names = path.read_bytes(), []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        change = random.choice(changes)
        try:
            content = change(content, random)
        except DIFFERENT:
            content = change_bytes(content, random)
        names.append(change.__name__)
    path.write_bytes(content)
    if random.random() < 0.05:  # a name that people did not expect, beside it
        extra = random.choice(TEXTS).replace("/", "_").replace("\0", "")[:60]
        path.with_name(f"x{extra}").write_bytes(content[:1000])
    return ", ".join(names)
