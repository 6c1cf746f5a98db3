"""Input normalisation as the first layer of a network.

Radii are always in raw pixel units: the network gets the raw input and normalises it itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tightrope.errors import UserError, shorten

Numbers = float | Iterable[float]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


class Normalize(nn.Module):
    """`(x - mean) / std`, with one number per channel or one for all of them.

    `dimensions` is the number of dimensions of one input: 3 for images, 1 for flat vectors.
    The numbers are part of the architecture (`model.json`), not of the weights, so they are
    buffers outside the state dict: they follow `.to(device)` but are neither trained nor saved.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Numbers, std: Numbers, dimensions: int = 3) -> None:
        super().__init__()
        shape = (-1,) + (1,) * (dimensions - 1)
        for name, values in (("mean", mean), ("std", std)):
            tensor = torch.tensor(_as_tuple(name, values), dtype=torch.get_default_dtype())
            self.register_buffer(name, tensor.reshape(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised inputs."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Show the numbers when the network is printed."""
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def check_statistics(statistics: tuple[Numbers, Numbers], input_shape: Sequence[int]) -> Statistics:
    """Return mean and std as tuples of floats, or say why they don't fit `input_shape`."""
    try:
        mean_values, std_values = statistics
    except (TypeError, ValueError):
        raise UserError("normalisation needs two things: a mean and a standard deviation") from None
    mean, std = _as_tuple("mean", mean_values), _as_tuple("std", std_values)
    for name, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, input_shape[0]):
            raise UserError(
                f"normalisation {name} has {len(values)} values, expected 1 or {input_shape[0]} "
                f"for inputs of shape {tuple(input_shape)}"
            )
    if min(std) <= 0:
        raise UserError(f"normalisation std must be positive, got {min(std)}")
    return mean, std


def _as_tuple(name: str, values: Numbers) -> tuple[float, ...]:
    """Return one number or several as a tuple of finite floats."""
    try:
        several = tuple(values) if isinstance(values, Iterable) else (values,)
        numbers = tuple(float(value) for value in several if not isinstance(value, str))
    except (TypeError, ValueError, OverflowError):
        several, numbers = (), ()
    if not numbers or len(numbers) < len(several) or not all(map(math.isfinite, numbers)):
        raise UserError(f"normalisation {name} must be finite numbers, got {shorten(values)}")
    return numbers
