"""Small ONNX models for the tests of the import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

IR_VERSIONS = {
    **{8: 3, 9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8},
    **{17: 8, 18: 8, 20: 9, 21: 10, 23: 11, 24: 11},
}


def random_array(*shape: int, seed: int = 0, low: float = -1.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, 1.0, shape).astype(np.float32)


def save_model(
    path: Path,
    nodes: list[Any],
    shape: tuple[int | str, ...],
    constants: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 13,
    output: str = "y",
    listed: bool = False,
    kind: int = TensorProto.FLOAT,
) -> Path:
    """Write a model with the input `x`; `listed` repeats the constants as inputs."""
    stored = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    inputs = [helper.make_tensor_value_info("x", kind, list(shape))]
    if listed:
        inputs = [
            helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in stored
        ] + inputs
    outputs = [helper.make_tensor_value_info(output, kind, None)]
    graph = helper.make_graph(nodes, "test", inputs, outputs, stored)
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=IR_VERSIONS[opset],
    )
    onnx.save(model, path)
    return path


def node(kind: str, inputs: str, output: str = "y", **attributes: Any) -> Any:
    """Return a node; a `-` among its inputs is one that is left out."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(kind, names, output.split(), name=f"{kind}_{output}", **attributes)


def export_module(module: nn.Module, shape: tuple[int, ...], path: Path, **options: Any) -> Path:
    """Write a module with torch's older exporter, which makes most of the files in use."""
    torch.onnx.export(module.eval(), (torch.rand(1, *shape),), str(path), dynamo=False, **options)
    return path


def scattered(shape: tuple[int, ...]) -> Tensor:
    """Points of several magnitudes."""
    generator = torch.Generator().manual_seed(7)
    scales = torch.tensor([0.01, 0.5, 1.0, 3.0, 30.0]).view(-1, *(1 for _ in shape))
    return scales * torch.randn(5, *shape, generator=generator)


class RandomChain:
    """A chain of random operators on values whose shape is tracked by numpy's rules."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        ranks = {1: (5,), 2: (1, 6), 3: (1, 4, 3), 4: (1, 2, 4, 6)}
        self.input_shape = self.shape = ranks[int(self.random.integers(1, 5))]
        self.names = ["x"]

    def choose(self, choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def floats(self, *shape: int) -> str:
        return self.constant(self.random.normal(size=shape).astype(np.float32))

    def append(self, kind: str, inputs: str, shape: tuple[int, ...], **attributes: Any) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(node(kind, f"{inputs}", name, **attributes))
        self.names.append(name)
        self.shape = shape

    def step(self) -> None:
        """Append one operator."""
        self.choose([self.activate, self.arithmetic, self.rearrange, self.multiply, self.cut])()

    def activate(self) -> None:
        kind = self.choose(["Relu", "LeakyRelu", "Sigmoid", "Tanh", "Neg", "Identity"])
        self.append(kind, self.names[-1], self.shape)

    def arithmetic(self) -> None:
        shape = [self.choose([size, size, 1]) for size in self.shape]
        constant = self.floats(*shape[int(self.random.integers(len(shape))) :])
        kind = self.choose(["Add", "Sub", "Mul", "Max", "Min"])
        order = self.choose([f"{self.names[-1]} {constant}", f"{constant} {self.names[-1]}"])
        self.append(kind, order, self.shape)

    def rearrange(self) -> None:
        last, rank = self.names[-1], len(self.shape)
        kind = self.choose(["Transpose", "Flatten", "Reshape", "Unsqueeze", "Squeeze"])
        if kind == "Transpose":
            order = [int(i) for i in self.random.permutation(rank)]
            self.append(kind, last, tuple(self.shape[i] for i in order), perm=order)
        elif kind == "Flatten":
            axis = int(self.random.integers(rank + 1))
            sizes = int(np.prod(self.shape[:axis])), int(np.prod(self.shape[axis:]))
            self.append(kind, last, sizes, axis=axis)
        elif kind == "Reshape":
            total = int(np.prod(self.shape))
            first = self.choose([d for d in range(1, total + 1) if total % d == 0])
            shape = self.choose([(first, total // first), (1, first, total // first), (total,)])
            self.append(kind, f"{last} {self.constant(np.array(shape))}", shape)
        elif kind == "Unsqueeze" and rank < 5:
            axis = int(self.random.integers(rank + 1))
            shape = (*self.shape[:axis], 1, *self.shape[axis:])
            self.append(kind, f"{last} {self.constant(np.array([axis]))}", shape)
        elif kind == "Squeeze" and 1 in self.shape and rank > 1:
            axis = self.shape.index(1)
            shape = (*self.shape[:axis], *self.shape[axis + 1 :])
            self.append(kind, f"{last} {self.constant(np.array([axis]))}", shape)

    def multiply(self) -> None:
        last, width = self.names[-1], int(self.random.integers(1, 5))
        if len(self.shape) > 1 and self.choose([True, False]):
            weight = self.floats(width, self.shape[-2])
            self.append("MatMul", f"{weight} {last}", (*self.shape[:-2], width, self.shape[-1]))
        else:
            weight = self.floats(self.shape[-1], width)
            self.append("MatMul", f"{last} {weight}", (*self.shape[:-1], width))

    def cut(self) -> None:
        last, axis = self.names[-1], int(self.random.integers(len(self.shape)))
        size = self.shape[axis]
        start = int(self.random.integers(size))
        kind = self.choose(["Slice", "Concat", "ReduceMean", "Join"])
        if kind == "Slice":
            bounds = [self.constant(np.array([i])) for i in (start, size, axis)]
            shape = (*self.shape[:axis], size - start, *self.shape[axis + 1 :])
            self.append(kind, " ".join([last, *bounds]), shape)
        elif kind == "Concat":
            shape = (*self.shape[:axis], 2 * size, *self.shape[axis + 1 :])
            self.append(kind, f"{last} {last}", shape, axis=axis)
        elif kind == "ReduceMean":
            shape = (*self.shape[:axis], 1, *self.shape[axis + 1 :])
            self.append(kind, last, shape, axes=[axis])
        else:
            self.append("Relu", last, self.shape)
            self.append(self.choose(["Add", "Sub"]), f"{self.names[-1]} {last}", self.shape)

    def save(self, path: Path) -> Path:
        return save_model(path, self.nodes, self.input_shape, self.constants, output=self.names[-1])
