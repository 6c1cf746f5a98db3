"""Layers and boxes with numbers set by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightrope.graph import Graph, trace

DOUBLE = torch.float64


def doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def linear(weight: object, bias: object | None = None) -> nn.Linear:
    weight = doubles(weight)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(doubles(bias))
    return layer


def graph_of(*layers: nn.Module, shape: tuple[int, ...]) -> Graph:
    return trace(nn.Sequential(*layers).double().eval(), shape)
