"""Layers and functions of random modules that copy, bend, reduce, or slide other windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def transposed(w: Any, shape: tuple[int, ...]) -> nn.Module:
    """A transposed convolution whose outputs are not empty."""
    kernel, stride = w.integer(2, 3), w.integer(1, 3)
    options = {"padding": w.integer(0, 1), "output_padding": w.integer(0, stride - 1)}
    groups = w.choose(1, shape[0])
    kind = nn.ConvTranspose2d if len(shape) == 3 else nn.ConvTranspose1d
    layer = kind(
        shape[0], groups * w.integer(1, 2), kernel, stride, groups=groups, **options,
        bias=w.chance(0.7), dilation=w.integer(1, 2),
    )  # fmt: skip
    return layer.double()


def of_lines(w: Any, shape: tuple[int, ...]) -> nn.Module:
    """A layer of samples [channels, length]."""
    kernel = min(shape[-1], w.integer(1, 3))
    # Shares of other sizes are numbers that float32 and float64 round differently.
    double = w.dtype == torch.float64
    enlarged = {"size": shape[-1] + 2} if double else {"scale_factor": 2.0}
    return w.choose(
        nn.Conv1d(shape[0], w.integer(1, 3), kernel, w.integer(1, 2), w.choose(0, 1)).double(),
        nn.MaxPool1d(kernel, w.integer(1, 2), padding=kernel // 2, ceil_mode=w.chance(0.4)),
        nn.AvgPool1d(kernel, w.integer(1, 2), ceil_mode=w.chance(0.4)),
        nn.AdaptiveAvgPool1d(w.integer(1, shape[-1])), nn.ReplicationPad1d((1, 2)),
        nn.Upsample(scale_factor=2), nn.Upsample(**enlarged, mode="linear"),
    )  # fmt: skip


def bends(w: Any, shape: tuple[int, ...]) -> nn.Module:
    """A piecewise linear layer."""
    inplace = w.chance(0.5)
    return w.choose(
        nn.ReLU6(inplace), nn.Hardtanh(-0.5, 2.0, inplace), nn.Hardsigmoid(inplace),
        nn.PReLU(w.choose(1, shape[0]), w.choose(0.25, -0.5, 2.0)).double(),
        nn.LeakyReLU(-0.3, inplace), nn.Softshrink(0.3), nn.Threshold(0.2, 0.2, inplace),
    )  # fmt: skip


def calls(w: Any, name: str, shape: tuple[int, ...]) -> list[str]:
    """Return functions of a value of at least one dimension, written out."""
    dim = w.integer(1, len(shape))
    jumps = [
        f"({name} > 0.1).to({name}.dtype)", f"torch.where({name} > 0, {name}, 0.3)",
        f"{name} + {name}.argmax({dim}, keepdim=True).to({name}.dtype)", f"torch.sign({name})",
    ]  # fmt: skip
    index = [w.integer(0, shape[dim - 1] - 1) for _ in range(3)]
    keep = w.choose("True", "False")
    smooth = [
        f"torch.softmax({name}, {dim})", f"F.layer_norm({name}, ({shape[-1]},))",
        f"F.log_softmax({name}, {dim})",
    ]  # fmt: skip
    if len(shape) > 1:
        smooth.append(f"{name} @ {name}.transpose(-1, -2)")
    return [
        *jumps,
        *smooth,
        f"{name}.clamp(-0.4, 0.6)", f"{name}.abs()", f"torch.maximum({name}, {name}.flip({dim}))",
        f"torch.minimum({name}, {name}.roll(1, {dim}))", f"{name}.clamp_max(0.3)",
        f"{name}.amax({dim}, keepdim={keep})", f"{name}.amin({dim}, keepdim={keep})",
        f"{name}.sum({dim}, keepdim={keep})", f"{name}.mean({dim}, keepdim={keep})",
        f"{name} - {name}.mean({dim}, keepdim=True)", f"{name}.max({dim}, keepdim={keep})[0]",
        f"{name}.index_select({dim}, torch.tensor({index}))",
        f"{name}.repeat_interleave(2, {dim})", f"{name}.chunk(2, {dim})[0]",
        f"torch.stack({name}.unbind({dim}), {dim})", f"{name}.unsqueeze(1).expand(-1, 2, *{shape})",
    ]  # fmt: skip
