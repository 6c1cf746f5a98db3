"""Networks by name: what each one takes, and building one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightrope.errors import UserError, shorten, unknown_name
from tightrope.limits import NET_ARGUMENT, NET_INPUTS, NET_LAYERS, NET_PARAMETERS, Limit
from tightrope.nets.architectures import BUILDERS
from tightrope.nets.messages import one_line
from tightrope.nets.normalize import Normalize, Numbers, check_statistics
from tightrope.nets.summaries import SUMMARIES

# Settings that are numbers of layers, not of neurons.
LAYERS = ("depth", "blocks")
MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class NetSpec:
    """One named architecture; settings that are not given are its builder's keywords."""

    name: str
    builder: Callable[..., nn.Sequential]
    description: str
    settings: Mapping[str, int | bool] | None = None
    uniform: bool = False  # one deviation for all channels

    @property
    def arguments(self) -> dict[str, int | bool]:
        """The settings that the network takes, with their defaults."""
        if self.settings is not None:
            return dict(self.settings)
        parameters = inspect.signature(self.builder).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def resolve(self, given: Mapping[str, Any]) -> dict[str, int | bool]:
        """Return all settings: the defaults, replaced by those that are given and not None."""
        resolved = self.arguments
        for name, value in given.items():
            if value is None:
                continue
            if name not in resolved:
                takes = ", ".join(resolved)
                raise UserError(f"network {self.name!r} takes no {name!r}; it takes: {takes}")
            resolved[name] = self._check(name, value, resolved[name])
        return resolved

    def _check(self, name: str, value: Any, default: int | bool) -> int | bool:
        if isinstance(default, bool):
            if isinstance(value, bool):
                return value
            raise UserError(f"{name} of {self.name!r} must be true or false, got {shorten(value)}")
        limit = NET_LAYERS if name in LAYERS else NET_ARGUMENT
        return check_count(f"{name} of {self.name!r}", value, limit)


NETS = {
    s.name: NetSpec(s.name, BUILDERS[s.name], s.description, s.arguments, s.uniform)
    for s in SUMMARIES
}


def find(name: str) -> NetSpec:
    """Return the network of that name."""
    if name not in NETS:
        raise unknown_name("network", name, NETS)
    return NETS[name]


def build(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int | None = None,
    batch_norm: bool | None = None,
    normalize: tuple[Numbers, Numbers] | None = None,
    **arguments: int | bool | None,
) -> nn.Sequential:
    """Build the named network with fresh weights.

    `normalize` is a pair (mean, std), each one number or one per channel, and becomes the first
    layer. Settings left at None keep the network's default.
    """
    spec = find(name)
    given = {"width": width, "batch_norm": batch_norm, **arguments}
    shape = check_shape(input_shape)
    classes = check_count("number of classes", num_classes)
    settings = spec.resolve(given)
    _check_size(spec, shape, classes, settings)
    net = spec.builder(shape, classes, **settings)
    if normalize is None:
        return net
    mean, std = check_statistics(normalize, shape)
    return nn.Sequential(Normalize(mean, std, len(shape)), *net)


def _check_size(
    spec: NetSpec, shape: tuple[int, ...], classes: int, settings: Mapping[str, int | bool]
) -> None:
    """Refuse a network whose weights would fill the memory."""
    try:
        with torch.device("meta"):  # shapes only: costs nothing even for an absurd width
            net = spec.builder(shape, classes, **settings)
    except RuntimeError as error:
        raise UserError(f"{spec.name} would be too large: {one_line(error)}") from error
    NET_PARAMETERS.check(sum(p.numel() for p in net.parameters()), f"the network {spec.name}")


def check_count(what: str, value: Any, limit: Limit = NET_ARGUMENT) -> int:
    """Return `value` if it is a sensible number of things."""
    if type(value) is not int or not 1 <= value <= limit.value:
        raise UserError(
            f"{what} must be a whole number from 1 to {limit.value}, got {shorten(value)}"
        )
    return value


def check_shape(value: Any) -> tuple[int, ...]:
    """Return `value` as the shape of one input (without the batch dimension)."""
    try:
        shape = tuple(value)
    except TypeError:
        shape = ()
    whole = all(type(size) is int and size >= 1 for size in shape)
    if not whole or not 1 <= len(shape) <= MOST_DIMENSIONS:
        raise UserError(
            f"input shape must be positive whole numbers such as (1, 28, 28), got {shorten(value)}"
        )
    NET_INPUTS.check(math.prod(shape), f"input shape {shorten(shape)}")
    return shape
