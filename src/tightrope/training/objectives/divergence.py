"""How far predictions are from those of a teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Return `KL(p || q)` per sample, with `p = softmax(reference)` and `q = softmax(logits)`.

    The reference is a constant. The gradient is `q - p`, which is zero to the last bit where both
    agree; autograd would multiply q by the rounded sum of p.
    """
    found: Tensor = _Divergence.apply(reference, logits)
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reference: Tensor, logits: Tensor) -> Tensor:
        expected, found = reference.log_softmax(1), logits.log_softmax(1)
        p = expected.exp()
        ctx.save_for_backward(found.exp() - p)
        return (p * (expected - found)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (slope,) = ctx.saved_tensors
        return None, grads[0][:, None] * slope
