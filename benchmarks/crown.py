"""CROWN bounds of all margins of one image: ours, and those of auto_LiRPA if it is there.

    python benchmarks/crown.py WHAT ... [--peer CHECKOUT] [--threads 1] [--times 5]

WHAT is a run folder (its radius, and its first test image that is classified correctly) or
NET.onnx:PROPERTY.vnnlib (the box of that property; the class is the network's answer in its
middle). Bounds of all layers are computed by linear bounds with default slopes ("plain CROWN"),
then those of the margins: by Tightrope in float32 without rounding (as its searches do), by
Tightrope in float64 with every rounding error accounted for (as its proofs are), and by auto_LiRPA
(`method="CROWN"`, default options, float32). They run in turns in one process; networks are read
and traced before the clock starts. Seconds are the least of several, of the processor (all
threads), since other programs may be running beside; "bound" is the lowest margin.

The peer is a checkout of https://github.com/Verified-Intelligence/auto_LiRPA with what it needs
(`pip install appdirs pyyaml graphviz`), in an environment of its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.certification.properties import Ball, Unsafe
from tightrope.certification.subjects import Subject
from tightrope.certification.vnnlib import read_vnnlib
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, relax
from tightrope.graph import Graph, ops
from tightrope.nets.onnx.importing import read_onnx
from tightrope.precision import ROUNDING
from tightrope.runs import Run
from tightrope.runs.examination import examine


@dataclass(frozen=True)
class Case:
    """A network, a box around one image, and the class whose margins are bounded."""

    name: str
    subject: Subject
    box: Box
    label: int

    @property
    def matrix(self) -> Tensor:
        """The margins as rows of the outputs."""
        classes = self.subject.graph.output_shape[0]
        return Unsafe.misclassification(self.label, classes, torch.device("cpu")).matrix


def read(what: str) -> Case:
    """Read a run folder, or the files of an instance."""
    if ".onnx" not in what:
        run = Run(Path(what))
        found = examine(run, None, None, 0, "cpu")
        subject = Subject.of(found.module, found.input_shape)
        _, x, labels = found.batch(0, 100)
        right = int((subject.predict(x) == labels).nonzero()[0])
        box = Ball(x[right : right + 1], found.eps).outer()
        return Case(run.folder.name, subject, box, int(labels[right]))
    onnx, _, vnnlib = what.partition(":")
    network = read_onnx(Path(onnx))
    case = read_vnnlib(Path(vnnlib)).for_type(network.dtype).cases[0]
    box = case.outer().map(lambda t: t.view(1, *network.graph.input_shape))
    subject = Subject(network.graph, network.graph)
    label = int(subject.predict(box.center.to(network.dtype))[0])
    return Case(Path(onnx).stem, subject, box, label)


def ours(graph: Graph, case: Case, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return what bounds the margins: with rounding in float64, without it in float32."""
    rounding = ROUNDING if dtype is torch.float64 else 0.0
    box, rows = case.box.map(lambda t: t.to(dtype)), case.matrix.to(dtype)

    def bound() -> Tensor:
        found = relax(graph, box, effort=CROWN, rounding=rounding)
        return found.lower(found.output, Coefficients(rows, None))

    return bound


class Plain(nn.Module):
    """A network in the words that every tool knows."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.nodes = graph.nodes
        for i, node in enumerate(graph.nodes):
            for name in ("weight", "bias"):
                held = getattr(node.op, name, None)
                if isinstance(held, Tensor):
                    self.register_parameter(f"{name}{i}", nn.Parameter(held.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs."""
        values = [x]
        for i, node in enumerate(self.nodes[1:], start=1):
            values.append(self._apply_node(i, node.op, *(values[j] for j in node.inputs)))
        return values[-1]

    def _apply_node(self, i: int, op: ops.Op, *xs: Tensor) -> Tensor:
        weight, bias = (getattr(self, f"{name}{i}", None) for name in ("weight", "bias"))
        if isinstance(op, ops.Linear):
            return F.linear(xs[0], weight, bias)
        if isinstance(op, ops.Conv2d):
            return F.conv2d(xs[0], weight, bias, op.stride, op.padding, op.dilation, op.groups)
        if isinstance(op, ops.Reshape):
            return xs[0].flatten(1)
        if isinstance(op, ops.Relu):
            return F.relu(xs[0])
        if isinstance(op, ops.Add):
            return xs[0] + xs[1]
        raise SystemExit(f"{type(op).__name__} is not among the layers that this script compares")


def theirs(graph: Graph, case: Case) -> Callable[[], Tensor]:
    """Return what bounds the margins by auto_LiRPA."""
    from auto_LiRPA import BoundedModule, BoundedTensor  # type: ignore[import-not-found]
    from auto_LiRPA.perturbations import PerturbationLpNorm  # type: ignore[import-not-found]

    lower, upper = (t.float() for t in case.box.corners)
    network = Plain(graph)
    with torch.no_grad():
        difference = (network(lower) - case.subject.outputs(lower)).abs().max()
    assert difference < 1e-3, f"the networks differ by {difference}"
    bounded = BoundedModule(network, lower)
    x = BoundedTensor((lower + upper) / 2, PerturbationLpNorm(x_L=lower, x_U=upper))
    rows = case.matrix.float()[None]

    def bound() -> Tensor:
        found: Tensor = bounded.compute_bounds(x=(x,), C=rows, method="CROWN", bound_upper=False)[0]
        return found[0]

    return bound


def measure(case: Case, peer: bool, times: int) -> None:
    """Time all methods in turns, and print a line for each."""
    folded = case.subject.graph.detach().fold_batchnorm()
    methods = {
        "float32": ours(folded.to(torch.float32), case, torch.float32),
        "strict": ours(case.subject.exact, case, torch.float64),
    }
    if peer:
        methods["auto_LiRPA"] = theirs(folded, case)
    seconds = {name: [float("inf")] * 2 for name in methods}
    lowest = {name: float("nan") for name in methods}
    for _ in range(times):
        for name, bound in methods.items():
            before, started = time.process_time(), time.perf_counter()
            with torch.no_grad():
                lowest[name] = float(bound().min())
            spent = (time.process_time() - before, time.perf_counter() - started)
            seconds[name] = [min(pair) for pair in zip(seconds[name], spent, strict=True)]
    for name, (used, wall) in seconds.items():
        ratio = used / seconds["auto_LiRPA"][0] if peer else float("nan")
        print(
            f"{case.name:20} {name:12} {used:9.3f} {wall:9.3f} {ratio:8.2f} {lowest[name]:12.5f}",
            flush=True,
        )


def main() -> None:
    """Measure all that was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", metavar="RUN | NET.onnx:PROPERTY.vnnlib")
    parser.add_argument("--peer", type=Path, help="a checkout of auto_LiRPA")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peer is not None:
        sys.path.insert(0, str(options.peer))
    print(f"threads {options.threads}, the least of {options.times}")
    print(f"{'network':20} {'by':12} {'CPU s':>9} {'wall s':>9} {'ratio':>8} {'bound':>12}")
    for what in options.what:
        measure(read(what), options.peer is not None, options.times)


if __name__ == "__main__":
    main()
