"""Linear bounds of operations that bring a number to several places: one rule for each.

Pulled back, the coefficients of all these places are added up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tightrope.domains.linear.coefficients import Coefficients
from tightrope.graph import ops

if TYPE_CHECKING:
    from tightrope.domains.linear.rules import Pass


def conv_transpose(
    op: ops.ConvTranspose2d, a: Coefficients, i: int, state: Pass
) -> tuple[Coefficients, ...]:
    """A convolution with the same weight, which is what its transpose is."""
    if op.bias is not None:
        state.add(a, op.bias.view(1, -1, 1, 1))
    state.charge(a, i, op.weight[0].numel())
    return (a.through_transposed(op, state.graph.nodes[state.graph.nodes[i].inputs[0]].shape),)


def take(op: ops.Take, a: Coefficients, i: int, state: Pass) -> tuple[Coefficients, ...]:
    """Add up the coefficients of all copies of a number."""
    a = a.dense()
    shape = state.graph.nodes[state.graph.nodes[i].inputs[0]].shape
    index = op.index.flatten().to(a.values.device)
    copies = int(index.bincount().max())
    if copies > 1:
        state.charge(a, i, copies)
    flat = a.values.new_zeros(len(a.values), math.prod(shape))
    return (
        a.like(flat.index_add_(1, index, a.values.reshape(len(a.values), -1)).view(-1, *shape)),
    )
