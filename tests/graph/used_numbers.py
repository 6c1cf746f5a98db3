"""A float32 module in float64, with the Python numbers in its code as float32 has them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


def _rounded(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return value.to(torch.float32).to(value.dtype)
    return float(np.float32(value)) if isinstance(value, float) else value


class _RoundedNumbers(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*tree_map(_rounded, args), **tree_map(_rounded, kwargs or {}))


@torch.no_grad()
def in_float64(module: nn.Module, x: Tensor) -> Tensor:
    """Evaluate a module in float64 at points of float64, with the constants that it computes with.

    In a float32 module those are its numbers rounded to float32, as PyTorch does before all else.
    """
    wide = copy.deepcopy(module).double()
    held = (*module.parameters(), *module.buffers())
    if any(tensor.dtype == torch.float64 for tensor in held):
        return wide(x.clone())
    with _RoundedNumbers():
        return wide(x.clone())
