"""What users of the Python functions give: checked, with one line about what is wrong."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightrope.errors import UserError, shorten
from tightrope.graph import Graph
from tightrope.nets.onnx.importing import OnnxNetwork, read_onnx

Network = nn.Module | Graph | OnnxNetwork
Numbers = Tensor | float | Sequence[float]


def check_network(network: Network | str | Path) -> Network:
    """Return a network; the ONNX file of a path is read."""
    if isinstance(network, nn.Module | Graph | OnnxNetwork):
        return network
    if isinstance(network, str | Path):
        if not Path(network).name.endswith((".onnx", ".onnx.gz")):
            raise UserError(
                f"network must be a module, a graph or the path of an .onnx file, got "
                f"{shorten(str(network))}"
            )
        return read_onnx(Path(network))
    advice = ""
    if isinstance(network, Mapping):
        advice = ": load the weights into a module first, module.load_state_dict(weights)"
    elif isinstance(network, type) and issubclass(network, nn.Module):
        advice = f": that is the class, make a network of it: {network.__name__}(...)"
    kind = network.__name__ if isinstance(network, type) else type(network).__name__
    raise UserError(f"network must be a module, a graph or an .onnx file, got {kind}{advice}")


def check_tensor(value: Any, name: str) -> Tensor:
    """Return a tensor of floats; anything else is refused, with what to do about it."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        how = {"ndarray": f"torch.from_numpy({name})"}.get(kind, f"torch.tensor({name})")
        raise UserError(f"{name} must be a torch tensor, got {_article(kind)}: use {how}")
    if not value.is_floating_point():
        raise UserError(
            f"{name} must be of a floating-point type such as torch.float32, got {value.dtype}"
        )
    if value.layout is not torch.strided:
        raise UserError(f"{name} must be a dense tensor, got a sparse one: use {name}.to_dense()")
    return value.detach()


def check_label(label: Any, name: str = "label") -> int:
    """Return the number of an output."""
    try:
        if isinstance(label, bool):
            raise TypeError
        number = operator.index(label)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name} must be the number of a class, got {shorten(label)}") from None
    return number


def precision(graph: Graph, default: torch.dtype) -> torch.dtype:
    """Return the type of the network's weights; numbers of no dimension do not count."""
    found = [default if default.is_floating_point else torch.float32]

    def look(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.is_floating_point():
            found.append(tensor.dtype)
        return tensor

    graph.map_tensors(look)
    return found[-1]


def numbers(value: Any, name: str) -> Tensor:
    """Return numbers (a tensor, an array, a list, one number) as float64, exactly."""
    try:
        given = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(value)
        if given.is_complex() or given.dtype is torch.bool:
            raise TypeError
        if not isinstance(value, Tensor) and given.dtype is torch.float32:
            # What Python holds in double precision stays that.
            given = torch.as_tensor(value, dtype=torch.float64)
        exact = given.double()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"{name} must be a tensor or a list of numbers, got {shorten(value)}"
        ) from None
    inexact = (exact.abs() > 2.0**53) | (exact.long() != given)
    if not given.is_floating_point() and bool(inexact.any()):
        raise UserError(f"{name} has whole numbers beyond 2^53, which floats do not hold")
    return exact


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' or kind == 'ndarray' else 'a'} {kind}"
