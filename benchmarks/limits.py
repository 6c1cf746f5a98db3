"""Are limits kept? What `verify --timeout` takes beyond its limit, alone and beside neighbours.

    python benchmarks/limits.py [FOLDER ...] [--limits 1,3,10] [--neighbours 2] [--only NAME]

Networks that take long in different ways are made and verified by the command, in a process of its
own: wide and deep ones, convolutions with many neurons, a residual network of full width, sigmoids,
thousands of input boxes, thousands of layers. Folders with `instances.csv` (as in
`benchmarks/vnncomp.py`) are tried as well. An answer may come up to a tenth of the limit and two
seconds late; the last column is the process's peak memory.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from busy import neighbours

TENTH, MORE = 0.1, 2.0


class Writer:
    """Writes an ONNX network layer by layer; weights are random, by a fixed seed."""

    def __init__(self, *shape: int) -> None:
        self.nodes: list[object] = []
        self.constants: list[object] = []
        self.shape, self.random = shape, np.random.default_rng(0)

    def _constant(self, array: np.ndarray) -> str:
        from onnx import numpy_helper

        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: object) -> str:
        """Append an operator."""
        from onnx import helper

        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        """Append a fully connected layer."""
        weight = self.random.normal(size=(outputs, inputs)) * np.sqrt(2 / inputs)
        bias = self.random.normal(size=outputs) / 10
        return self.node("Gemm", x, self._constant(weight), self._constant(bias), transB=1)

    def conv(self, x: str, inputs: int, outputs: int, stride: int = 1, size: int = 3) -> str:
        """Append a convolution."""
        scale = np.sqrt(2 / (inputs * size * size))
        weight = self._constant(self.random.normal(size=(outputs, inputs, size, size)) * scale)
        return self.node("Conv", x, weight, strides=[stride] * 2, pads=[size // 2] * 4)

    def save(self, path: Path, output: str) -> int:
        """Write the file; return which output is the largest in the middle of the unit cube."""
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper

        given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, *self.shape])
        result = onnx.ValueInfoProto(name=output)
        result.type.tensor_type.elem_type = TensorProto.FLOAT
        graph = helper.make_graph(self.nodes, "network", [given], [result], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        content = model.SerializeToString()
        path.write_bytes(content)
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        middle = np.full((1, *self.shape), 0.5, np.float32)
        return int(session.run(None, {"x": middle})[0].argmax())


def wide(path: Path) -> str:
    """Six layers of 4,096 neurons."""
    net, x = Writer(784), "x"
    for before in (784, *[4096] * 5):
        x = net.node("Relu", net.dense(x, before, 4096))
    return ball(784, 0.02, 10, net.save(path, net.dense(x, 4096, 10)))


def convolutions(path: Path) -> str:
    """Eight convolutions with 16,384 neurons each."""
    net, x = Writer(3, 32, 32), "x"
    for before in (3, *[16] * 7):
        x = net.node("Relu", net.conv(x, before, 16))
    x = net.node("Flatten", x)
    return ball(3072, 0.01, 10, net.save(path, net.dense(x, 16384, 10)))


def residual(path: Path, size: int = 32) -> str:
    """A ResNet-18 of full width, without normalisation."""
    net = Writer(3, size, size)
    x, before = net.node("Relu", net.conv("x", 3, 64)), 64
    for channels, stride in (
        (64, 1),
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        (512, 1),
    ):
        y = net.node("Relu", net.conv(x, before, channels, stride))
        y = net.conv(y, channels, channels)
        other = x if stride == 1 else net.conv(x, before, channels, stride, 1)
        x, before = net.node("Relu", net.node("Add", y, other)), channels
    x = net.node("Flatten", net.node("GlobalAveragePool", x))
    return ball(3 * size * size, 1e-4, 10, net.save(path, net.dense(x, 512, 10)))


def sigmoids(path: Path) -> str:
    """Five layers of 512 sigmoids."""
    net, x = Writer(784), "x"
    for before in (784, *[512] * 4):
        x = net.node("Sigmoid", net.dense(x, before, 512))
    return ball(784, 0.1, 10, net.save(path, net.dense(x, 512, 10)))


def chain(path: Path) -> str:
    """Five thousand layers of three neurons."""
    net, x = Writer(3), "x"
    for _ in range(5000):
        x = net.node("Relu", net.dense(x, 3, 3))
    return ball(3, 0.5, 2, net.save(path, net.dense(x, 3, 2)))


def boxes(path: Path) -> str:
    """Three thousand boxes of six inputs, each with outputs of its own."""
    net, x = Writer(6), "x"
    for before in (6, 64, 64):
        x = net.node("Relu", net.dense(x, before, 64))
    net.save(path, net.dense(x, 64, 3))
    lines = []
    for i in range(3000):
        low = net.random.uniform(size=6)
        terms = [f"(>= X_{j} {v:.6f}) (<= X_{j} {v + 0.2:.6f})" for j, v in enumerate(low)]
        lines.append(f"(and {' '.join(terms)} (>= Y_{i % 3} Y_{(i + 1) % 3}) (>= Y_{i % 3} 12))")
    return f"{_declared(6, 3)}(assert (or\n" + "\n".join(lines) + "))\n"


def _declared(inputs: int, outputs: int) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def ball(inputs: int, radius: float, outputs: int, best: int) -> str:
    """Return a property: one output is the largest around the middle of the unit cube."""
    lines = [
        f"(assert (<= X_{i} {0.5 + radius}))\n(assert (>= X_{i} {0.5 - radius}))\n"
        for i in range(inputs)
    ]
    other = " ".join(f"(and (>= Y_{k} Y_{best}))" for k in range(outputs) if k != best)
    return f"{_declared(inputs, outputs)}{''.join(lines)}(assert (or {other}))\n"


CASES: dict[str, Callable[[Path], str]] = {
    "wide": wide,
    "convolutions": convolutions,
    "residual": residual,
    "sigmoids": sigmoids,
    "chain": chain,
    "boxes": boxes,
}


def made(folder: Path, only: str) -> Iterator[tuple[str, Path, Path]]:
    """Write the networks and their properties."""
    for name, write in CASES.items():
        if only in name:
            network, property_ = folder / f"{name}.onnx", folder / f"{name}.vnnlib"
            if not network.exists():
                # In a process of its own: commands would inherit our peak memory.
                writer = multiprocessing.get_context("spawn").Process(
                    target=_write, args=(write, network, property_)
                )
                writer.start()
                writer.join()
            yield name, network, property_


def _write(write: Callable[[Path], str], network: Path, property_: Path) -> None:
    property_.write_text(write(network), encoding="utf-8")


def given(folders: list[Path], only: str) -> Iterator[tuple[str, Path, Path]]:
    """Yield the instances of folders."""
    for folder in folders:
        with (folder / "instances.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                name = f"{Path(row['onnx']).name} {Path(row['vnnlib']).name}"
                if only in f"{row['benchmark']} {name}":
                    yield name, folder / row["onnx"], folder / row["vnnlib"]


def run(network: Path, property_: Path, limit: float) -> tuple[str, float, float]:
    """Return the first word of the answer, the seconds, and the peak memory in GB."""
    command = [sys.executable, "-m", "tightrope", "verify", network, property_]
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*map(str, command), "--timeout", str(limit)], stdout=output, stderr=subprocess.DEVNULL
        )
        _, _, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        output.seek(0)
        words = output.read().split()
    return (words[0].decode() if words else "nothing"), seconds, used.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--limits", default="1,3,10")
    parser.add_argument("--neighbours", default="0,2", help="busy processes beside ours")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    print(f"{'case':<50}{'limit':>7}{'beside':>7}{'answer':>9}{'seconds':>9}{'over':>8}{'GB':>7}")
    late = 0
    with tempfile.TemporaryDirectory() as folder:
        cases = [*made(Path(folder), arguments.only), *given(arguments.folders, arguments.only)]
        for count in map(int, arguments.neighbours.split(",")):
            with neighbours(count):
                for name, network, property_ in cases:
                    for limit in map(float, arguments.limits.split(",")):
                        word, seconds, memory = run(network, property_, limit)
                        over = seconds - limit
                        missed = over > TENTH * limit + MORE
                        late += missed
                        print(
                            f"{name[:49]:<50}{limit:>7.0f}{count:>7}{word:>9}{seconds:>9.2f}"
                            f"{max(over, 0):>8.2f}{memory:>7.2f}{' LATE' if missed else ''}",
                            flush=True,
                        )
    print(f"{late} late")
    sys.exit(late > 0)


if __name__ == "__main__":
    main()
