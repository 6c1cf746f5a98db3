"""Any property of any network: which inputs, what must hold, how far, and a whole test set."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import tightrope as tr


def network() -> tuple[nn.Module, Tensor, int]:
    """Return a network of one's own, an input and its class."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.tensor([0.2, 0.4, 0.6, 0.8])
    return module, x, int(module(x[None]).argmax())


def inputs(module: nn.Module, x: Tensor, label: int) -> list[tr.Answer]:
    """Ask about different sets of inputs."""
    by_feature = torch.tensor([0.0, 0.0, 0.01, 0.02])  # the first two do not change
    corners = (x - 0.01, x + torch.tensor([0.0, 0.01, 0.02, 0.03]))
    return [
        tr.verify(module, x, label, eps="2/255"),  # within [0, 1]
        tr.verify(module, x, label, eps=0.01, domain=(-1, 1)),
        tr.verify(module, x, label, eps=by_feature),
        tr.verify(module, x, label, eps=0.02, norm="l2"),
        tr.verify(module, x, label, eps=0.02, norm="l1"),
        tr.verify(module, box=corners, label=label),  # or a tr.Box
    ]


def outputs(module: nn.Module, x: Tensor, label: int) -> list[tr.Answer]:
    """Ask about different properties of the outputs."""
    box = tr.Box(x - 0.01, x + 0.01)
    apart = tr.linear([[1.0, -1.0, 0.0]], -0.01) | tr.linear([[-1.0, 1.0, 0.0]], -0.01)
    return [
        tr.verify(module, box=box, spec=tr.argmax(label, among=[0, 1, 2])),
        tr.verify(module, box=box, spec=tr.within(None, 10.0)),
        tr.verify(module, box=box, spec=tr.within([-1.0, -1.0, -1.0], [1.0, 1.0, 1.0])),
        # The first two outputs stay apart, or all of them are small.
        tr.verify(module, box=box, spec=apart | tr.within(-0.1, 0.1)),
    ]


def radius(module: nn.Module, x: Tensor, label: int) -> tr.LargestRadius:
    """Ask how far around an input the class is the same."""
    found = tr.largest_radius(module, x, label, tolerance=0.02, timeout=20)
    print(f"proved at {float(found.lower):.4f}, refuted at {float(found.upper or 1):.4f}")
    return found


def test_set(module: nn.Module, out: Path) -> tr.Certification:
    """Certify samples at several radii; results go to a folder, from which it continues."""
    x = torch.rand(20, 4)
    y = module(x).argmax(1)
    result = tr.certify(module, data=(x, y), eps=[0.01, 0.05], out=out, timeout=5)
    for point in result.curve:
        print(f"radius {point['eps']}: {100 * point['certified']:.0f} % certified")
    return result


def main(out: Path) -> tr.Certification:
    """Ask everything."""
    module, x, label = network()
    for answer in (*inputs(module, x, label), *outputs(module, x, label)):
        print(answer.verdict, answer.stage)
    radius(module, x, label)
    return test_set(module, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/properties"))
    main(parser.parse_args().out)
