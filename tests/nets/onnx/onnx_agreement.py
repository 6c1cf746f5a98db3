"""The comparison of an imported model with its reference."""

from __future__ import annotations

import numpy as np
import torch
from onnx_models import random_array, scattered

from tightrope.nets.onnx.importing import OnnxNetwork

IMAGE = (1, 2, 6, 5)


def agrees(network: OnnxNetwork) -> torch.Tensor:
    """Check a network against onnxruntime at points of our own, and return its outputs."""
    x = scattered(network.input_shape).to(network.dtype)
    expected, found = network.run(x), network.graph(x)
    assert found.shape == expected.shape == (5, network.output_size)
    scale = expected.abs().max()
    assert scale > 0
    assert torch.allclose(found, expected, rtol=1e-4, atol=float(1e-5 * scale))
    return found


def kinds(network: OnnxNetwork) -> list[str]:
    return [type(n.op).__name__ for n in network.graph.nodes]


ints = np.array
W = random_array(3, 2, 3, 3)
