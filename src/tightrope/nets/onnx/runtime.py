"""onnxruntime: sessions that keep quiet, and what they compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightrope.errors import UserError
from tightrope.nets.messages import one_line

Array = np.ndarray[Any, Any]

_FATAL = 4

# Constants of fewer elements stay in a model; others are given to it.
SMALL = 1024


def session(model: Any, *, optimised: bool = True, double: bool = False) -> Any:
    """Return an onnxruntime session of a model.

    Without optimisation every node is computed as it stands in the file. In double precision only
    basic optimisations are made: others round factors to single precision.
    """
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL  # errors come as exceptions
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Threads that wait would keep the processors from others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # What quantises and back is meant as it is written, not as products of integers.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not optimised:
        options.graph_optimization_level = levels.ORT_DISABLE_ALL
    elif double:
        options.graph_optimization_level = levels.ORT_ENABLE_BASIC
    try:
        content = model.SerializeToString()
        # A second try on the same processor would print to stdout that there was a first.
        return onnxruntime.InferenceSession(
            content, options, ["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # onnxruntime's exceptions share no public base class
        raise UserError(f"onnxruntime cannot run the network: {one_line(error)}") from error


def compute(running: Any, names: Sequence[str] | None, given: Mapping[str, Array]) -> list[Array]:
    """Run a session: the named outputs, or all of them."""
    try:
        found = running.run(names, dict(given))
    except Exception as error:  # as above; also shapes that do not fit
        raise UserError(f"onnxruntime cannot run the network: {one_line(error)}") from error
    return [np.asarray(array) for array in found]


def compute_node(
    node: Any, arguments: Sequence[Array | None], opset: int, version: int
) -> list[Array]:
    """Run one operator on constants, in their own precision.

    Small ones are part of the model, as where the network is checked: onnxruntime multiplies by a
    matrix that it knows in another order than by one that it is given.
    """
    from onnx import ValueInfoProto, helper, numpy_helper

    given = {
        name: array for name, array in zip(node.input, arguments, strict=True) if array is not None
    }
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in given.items()
        if array.size >= SMALL
    ]
    stored = [numpy_helper.from_array(t, name) for name, t in given.items() if t.size < SMALL]
    outputs = [ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "constant", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=max(4, version))
    large = {name: array for name, array in given.items() if array.size >= SMALL}
    return compute(session(model, optimised=False), None, large)


def as_floats(array: Array, dtype: torch.dtype) -> Tensor:
    """Return an array as a tensor; whole numbers as floating-point ones, exactly."""
    tensor = torch.from_numpy(array)
    if tensor.is_floating_point():
        return tensor
    floats = tensor.to(dtype)
    if not torch.equal(floats.to(torch.float64), tensor.to(torch.float64)):
        raise UserError(f"the network computes integers that are no numbers of {dtype}")
    return floats


@dataclass(frozen=True, eq=False)
class Network:
    """A session of a network: names and shapes, with a batch of one, of its inputs, their type.

    One that looks up places which may not be there has its number of outputs as `partial`: where
    it cannot be run, its outputs are no numbers.
    """

    session: Any
    inputs: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    partial: int = 0

    def feed(self, sample: Tensor) -> dict[str, Array]:
        """Return one sample, which holds the numbers of all inputs, as the session takes it."""
        sizes = [math.prod(shape) for shape in self.inputs.values()]
        parts = sample.detach().cpu().to(self.dtype).flatten().split(sizes)
        pairs = zip(self.inputs.items(), parts, strict=True)
        return {name: part.reshape(shape).contiguous().numpy() for (name, shape), part in pairs}

    def run(self, x: Tensor, *, batched: bool) -> Tensor:
        """Run samples one by one or (of one input) together; each row holds a sample's outputs."""
        try:
            given = [self._batch(x)] if batched else [self.feed(sample) for sample in x]
        except RuntimeError as error:
            raise UserError(f"onnxruntime cannot run the network: {one_line(error)}") from error
        rows = len(x) if batched else 1
        try:
            results = [
                np.concatenate([p.reshape(rows, -1) for p in self._compute(feed)], 1)
                for feed in given
            ]
        except UserError:
            raise
        except ValueError as error:  # not as many outputs as samples
            raise UserError(f"onnxruntime does not run samples together: {error}") from error
        return torch.cat([as_floats(result, self.dtype) for result in results])

    def runs(self, sample: Tensor) -> bool:
        """Return whether the network can be run at a sample: all that it looks up is there."""
        try:
            compute(self.session, None, self.feed(sample))
        except UserError:
            return False
        return True

    def _compute(self, feed: Mapping[str, Array]) -> list[Array]:
        try:
            return compute(self.session, None, feed)
        except UserError:
            if not self.partial:
                raise
            kind = np.float32 if self.dtype == torch.float32 else np.float64
            return [np.full((1, self.partial), np.nan, kind)]

    def _batch(self, x: Tensor) -> dict[str, Array]:
        ((name, shape),) = self.inputs.items()
        samples = x.detach().cpu().to(self.dtype).reshape(len(x), *shape[1:])
        return {name: samples.contiguous().numpy()}
