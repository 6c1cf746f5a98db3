"""Networks from ONNX files, of whatever program.

A file is read in this order: what it consists of is accepted or refused (`onnx_structure`); its
nodes are converted, with the size of every value known before anything is computed
(`onnx_convert`); only then onnxruntime gets to see it. The graph is handed out after onnxruntime
has computed the same from the file, node by node (`onnx_check`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.deadline import Deadline
from tightrope.errors import UserError
from tightrope.graph import Graph
from tightrope.nets.messages import short
from tightrope.nets.onnx.builder import Builder, fuse_biases
from tightrope.nets.onnx.check import Checker
from tightrope.nets.onnx.convert import convert
from tightrope.nets.onnx.dimensions import Sizes
from tightrope.nets.onnx.file import load
from tightrope.nets.onnx.runtime import Network, session
from tightrope.nets.onnx.structure import accept, settle, strip


@dataclass(frozen=True, eq=False)
class OnnxNetwork:
    """A network from a file: as a graph to be bounded, and as onnxruntime runs it."""

    graph: Graph
    input_shape: tuple[int, ...]
    output_size: int
    batched: bool
    reference: Network
    checker: Checker

    @property
    def dtype(self) -> torch.dtype:
        """The type of inputs and outputs."""
        return self.reference.dtype

    def run(self, x: Tensor) -> Tensor:
        """Run the file itself with onnxruntime on a batch: [N, *input_shape] to [N, output_size].

        Inputs are converted to the file's own type, `dtype`, the type of the outputs.
        """
        if not len(x):
            return torch.empty(0, self.output_size, dtype=self.dtype, device=x.device)
        return self.reference.run(x.to(self.dtype), batched=self.batched).to(x.device)

    def check(self, boxes: Sequence[Box], deadline: Deadline | None = None) -> None:
        """Raise an error unless graph and file agree at points of these boxes, batches of one.

        Of many boxes a few are looked at: the effort is that of reading the file.
        """
        self.checker.check_boxes(boxes, deadline or Deadline())


def read_onnx(path: Path, deadline: Deadline | None = None) -> OnnxNetwork:
    """Read an ONNX file, plain or compressed (`.onnx.gz`), into a graph that computes the same."""
    _require_packages()
    deadline = deadline or Deadline()
    model = load(path, deadline)
    try:
        with torch.no_grad():
            return _from_model(model, deadline)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error.__cause__


def _require_packages() -> None:
    for name in ("onnx", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(
                f"reading ONNX needs the package {name}: pip install 'tightrope[onnx]'"
            ) from None


def _from_model(model: Any, deadline: Deadline) -> OnnxNetwork:
    accepted = accept(model)
    dtype = accepted.dtype
    inputs = {given.name: given.single for given in accepted.inputs}
    sizes = Sizes()
    try:
        builder = Builder(inputs, dtype, sizes)
    except NotImplementedError as error:
        names = ", ".join(short(name) for name in inputs)
        raise UserError(f"the input {names}: {error}") from error
    steps = convert(model, accepted, builder, deadline)
    graph = fuse_biases(*steps)
    strip(model, settle(model, accepted.nodes, builder.products))
    deadline.check()
    running = session(model, double=dtype == torch.float64)
    size = graph[0].output_shape[0]
    reference = Network(running, inputs, dtype, size if builder.partial else 0)
    deadline.check()
    checker = Checker(model, steps, graph, sizes, reference)
    # Where there are several inputs or outputs, or places to look up, samples are run one by one.
    alone = len(inputs) == len(accepted.outputs) == 1 and not builder.partial
    free = alone and accepted.inputs[0].shape[0] is None
    batched = checker.check(deadline, free_batch=free)
    shape = graph[0].input_shape
    return OnnxNetwork(graph[0], shape, size, batched, reference, checker)
