"""`nn.MultiheadAttention` recorded in a form that keeps the batch first.

PyTorch's own code moves the batch behind the tokens and merges it with the heads. While a module is
recorded, its attention layers compute the same in another order; that it is the same is checked
with the module as it is, and layer by layer: through many layers rounding may explain anything.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.errors import UserError

SAMPLES, TOLERANCE = 3, 1e-6  # of a comparison in float64, relative to the largest output


@contextlib.contextmanager
def batch_first(*, checked: bool = False) -> Iterator[None]:
    """Let attention layers keep the batch first, where their options allow it.

    If `checked`, each of them has to compute in this form what it computes as it is.
    """
    original = nn.MultiheadAttention.forward

    def forward(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if _plain(self, query, args, kw):
            if checked:
                _check_form(original, self, (query, key, value), kw)
            return _attend(self, query, key, value, kw)
        return original(self, query, key, value, *args, **kw)

    nn.MultiheadAttention.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.MultiheadAttention.forward = original  # type: ignore[method-assign]


def _plain(layer: nn.MultiheadAttention, query: Tensor, args: Any, options: Any) -> bool:
    """Whether a call has no masks of samples and a layer none of the rarer options."""
    mask = options.get("attn_mask")
    return (
        layer.batch_first
        and query.dim() == 3
        and not args
        and options.get("key_padding_mask") is None
        and (mask is None or mask.dim() == 2)
        and layer.in_proj_weight is not None
        and layer.bias_k is None
        and layer.bias_v is None
        and not layer.add_zero_attn
        and not layer.training
    )


@torch.no_grad()
def _check_form(original: Any, layer: Any, inputs: tuple[Tensor, ...], options: Any) -> None:
    """Raise an error unless both forms of a call agree at random inputs of those shapes."""
    layer = copy.deepcopy(layer).to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(0)
    known: dict[int, Tensor] = {}
    for x in inputs:  # mostly of one and the same
        shape = (SAMPLES, *x.shape[1:])
        known.setdefault(id(x), torch.randn(shape, generator=generator, dtype=torch.float64))
    mask = options.get("attn_mask")
    if mask is not None:
        mask = mask.cpu() if mask.dtype == torch.bool else mask.to("cpu", torch.float64)
        options = {**options, "attn_mask": mask}
    query, key, value = (known[id(x)] for x in inputs)
    ours = _attend(layer, query, key, value, options)
    theirs = original(layer, query, key, value, **options)
    for a, b in zip(ours, theirs, strict=True):
        if b is not None and not bool((a - b).abs().amax() <= TOLERANCE * b.abs().amax()):
            raise UserError(
                "an attention layer does not compute what its mask and parameters say: its options "
                "do not fit together (is_causal beside another mask), or hooks or replaced parts "
                "of it are passed over by PyTorch"
            )


def _attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
    heads, size = (layer.num_heads, layer.head_dim), layer.embed_dim
    # All three projections at once, so that they stay parameters; mostly of one and the same.
    known: dict[int, Tensor] = {}
    for x in (query, key, value):
        if id(x) not in known:
            known[id(x)] = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = (
        known[id(x)][..., i * size : (i + 1) * size].unflatten(-1, heads).transpose(1, 2)
        for i, x in enumerate((query, key, value))
    )
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:  # here it says what is left out
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(mask, -torch.inf)
    if not options.get("need_weights", True):
        found = F.scaled_dot_product_attention(q, k, v, mask)
        return layer.out_proj(found.transpose(1, 2).flatten(2)), None
    scores = (q * (layer.head_dim**-0.5)) @ k.transpose(-2, -1)
    scores = scores if mask is None else scores + mask
    shares = torch.softmax(scores, -1)
    found = layer.out_proj((shares @ v).transpose(1, 2).flatten(2))
    average = options.get("average_attn_weights", True)
    return found, shares.mean(1) if average else shares
