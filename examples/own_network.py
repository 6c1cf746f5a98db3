"""A network of one's own: bounds and proofs for any `nn.Module`, and how to train it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tightrope as tr
from tightrope.data import as_float, load_dataset
from tightrope.nets import NETS, NetSpec


class Residual(nn.Module):
    """A small residual network: plain PyTorch."""

    def __init__(self, channels: int = 4, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 4, stride=4)
        self.norm = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Linear(channels * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number per class."""
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.second(x))
        return self.last(torch.flatten(x, 1))


def bound(module: nn.Module, x: Tensor, eps: float | str) -> dict[str, float]:
    """Return the mean width of the output bounds by method, from loose to tight."""
    graph = tr.trace(module, input_shape=tuple(x.shape[1:]))
    widths = {}
    for method in ("ibp", "crown-ibp", "crown", "alpha"):
        box = tr.bounds(graph, x, eps=eps, method=method)
        widths[method] = float((box.upper - box.lower).mean())
    return widths


def prove(module: nn.Module, x: Tensor, eps: float | str) -> tr.Verification:
    """Prove or refute that the class of one image does not change."""
    label = int(module(x[None]).argmax())
    return tr.verify(module, x, label, eps=eps, timeout=30)


def residual(
    input_shape: tuple[int, ...], classes: int, *, width: int = 4, batch_norm: bool = False
) -> nn.Sequential:
    """Build the network for a data set; keyword arguments become settings."""
    assert input_shape == (1, 28, 28) and classes == 10
    return nn.Sequential(Residual(width, batch_norm))


def train(out: Path, **settings: Any) -> tr.Run:
    """Train the network by IBP under a name of its own."""
    NETS["residual"] = NetSpec("residual", residual, "two convolutions with a shortcut")
    return tr.train(net="residual", method="ibp", out=out, **settings)


def main(out: Path, *, images: int = 4, samples: int = 100, **settings: Any) -> tr.Certification:
    """Do all of it on MNIST."""
    run = train(out, eps="1/20", **settings)
    module, _ = run.network()
    x = as_float(load_dataset("mnist").x_test[:images])
    for method, width in bound(module, x, "1/20").items():
        print(f"{method}: mean width of the bounds {width:.3f}")
    answer = prove(module, x[0], "1/20")
    print(
        f"first image: {answer.verdict}, decided by {answer.stage}, margin at least {answer.bound}"
    )
    result = tr.certify(run, samples=samples)
    print(f"certified {result.certified:.1%} of {samples} images")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/own-network"))
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.out, epochs=arguments.epochs, train_samples=10000)
