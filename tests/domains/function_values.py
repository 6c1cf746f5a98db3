"""Functions of one number in as many digits as it takes, by mpmath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp

from tightrope.graph import ops

DIGITS = 60

# One operation of each kind, with several parameters.
FUNCTIONS: dict[str, ops.Function] = {
    **{
        name: ops.Function(name)
        for name in ("exp", "log", "sqrt", "reciprocal", "sin", "cos", "gelu", "gelu_tanh", "silu")
    },
    **{name: ops.Function(name) for name in ("mish", "hardswish", "erf", "atan")},
    **{name: ops.Function(name) for name in ("sinh", "cosh")},
    **{f"exponential {b}": ops.Function("exponential", (b,)) for b in (2.0, 0.3, 1.01, 50.0)},
    **{
        f"power {p}": ops.Function("power", (float(p),))
        for p in (2, 3, 4, 7, -1, -2, -3, -0.5, 0.25, 1.5, 2.5)
    },
    "elu": ops.Function("elu", (1.0, 1.0, 1.0)),
    "elu steep": ops.Function("elu", (2.5, 1.0, 1.0)),
    "selu": ops.Function("elu", (1.6732632423543772, 1.0507009873554805, 1.0)),
    "celu": ops.Function("elu", (0.7, 1.0, 1 / 0.7)),
    "softplus": ops.Function("softplus", (1.0, 20.0)),
    "softplus sharp": ops.Function("softplus", (3.0, 6.0)),
}


def _softplus(x: Any, beta: float, threshold: float) -> Any:
    """What PyTorch means by it: above the threshold, the number itself."""
    return x if beta * x > threshold else mp.log1p(mp.exp(beta * x)) / beta


def _power(x: Any, p: float) -> Any:
    return x ** int(p) if p == int(p) else mp.power(x, mp.mpf(p))


VALUES: dict[str, Callable[..., Any]] = {
    "exp": mp.exp,
    "log": mp.log,
    "sqrt": mp.sqrt,
    "reciprocal": lambda x: 1 / x,
    "power": _power,
    "sin": mp.sin,
    "cos": mp.cos,
    "gelu": lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2,
    "gelu_tanh": lambda x: (
        x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3)))
    ),
    "silu": lambda x: x / (1 + mp.exp(-x)),
    "mish": lambda x: x * mp.tanh(mp.log1p(mp.exp(x))),
    "elu": lambda x, a, s, f: s * x if x > 0 else mp.mpf(s) * mp.mpf(a) * mp.expm1(f * x),
    "softplus": _softplus,
    "hardswish": lambda x: x * min(max(x + 3, mp.mpf(0)), mp.mpf(6)) / 6,
    "erf": mp.erf,
    "exponential": lambda x, base: mp.power(base, x),
    "sinh": mp.sinh,
    "cosh": mp.cosh,
    "atan": mp.atan,
}


def exactly(op: ops.Function, x: float) -> Any:
    """Return the value at a float."""
    return VALUES[op.name](mp.mpf(x), *(mp.mpf(p) for p in op.parameters))
