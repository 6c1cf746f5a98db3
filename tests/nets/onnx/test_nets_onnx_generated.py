"""Random models are refused in one line, or their graphs are what the files compute.

`read_onnx` itself compares each node with onnxruntime; here the outputs are compared with the ONNX
reference implementation in double precision as well, where nearly no rounding hides anything.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_generator import RandomModel
from onnx_reference import evaluator

from tightrope.errors import UserError
from tightrope.graph.same import same_outputs
from tightrope.nets.onnx.importing import OnnxNetwork, read_onnx
from tightrope.nets.onnx.operators import CONVERTERS

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = 10_000
GROUP = 100


class Tally:
    """What was read, what was refused."""

    def __init__(self) -> None:
        self.read = self.refused = self.masked = self.compared = 0
        self.operators: Counter[str] = Counter()
        self.opsets: Counter[int] = Counter()
        self.types: Counter[Any] = Counter()

    def count(self, made: RandomModel) -> None:
        self.read += 1
        self.masked += made.masked
        self.operators.update(operator.op_type for operator in made.nodes)
        self.opsets[made.opset] += 1
        self.types[made.dtype] += 1


def compare(made: RandomModel, network: OnnxNetwork) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *network.input_shape, dtype=torch.float64, generator=generator)
    run = evaluator(made.model()).run
    (shape,) = network.reference.inputs.values()
    points = [sample.reshape(shape).numpy() for sample in x]
    with np.errstate(over="ignore", invalid="ignore"):  # in branches that are not taken
        outputs = [np.asarray(run(None, {"x": point})[0]).reshape(-1) for point in points]
    expected = torch.from_numpy(np.stack(outputs))
    same_outputs(network.graph.to(torch.float64), x, expected, what="the reference")


def merged_by_onnxruntime(made: RandomModel) -> bool:
    """Whether onnxruntime merges a padding into a max pool, where it is no longer of zeros."""
    padded = {operator.output[0] for operator in made.nodes if operator.op_type == "Pad"}
    pools = [operator for operator in made.nodes if operator.op_type == "MaxPool"]
    return any(pool.input[0] in padded for pool in pools)


def examine(seed: int, path: Path, tally: Tally) -> None:
    made = RandomModel(seed)
    try:
        network = read_onnx(made.save(path))
    except UserError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1000, f"seed {seed}"
        # A graph that was made must be right: what is not understood is refused before.
        right = "the graph differs" not in message or merged_by_onnxruntime(made)
        assert right, f"seed {seed}: {message}"
        tally.refused += 1
        return
    tally.count(made)
    if not made.computed_floats:  # those are rounded, once and for all, in the file's precision
        compare(made, network)
        tally.compared += 1


@pytest.mark.parametrize("group", range(12))
def test_random_models(group, tmp_path):
    tally = Tally()
    for seed in range(group * GROUP, (group + 1) * GROUP):
        examine(seed, tmp_path / "net.onnx", tally)
    assert tally.read > 0.5 * GROUP and tally.refused > 0.05 * GROUP
    assert tally.masked > 0.2 * GROUP and tally.compared > 0.45 * GROUP
    assert len(tally.opsets) > 10 and len(tally.types) == 2


@pytest.mark.slow
def test_many_random_models(tmp_path):
    tally = Tally()
    for seed in range(12 * GROUP, 12 * GROUP + MODELS):
        examine(seed, tmp_path / "net.onnx", tally)
    assert tally.read > 0.5 * MODELS and tally.masked > 0.25 * MODELS
    assert set(tally.opsets) == set(range(8, 22))
    assert set(CONVERTERS) <= set(tally.operators)
    assert min(tally.operators[kind] for kind in CONVERTERS) >= 20
