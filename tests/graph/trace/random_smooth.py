"""Lines of random modules with smooth functions, products of two values and normalisations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Each of one value, kept where neither it nor its slope is beyond what numbers hold.
FUNCTIONS = (
    "F.gelu({0})", "F.gelu({0}, approximate='tanh')", "F.silu({0})", "F.mish({0})",
    "F.elu({0}, 0.7)", "F.selu({0})", "F.celu({0}, 2.0)", "F.softplus({0}, 2.0)",
    "F.logsigmoid({0})", "F.hardswish({0})", "{0}.clamp(-4, 3).exp()", "{0}.clamp(-2, 2).expm1()",
    "({0}.abs() + 0.3).log()", "{0}.abs().log1p()", "({0}.relu() + 0.2).sqrt()",
    "({0}.abs() + 0.4).rsqrt()", "({0}.abs() + 0.5).reciprocal()", "{0}.square()", "{0} ** 3",
    "({0}.abs() + 0.6) ** -1.5", "torch.sin({0}.clamp(-9, 9))", "torch.cos({0}.clamp(-9, 9))",
    "torch.erf({0})", "1 / ({0}.relu() + 0.7)", "0.5 * {0} * (1 + torch.erf({0} / 1.4142))",
)  # fmt: skip
PAIRS = (
    "{0} * {1}", "{0}.mul({1})", "{0} * {1}.sigmoid()", "{0} / ({1}.abs() + 0.4)",
    "torch.div({0}, {1}.square() + 1)", "torch.where({1} > {0}, {0}, {1})",
    "torch.maximum({0}, {1})", "torch.stack(({0}, {1}), 1)", "{0} * ({1} > 0.2)",
    "{0}.unsqueeze(-1) @ {1}.unsqueeze(-2)", "({0}.unsqueeze(-2) @ {1}.unsqueeze(-1)).flatten(1)",
)  # fmt: skip


def smooth(w: Any) -> None:
    """Write a function of one value, or of two of the same shape, or a layer made of such."""
    name = w.pick()
    kind = w.choose("function", "function", "pair", "layer")
    if kind == "pair":
        w.assign(w.choose(*PAIRS).format(name, w.partner(name)))
    elif kind == "layer" and w.shape(name):
        held = w.hold(_layer(w, w.shape(name)))
        if not w.assign(f"{held}({name})"):
            delattr(w.module, held.removeprefix("self."))
    else:
        w.assign(w.choose(*FUNCTIONS).format(name))


def _layer(w: Any, shape: tuple[int, ...]) -> nn.Module:
    channels = shape[0]
    layers: list[nn.Module] = [
        nn.LayerNorm(shape[-1:], elementwise_affine=w.chance(0.5)),
        nn.LayerNorm(shape, eps=1e-3), nn.RMSNorm(shape[-1], 1e-4),
        nn.Softmax(w.integer(1, len(shape))),
        nn.GroupNorm(w.choose(1, channels), channels, affine=w.chance(0.5)), nn.GELU(), nn.SiLU(),
        nn.GLU(-1) if shape[-1] % 2 == 0 else nn.Softplus(),
    ]  # fmt: skip
    if len(shape) in (2, 3):
        kind = nn.InstanceNorm1d if len(shape) == 2 else nn.InstanceNorm2d
        layers.append(kind(channels, affine=w.chance(0.5), track_running_stats=w.chance(0.5)))
    layer = w.choose(*layers)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(w.numbers(*parameter.shape, magnitudes=(1.0, 0.3)))
    return layer.to(w.dtype).eval()
