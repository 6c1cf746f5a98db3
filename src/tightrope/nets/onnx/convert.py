"""Walks the nodes of an ONNX model: constants are computed, everything else is converted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tightrope.deadline import Deadline
from tightrope.errors import UserError
from tightrope.graph import Graph
from tightrope.graph.values import refuse
from tightrope.nets.messages import one_line, short
from tightrope.nets.onnx import constants as onnx_constants
from tightrope.nets.onnx import types
from tightrope.nets.onnx.builder import Argument, Array, Builder, Call, Held, Value
from tightrope.nets.onnx.operators import CONVERTERS
from tightrope.nets.onnx.structure import SHAPES, Accepted, node_name, some


class _Unsupported:
    """Stands for the result of a node that was already reported."""


_UNSUPPORTED = _Unsupported()


def convert(
    model: Any, accepted: Accepted, builder: Builder, deadline: Deadline
) -> tuple[Graph, Held]:
    """Return the graph of an ONNX model, and which ONNX values its positions hold."""
    conversion = _Conversion(model, accepted.opset, builder)
    conversion.results.update(builder.inputs)
    for node in accepted.nodes:
        deadline.check()
        conversion.visit(node)
    return conversion.finish(accepted.outputs)


class _Conversion:
    def __init__(self, model: Any, opset: int, builder: Builder) -> None:
        self.builder = builder
        self.opset = opset
        self.version = model.ir_version
        self.problems: dict[str, list[str]] = {}
        self.results: dict[str, Value | Array | _Unsupported] = {}
        for tensor in model.graph.initializer:
            try:
                self.results[tensor.name] = onnx_constants.read_tensor(tensor, builder.sizes)
            except NotImplementedError as error:
                raise UserError(f"the constant {short(tensor.name)}: {error}") from error

    def visit(self, node: Any) -> None:
        try:
            result = self._convert(node)
        except NotImplementedError as error:
            reason = f": {error}" if str(error) else ""
            self.problems.setdefault(node.op_type, []).append(f"{short(node_name(node))}{reason}")
            result = _UNSUPPORTED
        # Of an operator with one result of ours, others in the file are not computed.
        several = result if isinstance(result, list) else [result]
        if all(isinstance(found, Value) for found in several):
            kind = self._kind(node)
            several = [replace(r, kind=kind) if isinstance(r, Value) else r for r in several]
        for name, found in zip(node.output, several, strict=False):
            self.results[name] = found
            if isinstance(found, Value) and name and found.hidden is None:
                self.builder.hold(found, name)

    def _convert(self, node: Any) -> Value | list[Value] | Array | _Unsupported:
        arguments = [self._lookup(given) for given in node.input]
        known = tuple(a for a in arguments if not isinstance(a, _Unsupported))
        if len(known) < len(arguments):
            return _UNSUPPORTED  # already reported further up
        name = node_name(node)
        several = node.op_type in ("LSTM", "GRU", "RNN")
        refuse(not node.output[0] and not several, "its first result is left out")
        try:
            attributes = _attributes(node)
            call = Call(node.op_type, name, known, attributes, self.opset, len(node.output))
            if node.op_type in SHAPES:
                return _shape(call)
            if not any(isinstance(a, Value) for a in known):
                found = onnx_constants.compute(node, call, self.builder.sizes, self.version)
                if node.op_type in ("MatMul", "Gemm"):
                    self.builder.products[node.output[0]] = found
                return found
            self.builder.name = name
            types.check(call)
            masked = any(isinstance(a, Value) and a.hidden is not None for a in known)
            refuse(masked and call.kind not in ("Softmax", "Identity"), "minus infinity")
            return CONVERTERS[node.op_type](self.builder, call)
        except (TypeError, ValueError, IndexError, AssertionError, KeyError) as error:
            if isinstance(error, UserError):
                raise
            raise NotImplementedError(f"not understood ({one_line(error)})") from error

    def _kind(self, node: Any) -> str:
        """Return the kind of type that an operator's results have."""
        given = [self.results.get(name) for name in node.input]
        kinds = [
            a.kind if isinstance(a, Value) else a.dtype.kind
            for a in given
            if isinstance(a, Value | np.ndarray)
        ]
        return types.result(node.op_type, _attributes(node), kinds)

    def _lookup(self, name: str) -> Argument | _Unsupported:
        if not name:
            return None  # an optional input that is left out
        if name not in self.results:
            raise NotImplementedError(f"its input {short(name)} is not computed before it")
        return self.results[name]

    def finish(self, outputs: Sequence[str]) -> tuple[Graph, Held]:
        if self.problems:
            parts = [f"{kind} ({some(names)})" for kind, names in self.problems.items()]
            raise UserError(f"cannot handle these operators of the network: {'; '.join(parts)}")
        found = []
        for output in outputs:
            result = self.results.get(output)
            if not isinstance(result, Value):
                raise UserError(f"the output {short(output)} does not depend on the input")
            if result.hidden is not None:
                raise UserError(f"the output {short(output)} is minus infinity at some places")
            found.append(result)
        return self.builder.finish(found)


def _shape(call: Call) -> Array:
    """`Shape` and `Size`, of constants and of values."""
    (argument,) = call.inputs
    assert argument is not None
    if call.kind == "Size":
        return np.array(math.prod(argument.shape), dtype=np.int64)
    end = call.get("end", len(argument.shape))
    return np.array(argument.shape[call.get("start", 0) : end], dtype=np.int64)


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}
