"""ReLU on boxes held as centre and radius, in closed form.

Autograd would keep both corners and walk eight elementwise kernels back; the backward pass
needs only which corners are positive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ReluBox(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, center: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        upper = (center + radius).relu_()
        lower = (center - radius).relu_()
        ctx.save_for_backward(upper, lower)
        return torch.lerp(lower, upper, 0.5), (upper - lower).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        grad_center, grad_radius = grads
        upper, lower = ctx.saved_tensors
        if upper.dim() == 4 and upper.is_contiguous(memory_format=torch.channels_last):
            # Behind a flatten the gradients come in the other memory order; mixing is slow.
            grad_center = grad_center.contiguous(memory_format=torch.channels_last)
            grad_radius = grad_radius.contiguous(memory_format=torch.channels_last)
        # d/d upper = (gc + gr) / 2 where upper > 0; d/d lower = (gc - gr) / 2 where lower > 0.
        from_upper = torch.where(upper > 0, grad_center + grad_radius, 0)
        from_lower = torch.where(lower > 0, grad_center - grad_radius, 0)
        grad_c = (from_upper + from_lower).mul_(0.5)
        return grad_c, from_upper.sub_(from_lower).mul_(0.5)


def relu_box(center: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return centre and radius of the image of a box under ReLU."""
    outputs: tuple[Tensor, Tensor] = _ReluBox.apply(center, radius)
    return outputs
