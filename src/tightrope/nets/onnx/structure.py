"""What a file may consist of: decided before anything in it is computed.

A file that is accepted holds one graph of operators known to this program, each value computed
once. Whatever could give an operator another meaning (functions of the file with a standard name,
several versions of the operators) is refused, and so is what onnxruntime would have to run to find
out (subgraphs, loops). What has no influence on the output is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tightrope.errors import UserError
from tightrope.limits import ONNX_NODES
from tightrope.nets.messages import short
from tightrope.nets.onnx.constants import OPERATORS
from tightrope.nets.onnx.operators import CONVERTERS

OLDEST_OPSET = 7
STANDARD_DOMAINS = ("", "ai.onnx")
# Operators whose results depend on the shape of their input alone, which is known.
SHAPES = ("Shape", "Size")
MOST_NAMES = 5
MOST_TENSORS = 1024  # inputs or outputs


@dataclass(frozen=True)
class Given:
    """An input: its name and its shape, None for a free batch size."""

    name: str
    shape: tuple[int | None, ...]

    @property
    def single(self) -> tuple[int, ...]:
        """The shape with a batch of one."""
        return tuple(1 if size is None else size for size in self.shape)


@dataclass(frozen=True)
class Accepted:
    """The nodes that the outputs depend on, in order, and the version of the operators.

    `inputs` are those of type `dtype`, `outputs` the names of the outputs.
    """

    nodes: list[Any]
    opset: int
    inputs: tuple[Given, ...]
    outputs: tuple[str, ...]
    dtype: torch.dtype


def accept(model: Any) -> Accepted:
    """Return what is to be converted, or say why this file is not accepted."""
    graph = model.graph
    ONNX_NODES.check(len(graph.node), "the network")
    _check_names(graph)
    opset = _opset(model)
    if any(function.domain in STANDARD_DOMAINS for function in model.functions):
        names = [f.name for f in model.functions if f.domain in STANDARD_DOMAINS]
        raise UserError(f"it defines standard operators anew: {listed(names)}")
    for what in ("sparse_initializer", "quantization_annotation"):
        if len(getattr(graph, what)):
            raise UserError(f"it has a {what}, which is not supported")
    if len(model.training_info):
        raise UserError("it has training_info, which is not supported: export it for inference")
    inputs, dtype = _inputs(model)
    outputs = tuple(output.name for output in graph.output)
    for what, count in (("inputs", len(inputs)), ("outputs", len(outputs))):
        if count > MOST_TENSORS:
            raise UserError(f"it has {count} {what}, more than {MOST_TENSORS}")
    nodes = _needed(graph)
    _check_operators(nodes, {given.name for given in graph.input}, _stored(graph))
    return Accepted(nodes, opset, inputs, outputs, dtype)


def listed(names: Iterable[str]) -> str:
    """Return names in a form and a number that fit into a message."""
    return some(short(name) for name in names)


def some(parts: Iterable[str]) -> str:
    """Return the first few of many parts of a message."""
    shown = list(parts)
    rest = len(shown) - MOST_NAMES
    return ", ".join(shown[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def settle(model: Any, nodes: list[Any], products: dict[str, Any]) -> list[Any]:
    """Store products of constants as they were computed; return the nodes that are left.

    In which order onnxruntime adds depends on what it optimises: left to it, each of its sessions
    has its own last digits.
    """
    from onnx import numpy_helper

    for name, array in products.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return [node for node in nodes if not products.keys() & set(node.output)]


def strip(model: Any, nodes: list[Any]) -> None:
    """Leave in the model only the nodes, the constants they read, the inputs and the outputs."""
    graph = model.graph
    read = {name for node in nodes for name in node.input}
    stored = _stored(graph)
    read.update(given.name for given in graph.input if given.name not in stored)
    wanted = {id(node) for node in nodes}
    for i in range(len(graph.node) - 1, -1, -1):
        if id(graph.node[i]) not in wanted:
            del graph.node[i]
    for kept in (graph.initializer, graph.input):
        for i in range(len(kept) - 1, -1, -1):
            if kept[i].name not in read:
                del kept[i]
    for field in ("value_info", "doc_string", "metadata_props"):
        graph.ClearField(field)
    for field in ("functions", "metadata_props", "doc_string"):
        model.ClearField(field)
    for output in graph.output:
        output.type.tensor_type.ClearField("shape")


def _stored(graph: Any) -> set[str]:
    return {tensor.name for tensor in graph.initializer}


def _opset(model: Any) -> int:
    """Return the version of the standard operators that a model uses."""
    versions = {o.version for o in model.opset_import if o.domain in STANDARD_DOMAINS} or {1}
    if len(versions) > 1:
        raise UserError(f"it uses several versions of the operators: {sorted(versions)}")
    version = int(versions.pop())
    if version < OLDEST_OPSET:
        raise UserError(
            f"the file uses ONNX opset {version}; convert it to opset {OLDEST_OPSET} or later "
            "(onnx.version_converter)"
        )
    return version


def _inputs(model: Any) -> tuple[tuple[Given, ...], torch.dtype]:
    """Return the inputs and their type."""
    from onnx import TensorProto

    stored = _stored(model.graph)  # old files list these as inputs
    inputs = [given for given in model.graph.input if given.name not in stored]
    if not inputs:
        raise UserError("it has no input")
    types = {TensorProto.FLOAT: torch.float32, TensorProto.DOUBLE: torch.float64}
    kinds = {given.type.tensor_type.elem_type for given in inputs}
    for given in inputs:
        if given.type.tensor_type.elem_type not in types:
            raise UserError(f"the input {short(given.name)} must be of type float32 or float64")
    if len(kinds) > 1:
        raise UserError("its inputs must be of one type: float32 or float64")
    return tuple(_given(given) for given in inputs), types[kinds.pop()]


def _given(given: Any) -> Given:
    sizes = [
        d.dim_value if d.HasField("dim_value") else 0 for d in given.type.tensor_type.shape.dim
    ]
    shape = tuple(size if size > 0 else None for size in sizes)
    if not shape or None in shape[1:] or shape == (None,):
        raise UserError(
            f"the input {short(given.name)} has no fixed shape: only its first dimension, "
            "the batch, may be free"
        )
    return Given(given.name, shape)


def _check_names(graph: Any) -> None:
    """Refuse names that are no text, and values that are there twice."""
    stored = [tensor.name for tensor in graph.initializer]
    inputs = [given.name for given in graph.input]
    computed = [name for node in graph.node for name in node.output if name]
    texts = [text for node in graph.node for text in (node.name, node.op_type, node.domain)]
    read = [name for node in graph.node for name in node.input]
    outputs = [output.name for output in graph.output]
    # Where the bytes of a name are no UTF-8, protobuf hands out the bytes.
    if any(isinstance(t, bytes) for t in (*stored, *inputs, *computed, *texts, *read, *outputs)):
        raise UserError("a name in it is not UTF-8")
    old_style = set(inputs) & set(stored)  # old files list their constants among the inputs
    given = Counter([*(name for name in inputs if name not in old_style), *stored, *computed])
    given.update(name for name, count in Counter(inputs).items() if count > 1)
    twice = [name for name, count in given.items() if count > 1]
    if twice:
        raise UserError(f"these values are defined more than once: {listed(twice)}")


def _needed(graph: Any) -> list[Any]:
    """Return the nodes that the outputs depend on, in the file's (topological) order."""
    wanted = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


def _check_operators(nodes: list[Any], inputs: set[str], stored: set[str]) -> None:
    """Refuse operators that this program does not know, all of them at once."""
    depends = inputs - stored
    problems: dict[str, list[str]] = {}
    for node in nodes:
        constant = not depends.intersection(node.input)
        if not constant and node.op_type not in SHAPES:
            depends.update(name for name in node.output if name)
        known = (*SHAPES, *OPERATORS) if constant else (*SHAPES, *CONVERTERS)
        standard = node.domain in STANDARD_DOMAINS and not node.overload
        if not standard or node.op_type not in known:
            kind = node.op_type if standard else f"{node.domain}.{node.op_type}"
            reason = " of constants" if constant and node.op_type in CONVERTERS else ""
            problems.setdefault(short(kind) + reason, []).append(node_name(node))
        _check_attributes(node)
    if problems:
        parts = [f"{kind} ({listed(names)})" for kind, names in problems.items()]
        raise UserError(f"cannot handle these operators of the network: {'; '.join(parts)}")


def node_name(node: Any) -> str:
    """Return the name of a node, or of its result."""
    return node.name or next(iter(node.output), "")


def _check_attributes(node: Any) -> None:
    """Refuse attributes that hold a graph, or that are there twice."""
    names = [attribute.name for attribute in node.attribute]
    where = f"{short(node.op_type)} ({short(node_name(node))})"
    for attribute in node.attribute:
        if attribute.HasField("g") or len(attribute.graphs):
            raise UserError(f"{where} holds another graph, which is not supported")
        if attribute.ref_attr_name:
            raise UserError(f"{where} refers to an attribute of a function")
    if len(set(names)) != len(names):
        raise UserError(f"{where} has an attribute twice")
