"""Data of one's own: arrays as an `.npz` file, pictures as a folder, and training on either."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import tightrope as tr
from tightrope.data import load_dataset


def write_npz(path: Path, train: int, test: int) -> None:
    """Write a data set of two classes, even and odd digits, as one file."""
    mnist = load_dataset("mnist").subset(train, test)
    np.savez_compressed(
        path,
        x_train=mnist.x_train.numpy(),  # uint8 [N, 1, 28, 28]
        y_train=mnist.y_train.numpy() % 2,
        x_test=mnist.x_test.numpy(),
        y_test=mnist.y_test.numpy() % 2,
    )


def write_folder(folder: Path, train: int, test: int) -> None:
    """Write the same as pictures: train/even/0.png, ..., test/odd/7.png."""
    mnist = load_dataset("mnist").subset(train, test)
    parts = {"train": (mnist.x_train, mnist.y_train), "test": (mnist.x_test, mnist.y_test)}
    for part, (images, labels) in parts.items():
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            home = folder / part / ("odd" if label % 2 else "even")
            home.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(home / f"{i}.png")


def train(data: Path, out: Path, **settings: Any) -> tr.Certification:
    """Train on either, and certify on its test samples."""
    run = tr.train(data=str(data), net="mlp", method="ibp", eps="2/255", out=out, **settings)
    return tr.certify(run)


def main(out: Path, *, samples: int = 2000, **settings: Any) -> dict[str, tr.Certification]:
    """Write both, train on both."""
    out.mkdir(parents=True, exist_ok=True)
    write_npz(out / "parity.npz", samples, 100)
    write_folder(out / "parity", samples, 100)
    results = {}
    for data in (out / "parity.npz", out / "parity"):
        results[data.name] = train(
            data, out / f"run-{data.suffix or 'folder'}".replace(".", ""), **settings
        )
        print(f"{data}: certified {results[data.name].certified:.1%}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/own-data"))
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.out, epochs=arguments.epochs)
