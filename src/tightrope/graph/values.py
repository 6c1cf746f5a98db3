"""What converters work with: values of the graph, and requests to append operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tightrope.graph import ops


@dataclass(frozen=True)
class Value:
    """A tensor that depends on the network's input: the node that computes it."""

    position: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Masked:
    """A value with minus infinity at some places of its samples: a softmax does without them."""

    value: Value
    hidden: Tensor


@dataclass(frozen=True)
class Layered:
    """Several values along a dimension before the batch, such as the last states of layers."""

    values: tuple[Value, ...]


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


def is_live(tensor: Tensor) -> bool:
    """Whether a constant of the graph is a parameter, or a view of one, that may change."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def viewed(tensor: Tensor, order: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a constant in another order and shape; of what is live only a view will do."""
    with torch.enable_grad():
        turned = tensor.permute(*order) if order else tensor
        if not is_live(tensor):
            return turned.reshape(tuple(shape))
        try:
            return turned.view(tuple(shape))
        except RuntimeError:
            raise NotImplementedError(
                "a parameter in another order does not stay up to date"
            ) from None
