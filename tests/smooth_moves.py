"""Moves of smooth functions and products, for the programs of random layers.

Arguments are kept where functions have values and are not steep, and one factor of a product is
small: rounding errors (`networks.magnitudes`) then grow by a constant factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.graph import ops

FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.ELU(0.5),
    nn.SELU(),
    nn.CELU(2.0),
    nn.Softplus(),
    nn.Softplus(2.0, 30.0),
    nn.Hardswish(),
    nn.LogSigmoid(),
    torch.erf,
    torch.atan,
    torch.sin,
    torch.cos,
    lambda x: torch.exp(torch.tanh(x)),
    lambda x: torch.log(1.5 + torch.tanh(x)),
    lambda x: torch.sqrt(1.5 + torch.tanh(x)),
    lambda x: torch.rsqrt(1.5 + torch.tanh(x)),
    lambda x: 1 / (1.5 + torch.tanh(x)),
    lambda x: torch.tanh(x) ** 2,
    lambda x: torch.tanh(x) ** 3,
    lambda x: torch.square(torch.sin(x)),
    lambda x: (1.5 + torch.tanh(x)) ** 1.5,
)


def function(w: Any) -> None:
    """A function of each number."""
    w.append(w.choose(*FUNCTIONS))


def product(w: Any) -> None:
    """A product with something of the same shape, or with one number of each row."""
    first, second = w.branch()
    kind = w.choose("product", "repeated", "quotient", "gate")
    if kind == "product":
        w.append(lambda a, b: a * torch.tanh(b), first, second)
    elif kind == "repeated":
        w.append(lambda a, b: torch.tanh(a[..., :1]) * b, first, second)
    elif kind == "quotient":
        w.append(lambda a, b: a / (2 + torch.tanh(b)), first, second)
    else:
        w.append(lambda a, b: torch.sigmoid(a) * b, first, second)


def matmul(w: Any) -> None:
    """Products of matrices: with a transpose, or attention."""
    size = math.prod(w.shape)
    rows = w.choose(*[d for d in range(1, size + 1) if size % d == 0 and d <= 8])
    w.append(lambda x: x.reshape(x.shape[0], rows, size // rows))
    if w.choose(True, False):
        w.append(lambda x: torch.tanh(x) @ x.transpose(1, 2))
    else:
        w.append(lambda x: F.scaled_dot_product_attention(torch.tanh(x), torch.sin(x), x))


def differences(w: Any) -> None:
    """All differences along the last dimension."""
    if len(w.shape) > 2:
        w.flatten()
        w.keep_small()
    if w.shape[-1] == 1:
        w.linear(3)
    w.append(lambda x: x.unsqueeze(-2) - x.unsqueeze(-1))


def softmax(w: Any) -> None:
    """A softmax, or its logarithm."""
    dim = w.integer(1, len(w.shape))
    w.append(w.choose(nn.Softmax(dim), nn.LogSoftmax(dim)))


def standardize(w: Any) -> None:
    """A normalisation by the statistics of each sample."""
    kind = w.choose("layer", "root", "group")
    if kind == "group" and len(w.shape) > 1 and math.prod(w.shape) > 1:
        layer: nn.Module = nn.GroupNorm(1, w.shape[0], eps=0.1)
    elif kind == "root":
        layer = nn.RMSNorm(w.shape[-1], eps=0.1)
    else:
        layer = nn.LayerNorm(w.shape[-1], eps=0.1)
    for name, held in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(w.numbers(*held.shape)))
    w.append(layer)


MOVES: dict[type[ops.Op], Callable[[Any], None]] = {
    ops.Function: function,
    ops.Mul: product,
    ops.MatMul: matmul,
    ops.Differences: differences,
    ops.Softmax: softmax,
    ops.Standardize: standardize,
}

# How steep functions are on what generated networks give them, but for powers: those grow.
STEEPEST = {"exp": 24.0}


def _function_magnitude(op: ops.Function, s: Tensor) -> Tensor:
    """An error of the argument grows with the derivative; its own is one of the value."""
    if op.name == "power" and op.parameters[0] > 1:
        return 4 + 4 * op.parameters[0] * torch.maximum(s, torch.ones_like(s)) ** op.parameters[0]
    return STEEPEST.get(op.name, 8.0) * s + 4


MAGNITUDES: dict[type[ops.Op], Callable[..., Tensor]] = {
    ops.Function: _function_magnitude,
    ops.Mul: lambda op, a, b: 2 * a * b,
    ops.MatMul: lambda op, a, b: 2 * (a @ b),
    ops.Differences: lambda op, s: s.unsqueeze(-2) + s.unsqueeze(-1),
    ops.Softmax: lambda op, s: (4 * s.amax(-1, keepdim=True) + s.shape[-1]).expand_as(s),
    ops.Standardize: lambda op, s: (40 * s.amax(-1, keepdim=True) + s.shape[-1]).expand_as(s),
}
