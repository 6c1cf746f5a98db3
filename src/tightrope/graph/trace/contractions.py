"""Converters of products of several tensors, and of what PyTorch writes in one for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightrope.graph import contractions
from tightrope.graph.contractions import Operand
from tightrope.graph.trace.constants import row_of
from tightrope.graph.values import Composed, Value, is_live, refuse

# --- products by letters --------------------------------------------------------------------


def _einsum(equation: str, tensors: Sequence[Any], **options: Any) -> Any:
    ranks = [len(t.shape) + isinstance(t, Value) for t in tensors]
    letters, out = contractions.letters_of(equation, ranks)
    return contracted(letters, out, tensors)


def contracted(letters: Sequence[str], out: str, tensors: Sequence[Any]) -> Composed:
    """Sum products by letters; the first one of every value, and of the result, is the batch."""
    batches = {own[:1] for own, t in zip(letters, tensors, strict=True) if isinstance(t, Value)}
    refuse(len(batches) != 1 or out[:1] not in batches, "a sum that mixes the samples of a batch")
    batch = out[0]

    def build(make: Any) -> int:
        operands = []
        for own, t in zip(letters, tensors, strict=True):
            refuse(batch in own[1:], "a batch that is not the first dimension")
            left = own.removeprefix(batch)
            if isinstance(t, Value):
                operands.append(Operand(t.position, left, t.shape))
            else:
                row = t if left == own else row_of(t, len(make.probe))
                operands.append(Operand(row, left, tuple(row.shape)))
        return contractions.einsum(make, operands, out[1:])

    return Composed(build)


def _tensordot(a: Any, b: Any, of_a: Sequence[int], of_b: Sequence[int]) -> Any:
    ranks = [len(t.shape) + isinstance(t, Value) for t in (a, b)]
    first = "abcdefghijklm"[: ranks[0]]
    second = list("nopqrstuvwxyz"[: ranks[1]])
    shared = []
    for i, j in zip(of_a, of_b, strict=True):
        second[j] = first[i]
        shared.append(first[i])
    out = "".join(c for c in (*first, *second) if c not in shared)
    return contracted([first, "".join(second)], out, [a, b])


def matrices(a: Any, b: Any) -> Composed:
    """A product with a constant that is many matrices."""
    ranks = [len(t.shape) + isinstance(t, Value) for t in (a, b)]
    before = "cdefgh"[: max(ranks) - 2]
    first, second = (before[len(before) - rank + 2 :] for rank in ranks)
    return contracted([first + "ij", second + "jk"], before + "ik", [a, b])


def _bilinear(a: Any, b: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    refuse(not (isinstance(a, Value) and isinstance(b, Value)), "a constant among its inputs")
    return Composed(lambda make: contractions.bilinear(make, a.position, b.position, weight, bias))


# --- several operators in one ---------------------------------------------------------------

Call = Callable[..., Any]


def written_out(parts: Callable[..., Any]) -> Callable[..., Composed]:
    """Return the converter of an operator that is others in a row: `parts(call, ...)`."""

    def convert(*args: Any, **kwargs: Any) -> Composed:
        return Composed(lambda make: parts(make.call, *args, **kwargs).position)

    return convert


def _scaled(call: Call, x: Any, factor: float) -> Any:
    if factor == 1:
        return x
    refuse(not isinstance(x, Value), f"a constant times {factor}")
    return call(aten.mul, x, factor)


def _plus_product(product: Any) -> Callable[..., Any]:
    def parts(call: Call, c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        found = _scaled(call, call(product, a, b), alpha)
        return found if beta == 0 else call(aten.add, found, _scaled(call, c, beta))

    return parts


def _plus_elementwise(operator: Any) -> Callable[..., Any]:
    def parts(call: Call, c: Any, a: Any, b: Any, *, value: float = 1) -> Any:
        return call(aten.add, c, _scaled(call, call(operator, a, b), value))

    return parts


def _lerp(call: Call, a: Any, b: Any, weight: Any) -> Any:
    return call(aten.add, a, call(aten.mul, call(aten.sub, b, a), weight))


def _cosine(call: Call, a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Products of both, each divided by its norm."""

    def unit(x: Any) -> Any:
        if not isinstance(x, Value):
            refuse(is_live(x), "a parameter over its norm, which does not stay up to date")
            return x / x.norm(dim=dim, keepdim=True).clamp_min(eps)
        size = call(aten.linalg_vector_norm, x, 2, [dim], True)
        return call(aten.div, x, call(aten.clamp_min, size, eps))

    return call(aten.sum, call(aten.mul, unit(a), unit(b)), [dim])


def _distance(
    call: Call, a: Any, b: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    gap = call(aten.add, call(aten.sub, a, b), eps)
    return call(aten.linalg_vector_norm, gap, p, [-1], keepdim)


def _glu(call: Call, x: Value, dim: int = -1) -> Any:
    size = x.shape[dim % (len(x.shape) + 1) - 1] // 2
    first, second = (call(aten.narrow, x, dim, start, size) for start in (0, size))
    return call(aten.mul, first, call(aten.sigmoid, second))


def _one_hot(call: Call, x: Value, classes: int = -1) -> Any:
    refuse(classes < 1, "a number of classes that depends on the numbers")
    places = torch.arange(classes).view(*[1] * (len(x.shape) + 1), -1)
    return call(aten.eq, call(aten.unsqueeze, x, -1), places)


def _logit(call: Call, x: Value, eps: float | None = None) -> Any:
    x = x if eps is None else call(aten.clamp, x, eps, 1 - eps)
    return call(aten.sub, call(aten.log, x), call(aten.log, call(aten.rsub, x, 1)))


def _rrelu(
    call: Call,
    x: Value,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *more: Any,
) -> Any:
    refuse(training, "its result is random")
    return call(aten.leaky_relu, x, (lower + upper) / 2)


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.einsum: _einsum,
    aten.tensordot: _tensordot,
    aten.bilinear: _bilinear,
    aten.addmm: written_out(_plus_product(aten.matmul)),
    aten.baddbmm: written_out(_plus_product(aten.bmm)),
    aten.addcmul: written_out(_plus_elementwise(aten.mul)),
    aten.addcdiv: written_out(_plus_elementwise(aten.div)),
    aten.lerp: written_out(_lerp),
    aten.cosine_similarity: written_out(_cosine),
    aten.pairwise_distance: written_out(_distance),
    aten.glu: written_out(_glu),
    aten.one_hot: written_out(_one_hot),
    aten.logit: written_out(_logit),
    aten.rrelu: written_out(_rrelu),
}
