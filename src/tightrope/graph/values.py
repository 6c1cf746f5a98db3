"""What converters work with: values of the graph, and requests to append operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tightrope.graph import ops


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the network's input: the node that computes it."""

    position: int
    shape: tuple[int, ...]


class Unsupported:
    """Stands for the result of an operation that was already reported."""


class Computed:
    """Stands for a tensor computed from parameters: it would be frozen at its present value."""


@dataclass(frozen=True)
class Apply:
    """A request to append operations: the first reads `inputs`, each later one the previous.

    `first_of_several` says that the operator has several results, of which this is the first.
    """

    inputs: tuple[Value, ...]
    operations: tuple[ops.Op, ...]
    first_of_several: bool = False


class Maker(Protocol):
    """Whoever makes a graph: appends operations, which are known by their positions."""

    nodes: list[Any]

    def append(self, op: ops.Op, *inputs: int) -> int:
        """Append an operation and return its position."""
        ...

    def shape_of(self, position: int) -> tuple[int, ...]:
        """Return the shape of a node's samples."""
        ...

    def number(self, value: float) -> Tensor:
        """Return a constant in the network's precision."""
        ...


@dataclass(frozen=True)
class Composed:
    """A request for several operations: `build` appends them and says where the results are.

    A result that is left out is None.
    """

    build: Callable[[Any], int | tuple[int | None, ...]]


def apply(inputs: Value | tuple[Value, ...], *operations: ops.Op) -> Apply | Value:
    """Ask for operations on `inputs`; without any, hand the input through."""
    if isinstance(inputs, Value):
        inputs = (inputs,)
    return Apply(inputs, operations) if operations else inputs[0]


def pair(value: Any) -> ops.Pair:
    """Read a size that torch takes as one number or two."""
    if isinstance(value, tuple | list):
        return (int(value[0]), int(value[-1]))
    return (int(value), int(value))


def refuse(condition: bool, reason: str) -> None:
    """Report an option that the graph has no operation for."""
    if condition:
        raise NotImplementedError(reason)
