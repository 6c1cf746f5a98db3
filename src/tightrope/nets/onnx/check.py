"""Does the graph of an ONNX file compute what onnxruntime computes from it, node by node?

A second session of the file, without optimisations, has every value of the file that the graph
knows as an output, so that each node is compared with its own inputs (`graph/same.py`). The outputs
are those of the session that runs the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.deadline import Deadline, check_time
from tightrope.errors import UserError
from tightrope.graph import Graph
from tightrope.graph.same import box_points, general_points, same_nodes, same_outputs
from tightrope.nets.messages import short
from tightrope.nets.onnx import runtime as onnx_runtime
from tightrope.nets.onnx.builder import Held, Named
from tightrope.nets.onnx.dimensions import Sizes
from tightrope.nets.onnx.runtime import SMALL, Array

Item = TypeVar("Item")

MOST_POINTS = 19
LEAST_POINTS = 2
BOX_POINTS = 3  # of each of several boxes
# The work of checking all points; networks that need more are checked at fewer points. A node
# takes time by itself, too.
PRODUCTS = 2**29
PRODUCTS_OF_A_NODE = 2**15
# Elements of values that are kept at a time.
KEPT_ELEMENTS = 2**24
# What a batch may differ by from single samples, as a share of the largest output: where bounds
# on rounding are wide, samples that get mixed up must still be noticed.
BATCH_SLACK = 1e-4


class Checker:
    """Compares a graph with the file it came from.

    `steps` is the graph with every constant that is added to a layer's result as a node of its own,
    `graph` the one that is handed out, where they are biases; each comes with the ONNX values that
    its positions hold. The first knows all of them.
    """

    def __init__(
        self,
        model: Any,
        steps: tuple[Graph, Held],
        graph: tuple[Graph, Held],
        sizes: Sizes,
        reference: onnx_runtime.Network,
    ) -> None:
        self.graph = graph[0]
        self.forms = [steps] if steps[0] is graph[0] else [steps, graph]
        self.reference = reference
        effort = sizes.products + PRODUCTS_OF_A_NODE * len(steps[0].nodes)
        self.count = max(LEAST_POINTS, min(MOST_POINTS, PRODUCTS // effort))
        self.chunk = max(1, min(self.count, KEPT_ELEMENTS // max(1, sizes.values)))
        self.names = [named for held in steps[1].values() for named in held]
        self.session, self.constants = _exposed(model, [named.name for named in self.names])

    def check(self, deadline: Deadline, *, free_batch: bool) -> bool:
        """Check at points in general; return whether samples can be run in batches."""
        like = torch.empty(0, dtype=self.reference.dtype)
        points = general_points(self.graph.input_shape, self.count, like)
        if self.reference.partial:
            points = torch.cat((points, torch.rand_like(points)))
            points = points[[self.reference.runs(point) for point in points]]
            if not len(points):  # left to points of boxes
                return False
        outputs, errors = self._check(points, deadline)
        finite = torch.isfinite(outputs).all(1)
        if not bool(finite.any()):
            raise UserError("the network gives infinite or NaN outputs")
        some = points[: max(LEAST_POINTS, self.chunk)]
        return free_batch and self._runs_batches(some, outputs, errors)

    def check_boxes(self, boxes: Sequence[Box], deadline: Deadline) -> None:
        """Check at points of some of the boxes (each a batch of one), corners among them."""
        if not boxes:
            return
        each = self.count if len(boxes) == 1 else min(BOX_POINTS, self.count)
        chosen = evenly(boxes, max(1, self.count // each))
        points = torch.cat([box_points(box, each) for box in chosen])
        if self.reference.partial:
            points = points[[self.reference.runs(point) for point in points]]
            if not len(points):
                raise UserError("it looks up places that are not there, at all points of the box")
        self._check(points.to(self.reference.dtype), deadline)

    def _check(self, points: Tensor, deadline: Deadline) -> tuple[Tensor, Tensor]:
        """Return the outputs at the points, and how far rounding may lead from them."""
        outputs, errors = [], []
        for part in points.split(self.chunk):
            deadline.check()
            values = self._values(part)
            for graph, held in self.forms:
                deadline.check()
                shown = {i: [values[n.name] for n in names] for i, names in held.items()}
                same_nodes(graph, part, shown, what="onnxruntime")
            deadline.check()
            outputs.append(self.reference.run(part, batched=False))
            deadline.check()
            errors.append(same_outputs(self.graph, part, outputs[-1], what="onnxruntime"))
        return torch.cat(outputs), torch.cat(errors)

    def _runs_batches(self, points: Tensor, outputs: Tensor, errors: Tensor) -> bool:
        """Return whether samples can be run together; a free batch size alone does not tell."""
        try:
            together = self.reference.run(points, batched=True)
        except (UserError, RuntimeError):
            return False
        alone, error = outputs[: len(points)], 2 * errors[: len(points)]
        if together.shape != alone.shape:
            return False
        close = (together - alone).abs() <= error.minimum(BATCH_SLACK * alone.abs().amax(1, True))
        return bool(close[torch.isfinite(alone).all(1)].all())

    def _values(self, points: Tensor) -> dict[str, Tensor]:
        """Return what onnxruntime computes at each node, the samples first."""
        rows = []
        names = [named.name for named in self.names]
        for point in points:
            check_time()
            given = {**self.constants, **self.reference.feed(point)}
            rows.append(onnx_runtime.compute(self.session, names, given))
        for named, array in zip(self.names, rows[0], strict=True):
            _check_shape(named, array)
        columns = zip(*rows, strict=True)
        return {
            n: onnx_runtime.as_floats(np.stack(c), self.reference.dtype)
            for n, c in zip(names, columns, strict=True)
        }


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[i * (len(items) - 1) // max(1, most - 1)] for i in range(most)]


def _check_shape(named: Named, array: Array) -> None:
    if array.shape != named.shape:
        raise UserError(
            f"the graph differs from onnxruntime at {short(named.name)}: shape {named.shape} "
            f"instead of {array.shape}; this network is not supported"
        )


def _exposed(model: Any, names: Sequence[str]) -> tuple[Any, dict[str, Array]]:
    """Return a session whose outputs are the named values, and the constants it has to be given.

    Large constants are inputs, so that the session holds no second copy of them.
    """
    from onnx import GraphProto, ModelProto, ValueInfoProto, numpy_helper

    graph = GraphProto(name="exposed")
    graph.node.extend(model.graph.node)
    stored = {tensor.name for tensor in model.graph.initializer}
    graph.input.extend(given for given in model.graph.input if given.name not in stored)
    constants: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.size < SMALL:
            graph.initializer.append(tensor)
        else:
            constants[tensor.name] = array
            given = graph.input.add(name=tensor.name)
            given.type.tensor_type.elem_type = tensor.data_type
            for size in tensor.dims:
                given.type.tensor_type.shape.dim.add(dim_value=size)
    graph.output.extend(ValueInfoProto(name=name) for name in names)
    # From version 4 of the format on, constants are not listed among the inputs.
    exposed = ModelProto(ir_version=max(4, model.ir_version), graph=graph)
    exposed.opset_import.extend(model.opset_import)
    return onnx_runtime.session(exposed, optimised=False), constants
