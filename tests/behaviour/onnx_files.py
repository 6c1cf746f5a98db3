"""Writing small ONNX networks and VNN-LIB properties, and running the networks."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Layer = tuple[Any, Any]  # weight [outputs, inputs] and bias


def write_onnx(
    path: Path, *layers: Layer, activation: str = "Relu", extra: Sequence[str] = ()
) -> Path:
    """Write a network of dense layers; `extra` operators, without attributes, come last."""
    nodes, constants, last = [], [], "x"
    for i, (weight, bias) in enumerate(layers):
        for name, values in ((f"w{i}", np.asarray(weight).T), (f"b{i}", bias)):
            constants.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        nodes.append(
            helper.make_node("Gemm", [last, f"w{i}", f"b{i}"], [f"h{i}"], name=f"dense{i}")
        )
        last = f"h{i}"
        if i + 1 < len(layers):
            nodes.append(helper.make_node(activation, [last], [f"a{i}"], name=f"act{i}"))
            last = f"a{i}"
    for i, kind in enumerate(extra):
        nodes.append(helper.make_node(kind, [last], [f"e{i}"], name=f"extra{i}"))
        last = f"e{i}"
    inputs, outputs = np.asarray(layers[0][0]).shape[1], len(layers[-1][1])
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, inputs])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [1, outputs])],
        constants,
    )
    opset = [helper.make_opsetid("", 13)]
    content = helper.make_model(graph, opset_imports=opset, ir_version=7).SerializeToString()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def random_layers(sizes: Sequence[int], *, seed: int = 0, scale: float = 1.0) -> list[Layer]:
    """Return layers of random weights."""
    random = np.random.default_rng(seed)
    return [
        (random.normal(0, scale, (after, before)), random.normal(0, scale, after))
        for before, after in itertools.pairwise(sizes)
    ]


def write_vnnlib(path: Path, bounds: Sequence[tuple[str, str]], outputs: int, *unsafe: str) -> Path:
    """Write a property: the box in decimals, and assertions about the outputs."""
    lines = [f"(declare-const X_{i} Real)" for i in range(len(bounds))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(outputs)]
    for i, (low, high) in enumerate(bounds):
        lines += [f"(assert (>= X_{i} {low}))", f"(assert (<= X_{i} {high}))"]
    text = "\n".join([*lines, *(f"(assert {formula})" for formula in unsafe)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def run_onnx(path: Path, inputs: Sequence[float]) -> list[float]:
    """Run a file with onnxruntime, on one input."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    shape = [size if isinstance(size, int) else 1 for size in given.shape]
    point = np.asarray(inputs, np.float32)
    assert point.astype(np.float64).tolist() == list(inputs)
    (found,) = session.run(None, {given.name: point.reshape(shape)})
    return [float(value) for value in found.ravel()]
