"""Write a VNN-LIB file: is a network robust around one test image?"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from tightrope.data import as_float, load_dataset


def robustness(x: list[float], label: int, eps: Fraction, classes: int = 10) -> str:
    """Return a property whose counterexamples are inputs near x of another class."""
    lines = [f"(declare-const X_{i} Real)" for i in range(len(x))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(classes)]
    for i, value in enumerate(x):
        lower, upper = max(0.0, value - float(eps)), min(1.0, value + float(eps))
        lines += [f"(assert (>= X_{i} {lower:.9f}))", f"(assert (<= X_{i} {upper:.9f}))"]
    wrong = " ".join(f"(and (>= Y_{i} Y_{label}))" for i in range(classes) if i != label)
    return "\n".join([*lines, f"(assert (or {wrong}))"]) + "\n"


def main(out: Path, index: int = 0, eps: str = "0.1") -> None:
    """Write the property of an MNIST image."""
    data = load_dataset("mnist")
    x = as_float(data.x_test[index]).flatten().tolist()
    text = robustness(x, int(data.y_test[index]), Fraction(eps))
    out.write_text(text, encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--eps", default="0.1")
    arguments = parser.parse_args()
    main(arguments.out, arguments.index, arguments.eps)
