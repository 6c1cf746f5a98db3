"""Time and peak memory of output bounds: IBP, CROWN-IBP, CROWN and alpha-CROWN (20 steps).

    python benchmarks/bounds.py [--nets cnn7,cnn3] [--threads 2]

CNN7 with BatchNorm at full size on inputs of CIFAR-10's shape, and CNN3 (width 16) on MNIST's,
at initialisation (Shi's, as certified training starts) with the radius 2/255 and 0.1. Each method
runs in a process of its own, so that its peak memory is its own; "rows" are margins.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch

from tightrope import nets
from tightrope.box import Box
from tightrope.certification.properties import Unsafe
from tightrope.domains import interval
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, CROWN_IBP, Effort, best_bounds, relax
from tightrope.graph import Graph, trace
from tightrope.training.initialization import initialize

ROUNDING = torch.finfo(torch.float64).eps
CASES = {
    "cnn7": ((3, 32, 32), {"batch_norm": True}, 2 / 255),
    "cnn3": ((1, 28, 28), {"batch_norm": True, "width": 16}, 0.1),
}
ALPHA_20 = Effort(iterations=20)
METHODS = {"ibp": 8, "crown-ibp": 8, "crown": 1, "alpha": 1}


def network(name: str) -> Graph:
    shape, arguments, _ = CASES[name]
    torch.manual_seed(0)
    module = nets.Architecture(name, shape, 10, None, arguments).build()
    graph = trace(module.eval(), shape)
    initialize(graph)
    return graph.detach().to(torch.float64)


def margins(graph: Graph, box: Box, method: str) -> torch.Tensor:
    """Return strict lower bounds on the margins of class 0."""
    batch = len(box.lower)
    matrix = Unsafe.misclassification(0, 10, torch.device("cpu")).matrix
    if method == "ibp":
        labels = torch.zeros(batch, dtype=torch.long)
        return interval.margins(graph, box, labels, rounding=ROUNDING)[0][:, 1:]
    effort = {"crown-ibp": CROWN_IBP, "crown": CROWN, "alpha": ALPHA_20}[method]
    relaxation = relax(graph, box, effort=effort, rounding=ROUNDING)
    if method == "alpha":
        return best_bounds(relaxation, matrix, effort=effort, threshold=float("inf"))
    owner = torch.arange(batch).repeat_interleave(len(matrix))
    rows = Coefficients(matrix.repeat(batch, 1), owner)
    return relaxation.lower(relaxation.output, rows)


def measure(name: str, method: str, threads: int, results: object) -> None:
    torch.set_num_threads(threads)
    graph = network(name)
    shape, _, eps = CASES[name]
    x = torch.rand(METHODS[method], *shape, dtype=torch.float64)
    box = Box((x - eps).clamp(min=0), (x + eps).clamp(max=1))
    started = time.perf_counter()
    with torch.no_grad():
        found = margins(graph, box, method)
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results.put((seconds, memory, float(found.mean())))  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default="cnn3,cnn7")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    head = ("network", "method", "images", "seconds", "peak GB", "mean margin")
    print("{:<8} {:<10} {:>6} {:>9} {:>8} {:>12}".format(*head))
    for name in arguments.nets.split(","):
        for method in arguments.methods.split(","):
            results = context.Queue()
            process = context.Process(
                target=measure, args=(name, method, arguments.threads, results)
            )
            process.start()
            process.join()
            if process.exitcode:
                print(f"{name:<8} {method:<10} failed with exit code {process.exitcode}")
                continue
            seconds, memory, margin = results.get()
            print(
                f"{name:<8} {method:<10} {METHODS[method]:>6} {seconds:>9.2f} {memory:>8.2f} "
                f"{margin:>12.4g}",
                flush=True,
            )


if __name__ == "__main__":
    main()
