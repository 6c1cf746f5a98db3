"""What an activation is enclosed by."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Lines(NamedTuple):
    """The two lines of each neuron, all of shape [batch, *shape]."""

    lower_slope: Tensor
    lower_intercept: Tensor
    upper_slope: Tensor
    upper_intercept: Tensor
