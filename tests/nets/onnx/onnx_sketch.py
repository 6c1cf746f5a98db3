"""ONNX models in the making: chance, constants, and operators that onnxruntime runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tightrope.errors import UserError
from tightrope.nets.onnx.runtime import compute_node

MASK = 1e9
LARGEST = 1e15
MOST_ELEMENTS = 400
IR_VERSIONS = ((8, 3), (9, 4), (10, 5), (11, 6), (14, 7), (18, 8), (20, 9), (21, 10))
SHAPES: list[tuple[int | str, ...]] = [
    *((1, 5), (6,), ("n", 6), (1, 4, 3), (3, 4), ("n", 2, 3)),
    *((1, 2, 5, 6), ("n", 1, 6, 5), (1, 4, 4, 4), (1, 3, 2, 7)),
]


class Sketch:
    """A model in the making; `sample` holds every value at one input."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.opset = int(self.random.integers(8, 22))
        self.version = next(ir for opset, ir in IR_VERSIONS if self.opset <= opset)
        self.dtype = np.dtype(self.choose([np.float32] * 5 + [np.float64]))
        self.shape = self.choose(SHAPES)
        fixed = tuple(1 if isinstance(size, str) else size for size in self.shape)
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self.sample = {"x": self.random.normal(size=fixed).astype(self.dtype)}
        self.last = "x"
        self.masked = False
        self.computed_floats = False

    def choose(self, choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def integer(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def integers(self, low: int, high: int, count: int) -> list[int]:
        return [self.integer(low, high) for _ in range(count)]

    @property
    def now(self) -> tuple[int, ...]:
        """The shape of the last value."""
        return self.sample[self.last].shape

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def floats(self, *shape: int) -> str:
        return self.constant(self.random.normal(size=shape).astype(self.dtype))

    def sizes(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def apply(self, kind: str, *inputs: str, extra: str = "", **attributes: Any) -> str | None:
        """Append an operator if onnxruntime runs it; return the name of its result."""
        name = f"v{len(self.nodes)}"
        outputs = [name, *extra.split()]
        operator = helper.make_node(
            kind, list(inputs), outputs, name=f"{kind}_{name}", **attributes
        )
        known = {**self.constants, **self.sample}
        try:
            arguments = [known[given] if given else None for given in inputs]
            found = compute_node(operator, arguments, self.opset, self.version)[0]
        except UserError:
            return None
        numbers = found.dtype.kind != "f" or (
            np.isfinite(found).all() and np.abs(found).max(initial=0) < LARGEST
        )
        if not found.size or found.size > MOST_ELEMENTS or not numbers:
            return None
        self.nodes.append(operator)
        self.sample[name] = found
        return name

    def go(self, kind: str, *inputs: str, **attributes: Any) -> None:
        """Append an operator whose result becomes the last value."""
        self.last = self.apply(kind, *inputs, **attributes) or self.last

    def optional(self, **choices: Any) -> dict[str, Any]:
        """Return each of the attributes or leaves it to its default."""
        return {name: value for name, value in choices.items() if self.chance(0.5)}

    def model(self) -> Any:
        kind = TensorProto.FLOAT if self.dtype == np.float32 else TensorProto.DOUBLE
        used = {name for operator in self.nodes for name in operator.input}
        stored = [numpy_helper.from_array(a, n) for n, a in self.constants.items() if n in used]
        inputs = [helper.make_tensor_value_info("x", kind, list(self.shape))]
        if self.version < 4 or self.chance(0.1):
            inputs += [
                helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in stored
            ]
        nodes = self.nodes or [helper.make_node("Identity", ["x"], ["v0"])]
        outputs = [helper.make_tensor_value_info(self.last if self.nodes else "v0", kind, None)]
        graph = helper.make_graph(nodes, "random", inputs, outputs, stored)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=self.version)

    def save(self, path: Path) -> Path:
        onnx.save(self.model(), path)
        return path
