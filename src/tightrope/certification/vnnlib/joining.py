"""The networks of a VNN-LIB file as one network, which the cases of the file are about.

Its inputs are those that are left when equal ones are one; its outputs are those of all networks
and, where the file relates inputs to each other or to outputs, the inputs behind them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.certification.vnnlib.specification import Specification
from tightrope.deadline import Deadline
from tightrope.errors import UserError, shorten
from tightrope.graph import Graph, ops
from tightrope.graph.graph import Node
from tightrope.nets.onnx.importing import OnnxNetwork, read_onnx

Files = Path | str | Mapping[str, Path | str]


@dataclass(frozen=True)
class Part:
    """One of the networks, and which inputs of the whole it gets."""

    network: OnnxNetwork
    inputs: tuple[int, ...]

    def taken(self, x: Tensor) -> Tensor:
        """Return what the network gets of a batch of inputs of the whole."""
        return x[:, list(self.inputs)].reshape(-1, *self.network.input_shape)


@dataclass(frozen=True)
class Joined:
    """Several networks as one; with `echo`, the inputs are outputs, too."""

    parts: tuple[Part, ...]
    inputs: int
    echo: bool

    @property
    def plain(self) -> bool:
        """Whether this is one network as it is in its file."""
        whole = self.parts[0].inputs == tuple(range(self.inputs))
        return len(self.parts) == 1 and whole and not self.echo

    @property
    def dtype(self) -> torch.dtype:
        """The type of inputs and outputs."""
        return self.parts[0].network.dtype

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.parts[0].network.input_shape if self.plain else (self.inputs,)

    def graph(self) -> Graph:
        """Return all of it as one graph."""
        if self.plain:
            return self.parts[0].network.graph
        nodes = [Node("input", ops.Input(), (), (self.inputs,))]
        ends = [_append(nodes, part, self.inputs) for part in self.parts]
        if self.echo:
            ends.append(0)
        size = sum(math.prod(nodes[end].shape) for end in ends)
        if len(ends) > 1:
            nodes.append(Node("outputs", ops.Concat(1), tuple(ends), (size,)))
        return Graph(tuple(nodes))

    def run(self, x: Tensor) -> Tensor:
        """Run the files themselves on a batch."""
        if self.plain:
            return self.parts[0].network.run(x)
        outputs = [part.network.run(part.taken(x)) for part in self.parts]
        return torch.cat([*outputs, x.to(outputs[0])] if self.echo else outputs, 1)

    def check(self, boxes: Sequence[Box], deadline: Deadline) -> None:
        """Raise an error unless graphs and files agree at points of these boxes."""
        for part in self.parts:
            if self.plain:
                part.network.check(boxes, deadline)
            else:
                part.network.check([box.map(part.taken) for box in boxes], deadline)


def _append(nodes: list[Node], part: Part, inputs: int) -> int:
    """Append a network to others on the same input; return where its output is."""
    network, chosen = part.network, part.inputs
    first, size, start = chosen[0], len(chosen), 0
    if chosen == tuple(range(first, first + size)):
        if size < inputs:
            start = len(nodes)
            nodes.append(Node("inputs", ops.Slice((slice(first, first + size),)), (0,), (size,)))
    else:
        start = len(nodes)
        nodes.append(Node("inputs", ops.Take(torch.tensor(chosen)), (0,), (size,)))
    if network.input_shape != (size,):
        nodes.append(
            Node("inputs", ops.Reshape(network.input_shape), (start,), network.input_shape)
        )
        start = len(nodes) - 1
    place = {0: start}
    for i, node in enumerate(network.graph.nodes[1:], start=1):
        place[i] = len(nodes)
        nodes.append(replace(node, inputs=tuple(place[j] for j in node.inputs)))
    return place[len(network.graph.nodes) - 1]


def join(specification: Specification, files: Files, vnnlib: Path, deadline: Deadline) -> Joined:
    """Read the networks of a property; what does not belong together is refused."""
    paths = _paths(specification, files, vnnlib)
    read = {path: read_onnx(path, deadline) for path in dict.fromkeys(paths)}
    networks = [read[path] for path in paths]
    if len({network.dtype for network in networks}) > 1:
        raise UserError("networks of one property must be of one precision")
    places = specification.places or tuple(range(specification.inputs))
    parts = []
    for network, path, (inputs, outputs) in zip(
        networks, paths, _spans(specification), strict=True
    ):
        found = math.prod(network.input_shape), network.output_size
        declared = inputs.stop - inputs.start, outputs.stop - outputs.start
        if found != declared:
            raise UserError(
                f"{vnnlib} declares {declared[0]} inputs and {declared[1]} outputs, {path} has "
                f"{found[0]} and {found[1]}: they do not belong together"
            )
        parts.append(Part(network, places[inputs]))
    return Joined(tuple(parts), max(places) + 1, specification.relates_inputs)


def _spans(specification: Specification) -> list[tuple[slice, slice]]:
    """Return the inputs and outputs of each network."""
    networks = specification.names.networks
    if not networks:
        return [(slice(0, specification.inputs), slice(0, specification.outputs))]
    return [(network.span("X"), network.span("Y")) for network in networks]


def _paths(specification: Specification, files: Files, vnnlib: Path) -> list[Path]:
    """Return the file of each network."""
    networks = specification.names.networks
    if not isinstance(files, Mapping):
        if sum(network.same_as is None for network in networks) > 1:
            names = " ".join(f"{n.name}=FILE" for n in networks if n.same_as is None)
            raise UserError(f"{vnnlib} declares several networks: give {names}")
        return [Path(files)] * max(1, len(networks))
    known = [network.name for network in networks]
    for name in files:
        if name not in known:
            declared = ", ".join(known) or "none by name"
            raise UserError(f"{vnnlib} declares no network {shorten(name)}, but {declared}")
    found: dict[str, Path] = {}
    for network in networks:
        path = files.get(network.name)
        if path is None and network.same_as is not None:
            path = found[network.same_as]
        if path is None:
            raise UserError(f"{vnnlib} declares a network {network.name}: give {network.name}=FILE")
        found[network.name] = Path(path)
    return list(found.values())
