"""Rows of a convolution on their way back: each touches a patch of the maps before it.

All neurons of a convolution are pulled back at once. They are filters times places, and patches of
one layer have one size, a stride between neighbours and a padding: what lies outside of a map
counts nothing. Quantities of neurons are read by patches, so that everything is a product of
tensors [batch, filters, places, neurons of a patch].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.domains.strips import Strip
from tightrope.graph import ops

FEW = 4  # channels; for as few, a patch is multiplied by the convolution as one matrix


@dataclass(frozen=True)
class Patches:
    """Coefficients `values` of filters at places; 1 stands for all samples, or all places."""

    values: Tensor  # [batch or 1, filters, places or 1, channels * height * width]
    size: tuple[int, int, int]  # channels, height, width of a patch
    places: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @classmethod
    def of(cls, op: ops.Conv2d, shape: tuple[int, ...]) -> Patches:
        """Return the rows of a convolution with outputs of that shape, on its inputs."""
        size = (op.weight.shape[1], op.weight.shape[2], op.weight.shape[3])
        values = op.weight.flatten(1)[None, :, None]
        return cls(values, size, (shape[1], shape[2]), op.stride, op.padding)

    def seen(self, field: Tensor) -> Tensor:
        """Return a quantity of neurons, [batch, *shape], by patches: [batch, 1, places, ...]."""
        ends = [
            (count - 1) * step + side - before - whole
            for count, step, side, before, whole in zip(
                self.places, self.stride, self.size[1:], self.padding, field.shape[2:], strict=True
            )
        ]
        framed = F.pad(field, (self.padding[1], ends[1], self.padding[0], ends[0]))
        return F.unfold(framed, self.size[1:], stride=self.stride).transpose(1, 2).unsqueeze(1)

    def dot(self, field: Tensor) -> Tensor:
        """Return the sum of coefficients times a quantity: [batch, filters, places]."""
        return (self.values * self.seen(field)).sum(3)

    def reach(self, field: Tensor) -> Tensor:
        """Return the sum of absolute coefficients times a quantity."""
        return (self.values.abs() * self.seen(field)).sum(3)

    def times(self, factor: Tensor) -> Patches:
        """Multiply by a factor of each neuron; nothing is left outside of the map."""
        return replace(self, values=self.values * self.seen(factor))

    def bent(self, strip: Strip) -> tuple[Patches, Tensor, Tensor]:
        """Return the coefficients before ReLUs, and what these add to centre and spread."""
        return self.times(strip.slope), self.dot(strip.middle), self.reach(strip.radius)

    @property
    def count(self) -> int:
        """Numbers of one sample."""
        return self.values.shape[1] * math.prod(self.places) * math.prod(self.size)

    def through(self, op: ops.Conv2d) -> Patches:
        """Return the coefficients before a convolution; outside of its map they are zero."""
        maps = self.values.unflatten(3, self.size).flatten(0, 2)
        if op.weight.shape[1] <= FEW:
            units = torch.eye(math.prod(self.size), dtype=maps.dtype, device=maps.device)
            images = _transposed(units.view(-1, *self.size), op)
            values = self.values @ images.flatten(1)
        else:
            images = _transposed(maps, op)
            values = images.flatten(1).unflatten(0, self.values.shape[:3])
        return Patches(
            values,
            (images.shape[1], images.shape[2], images.shape[3]),
            self.places,
            (self.stride[0] * op.stride[0], self.stride[1] * op.stride[1]),
            (
                self.padding[0] * op.stride[0] + op.padding[0],
                self.padding[1] * op.stride[1] + op.padding[1],
            ),
        )


def _transposed(maps: Tensor, op: ops.Conv2d) -> Tensor:
    return F.conv_transpose2d(maps, op.weight, None, op.stride)


def is_plain(op: ops.Op) -> bool:
    """Return whether an operation is a convolution without groups or holes."""
    return isinstance(op, ops.Conv2d) and op.groups == 1 and op.dilation == (1, 1)
