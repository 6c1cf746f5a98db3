"""Does `torch.compile` pay? One step of CNN3, compiled and not, on the CPU back end.

    python benchmarks/compiled.py [--out docs/results/costs]

The loss of a step is compiled as it is, with breaks wherever PyTorch asks for one. Seconds are
those of the processor on one thread, medians of several steps taken in turn, so that busy
neighbours matter little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
import torch._dynamo
from networks import RADIUS, build
from torch import Tensor

from tightrope.graph import trace
from tightrope.training.batchnorm import training_model
from tightrope.training.objectives import IBP, Objective

ROUNDS, SAMPLES = 9, 256
METHODS = {"ibp": IBP()}  # attacks look at what they find: their loops break at every step


def spent() -> float:
    """Seconds of the processor, of compilers that were started, too."""
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(objective: Objective) -> dict[str, Any]:
    """Compare both kinds of steps from the same state."""
    dataset, module = build("cnn3")
    graph = trace(module, dataset.input_shape)
    x = torch.rand(SAMPLES, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (SAMPLES,))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        model = training_model(graph, x)
        return objective(model, model.x, y, RADIUS).value

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> float:
        torch.manual_seed(1)
        module.zero_grad(set_to_none=True)
        began = time.process_time()
        function(x, y).backward()
        return time.process_time() - began

    def gradients() -> Tensor:
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    explained = torch._dynamo.explain(loss)(x, y)
    torch._dynamo.reset()
    compiled = torch.compile(loss)
    began = spent()
    step(compiled)
    compiling = spent() - began
    step(compiled)
    found = gradients()
    step(loss)
    expected = gradients()
    times = [(step(loss), step(compiled)) for _ in range(ROUNDS)]
    plain, fast = (statistics.median(pair[i] for pair in times) for i in range(2))
    return {
        "graphs": explained.graph_count,
        "compiling": compiling,
        "plain": 1e3 * plain,
        "compiled": 1e3 * fast,
        "ratio": fast / plain,
        "difference": float((found - expected).abs().max() / expected.abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, objective in METHODS.items():
        torch._dynamo.reset()
        found[name] = row = measure(objective)
        print(
            f"{name:5} {row['graphs']} graphs, compiled in {row['compiling']:.0f} s: "
            f"{row['compiled']:.0f} ms a step, {row['plain']:.0f} ms without: "
            f"{row['ratio']:.2f} times"
        )
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "compiled.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
