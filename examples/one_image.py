"""Prove or refute the robustness of one test image of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

import tightrope as tr
from tightrope.data import as_float, load_dataset
from tightrope.runs import open_run


def main(run: Path, index: int = 0, eps: float | str = 0.1) -> tr.Verification:
    """Verify one MNIST image and say what came out."""
    module, _ = open_run(run).network()
    data = load_dataset("mnist")
    x, label = as_float(data.x_test[index]), int(data.y_test[index])
    answer = tr.verify(module, x, label, eps=eps, timeout=60)
    print(f"image {index}, a {label}: {answer.verdict} (decided by {answer.stage})")
    if answer.counterexample is not None:
        point = answer.counterexample
        print(f"a counterexample at distance {float((point - x).abs().max()):.4f}")
        print(f"is taken for a {int(module(point[None]).argmax())}")
    elif answer:
        print(f"every image within {eps} has a margin of at least {answer.bound:.3f}")
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--eps", default="0.1")
    arguments = parser.parse_args()
    main(arguments.run, arguments.index, arguments.eps)
