"""Smooth layers in modules: wrong converters are found, and what is not known is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import call
from torch import Tensor, nn

from tightrope.errors import UserError
from tightrope.graph import ops, trace
from tightrope.graph.trace import converters
from tightrope.graph.values import apply

aten = torch.ops.aten
FLAT, ROWS, IMAGE = (6,), (3, 4), (4, 3, 3)


def instead(name: str, *parameters: float) -> Callable[..., Any]:
    """Return a converter to another function, whatever its options are."""
    return lambda x, *args, **options: apply(x, ops.Function(name, parameters))


def changed(operator: Any, change: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Return the right converter of changed arguments."""
    original = converters.CONVERTERS[operator]
    return lambda *args, **options: original(*change(*args), **options)


Planted = tuple[nn.Module | Callable[[Tensor], Tensor], tuple[int, ...], Any, Any]

PLANTED: dict[str, Planted] = {
    "sine for cosine": (torch.cos, FLAT, aten.cos, instead("sin")),
    "the other gelu": (nn.GELU(), FLAT, aten.gelu, instead("gelu_tanh")),
    "gelu for silu": (nn.SiLU(), FLAT, aten.silu, instead("gelu")),
    "mish for silu": (nn.SiLU(), FLAT, aten.silu, instead("mish")),
    "alpha": (nn.ELU(0.7), FLAT, aten.elu, instead("elu", 0.7001, 1.0, 1.0)),
    "scale of selu": (nn.SELU(), FLAT, aten.selu, instead("elu", 1.6733, 1.0507, 1.0)),
    "beta": (nn.Softplus(2.0), FLAT, aten.softplus, instead("softplus", 2.001, 20.0)),
    "cube for square": (torch.square, FLAT, aten.square, instead("power", 3.0)),
    "axis of softmax": (
        nn.Softmax(1),
        ROWS,
        aten.softmax,
        changed(aten.softmax, lambda x, dim, *rest: (x, 2, *rest)),
    ),
    "logarithm": (nn.LogSoftmax(1), FLAT, aten.log_softmax, converters.CONVERTERS[aten.softmax]),
    "epsilon": (
        nn.LayerNorm(4),
        ROWS,
        aten.layer_norm,
        changed(aten.layer_norm, lambda x, shape, w, b, e, *rest: (x, shape, w, b, 1.5 * e)),
    ),
    "groups": (
        nn.GroupNorm(2, 4),
        IMAGE,
        aten.group_norm,
        changed(aten.group_norm, lambda x, groups, *rest: (x, 4, *rest)),
    ),
    "factors of matrices": (
        lambda x: torch.bmm(x, x.transpose(1, 2).tanh()),
        ROWS,
        aten.bmm,
        changed(aten.bmm, lambda a, b: (a, a)),
    ),
    "keys for values": (
        lambda x: F.scaled_dot_product_attention(x, x.sin(), x.tanh()),
        ROWS,
        aten.scaled_dot_product_attention,
        changed(aten.scaled_dot_product_attention, lambda q, k, v: (q, k, k)),
    ),
    "product with itself": (
        lambda x: x * x.tanh(),
        FLAT,
        aten.mul,
        changed(aten.mul, lambda a, b: (a, a)),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_converters_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape, operator, wrong = PLANTED[name]
    module = layer if isinstance(layer, nn.Module) else call(layer)
    module = nn.Sequential(module).eval()
    trace(module, shape)
    monkeypatch.setitem(converters.CONVERTERS, operator, wrong)
    with pytest.raises(UserError, match=r"differs from|cannot handle"):
        trace(module, shape)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], str]] = {
    "mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, x @ x.mT),
        ROWS,
        "a mask that depends",
    ),
    "exponent": (lambda x: x**x, FLAT, "an exponent that is not one number"),
    "base": (lambda x: 2.0**x, FLAT, "an exponent that is not one number"),
    "to the zeroth": (lambda x: x**0, FLAT, "the exponent 0"),
    "softmax of the batch": (lambda x: x.softmax(0), FLAT, "over the batch"),
    "alpha": (lambda x: F.elu(x, -1.0), FLAT, "alpha -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    function, shape, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        trace(call(function), shape)


def test_a_factor_times_its_sigmoid_keeps_its_value() -> None:
    x = torch.randn(5, 6)
    graph = trace(call(lambda x: x * torch.sigmoid(x)), (6,))
    torch.testing.assert_close(graph(x), F.silu(x))
