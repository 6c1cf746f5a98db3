"""Walks the nodes of an ONNX model: constants are computed, everything else is converted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tightrope.errors import UserError, shorten
from tightrope.graph import Graph
from tightrope.nets.messages import one_line
from tightrope.nets.onnx_builder import Argument, Array, Builder, Call, Shape, Value
from tightrope.nets.onnx_operators import CONVERTERS

OLDEST_OPSET = 7
STANDARD_DOMAINS = ("", "ai.onnx")


class _Unsupported:
    """Stands for the result of a node that was already reported."""


_UNSUPPORTED = _Unsupported()


def convert(model: Any, input_name: str, input_shape: Shape, dtype: torch.dtype) -> Graph:
    """Return the graph of an ONNX model with one input and one output."""
    conversion = _Conversion(model, dtype, Builder(input_shape, dtype))
    conversion.results[input_name] = Value(0, input_shape)
    for node in _needed(model.graph):
        conversion.visit(node)
    return conversion.finish(model.graph.output[0].name)


def opset_version(model: Any) -> int:
    """Return the version of the standard operators that a model uses."""
    versions = [o.version for o in model.opset_import if o.domain in STANDARD_DOMAINS]
    version = versions[0] if versions else 1
    if version < OLDEST_OPSET:
        raise UserError(
            f"the file uses ONNX opset {version}; convert it to opset {OLDEST_OPSET} or later "
            "(onnx.version_converter)"
        )
    return int(version)


def _needed(graph: Any) -> list[Any]:
    """Return the nodes that the output depends on, in the file's (topological) order."""
    wanted = {graph.output[0].name}
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


class _Conversion:
    def __init__(self, model: Any, dtype: torch.dtype, builder: Builder) -> None:
        from onnx import numpy_helper

        self.builder = builder
        self.opset = opset_version(model)
        self.dtype = dtype
        self.problems: dict[str, list[str]] = {}
        self.results: dict[str, Value | Array | _Unsupported] = {
            tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer
        }

    def visit(self, node: Any) -> None:
        name = node.name or next(iter(node.output), "")
        try:
            result = self._convert(node, name)
        except NotImplementedError as error:
            kind = node.op_type if node.domain in STANDARD_DOMAINS else _qualified(node)
            reason = f": {error}" if str(error) else ""
            self.problems.setdefault(kind, []).append(f"{name}{reason}")
            result = _UNSUPPORTED
        if isinstance(result, list):
            self.results.update(zip(filter(None, node.output), result, strict=True))
        else:
            self.results[node.output[0]] = result

    def _convert(self, node: Any, name: str) -> Value | list[Array] | Array | _Unsupported:
        arguments = [self._lookup(given) for given in node.input]
        known = tuple(a for a in arguments if not isinstance(a, _Unsupported))
        standard = node.domain in STANDARD_DOMAINS
        if node.op_type == "Shape" and standard:
            return self._shape(node, known[0]) if known else _UNSUPPORTED
        depends = len(known) < len(arguments) or any(isinstance(a, Value) for a in known)
        if not depends:
            return _evaluate(node, [a for a in known if not isinstance(a, Value)], self.opset)
        converter = CONVERTERS.get(node.op_type) if standard else None
        if converter is None:
            raise NotImplementedError
        if len(known) < len(arguments):
            return _UNSUPPORTED  # already reported further up
        self.builder.name = name
        call = Call(node.op_type, name, known, _attributes(node), self.opset)
        try:
            return converter(self.builder, call)
        except (TypeError, ValueError, IndexError, AssertionError, KeyError) as error:
            raise NotImplementedError(f"not understood ({one_line(error)})") from error

    def _lookup(self, name: str) -> Argument | _Unsupported:
        if not name:
            return None  # an optional input that is left out
        if name not in self.results:
            raise NotImplementedError(f"its input {name!r} is not computed by this program")
        return self.results[name]

    def _shape(self, node: Any, argument: Argument) -> Array:
        assert argument is not None
        attributes = _attributes(node)
        end = attributes.get("end", len(argument.shape))
        return np.array(argument.shape[attributes.get("start", 0) : end], dtype=np.int64)

    def finish(self, output: str) -> Graph:
        if self.problems:
            parts = [f"{kind} ({', '.join(names)})" for kind, names in self.problems.items()]
            raise UserError(f"cannot handle these operators of the network: {'; '.join(parts)}")
        result = self.results.get(output)
        if not isinstance(result, Value):
            raise UserError(f"the output {shorten(output)} does not depend on the input")
        return self.builder.finish(result)


def _qualified(node: Any) -> str:
    return f"{node.domain}.{node.op_type}"


def _attributes(node: Any) -> dict[str, Any]:
    from onnx import helper

    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def _evaluate(node: Any, arguments: list[Array | None], opset: int) -> list[Array]:
    """Compute a node that depends on constants only."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    if node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial"):
        raise NotImplementedError("random numbers")
    given = {
        name: array for name, array in zip(node.input, arguments, strict=True) if array is not None
    }
    untyped = TensorProto.UNDEFINED
    graph = helper.make_graph(
        [node],
        "constant",
        [helper.make_tensor_value_info(name, untyped, None) for name in given],
        [helper.make_tensor_value_info(name, untyped, None) for name in node.output if name],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        return [np.asarray(array) for array in ReferenceEvaluator(model).run(None, given)]
    except Exception as error:  # whatever its implementations of the operators raise
        raise NotImplementedError(one_line(error)) from error
