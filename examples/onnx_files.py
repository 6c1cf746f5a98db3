"""ONNX networks from Python: write one, read it back, bound it, verify it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import tightrope as tr
from tightrope.nets import export_onnx
from tightrope.nets.onnx.importing import read_onnx


def write(path: Path) -> float:
    """Write a module as ONNX; the result is its largest difference from onnxruntime."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return export_onnx(module, input_shape=(8,), path=path)


def examine(path: Path, eps: float | str = "1/100") -> tr.Verification:
    """Bound the outputs of an ONNX network and decide about one input."""
    network = read_onnx(path)
    x = torch.full(network.input_shape, 0.5, dtype=network.dtype)
    box = tr.bounds(network.graph, x[None], eps=eps, method="alpha")
    print("outputs lie between", box.lower[0].tolist(), "and", box.upper[0].tolist())
    label = int(network.run(x[None])[0].argmax())  # by onnxruntime
    return tr.verify(network, x, label, eps=eps)


def main(path: Path) -> tr.Verification:
    """Do both."""
    print(f"{path}: differs by {write(path):.1e}")
    answer = examine(path)
    print(answer.verdict)
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example.onnx"))
    main(parser.parse_args().out)
