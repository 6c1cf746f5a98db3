"""Sums of products by letters, as einsum writes them: linear layers and matrix products.

An operand is a node, or a constant, with one letter for each dimension of its samples. All is exact
in real arithmetic, and a constant is only looked at in another order, so that it stays live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tightrope.graph import composed, ops
from tightrope.graph.values import Maker, refuse, viewed

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operand:
    """A node (its position) or a constant, and the letters of its dimensions."""

    held: int | Tensor
    letters: str
    shape: Shape

    def __post_init__(self) -> None:
        refuse(len(self.letters) != len(self.shape), f"{self.letters!r} for shape {self.shape}")
        refuse(len(set(self.letters)) < len(self.letters), f"a diagonal, {self.letters!r}")

    def sizes(self, letters: str) -> Shape:
        """Return the sizes of some of its dimensions."""
        return tuple(self.shape[self.letters.index(letter)] for letter in letters)


def einsum(make: Maker, operands: Sequence[Operand], out: str) -> int:
    """Append the sum of products of some operands; `out` are the letters that are left."""
    found = operands[0]
    for i, other in enumerate(operands[1:], start=1):
        later = "".join(operand.letters for operand in operands[i + 1 :])
        found = _pair(make, found, other, out + later)
    refuse(isinstance(found.held, Tensor), "a sum of constants")
    assert isinstance(found.held, int)
    gone = [i for i, letter in enumerate(found.letters) if letter not in out]
    left = "".join(letter for letter in found.letters if letter in out)
    refuse(set(left) != set(out), f"letters {out!r} of a result with {left!r}")
    position = composed.summed(make, found.held, gone) if gone else found.held
    return _in_order(make, Operand(position, left, found.sizes(left)), out)


def _pair(make: Maker, a: Operand, b: Operand, wanted: str) -> Operand:
    """Contract two operands over the letters that they share and nobody wants later."""
    shared = "".join(letter for letter in a.letters if letter in b.letters)
    refuse(a.sizes(shared) != b.sizes(shared), "sizes of one letter that differ")
    both = "".join(letter for letter in shared if letter in wanted)
    summed = "".join(letter for letter in shared if letter not in wanted)
    if isinstance(a.held, Tensor):
        a, b = b, a
    refuse(isinstance(a.held, Tensor), "a product of two constants")
    rows = "".join(letter for letter in a.letters if letter not in shared)
    columns = "".join(letter for letter in b.letters if letter not in shared)
    if isinstance(b.held, Tensor):
        return _with_constant(make, a, b, (both, summed, rows, columns))
    count, inner = math.prod(a.sizes(both)), math.prod(a.sizes(summed))
    first: Shape = (math.prod(a.sizes(rows)), inner)
    second: Shape = (inner, math.prod(b.sizes(columns)))
    if both:
        first, second = (count, *first), (count, *second)
    left = composed.shaped(make, _in_order(make, a, both + rows + summed), first)
    right = composed.shaped(make, _in_order(make, b, both + summed + columns), second)
    position = make.append(ops.MatMul(), left, right)
    shape = (*a.sizes(both + rows), *b.sizes(columns))
    return Operand(composed.shaped(make, position, shape), both + rows + columns, shape)


def _with_constant(make: Maker, a: Operand, b: Operand, parts: tuple[str, ...]) -> Operand:
    """A linear layer; one for each place along the letters that both keep is a convolution."""
    both, summed, rows, columns = parts
    count, inner = math.prod(a.sizes(both)), math.prod(a.sizes(summed))
    outer, width = math.prod(b.sizes(columns)), math.prod(a.sizes(rows))
    order = [b.letters.index(letter) for letter in both + columns + summed]
    assert isinstance(b.held, Tensor)
    if not summed and not columns:
        position = _in_order(make, a, rows + both)
        factor = viewed(b.held, order, b.sizes(both))
        return Operand(make.append(ops.Scale(factor), position), rows + both, a.sizes(rows + both))
    if not both:
        position = _in_order(make, a, rows + summed)
        position = composed.shaped(make, position, (inner,) if width == 1 else (width, inner))
        weight = viewed(b.held, order, (outer, inner))
        shape = (*a.sizes(rows), *b.sizes(columns))
        found = make.append(ops.Linear(weight, None), position)
        return Operand(composed.shaped(make, found, shape), rows + columns, shape)
    position = _in_order(make, a, both + summed + rows)
    position = composed.shaped(make, position, (count * inner, 1, width))
    weight = viewed(b.held, order, (count * outer, inner, 1, 1))
    found = make.append(ops.Conv2d(weight, None, (1, 1), (0, 0), (1, 1), count), position)
    shape = (*a.sizes(both), *b.sizes(columns), *a.sizes(rows))
    return Operand(composed.shaped(make, found, shape), both + columns + rows, shape)


def _in_order(make: Maker, a: Operand, letters: str) -> int:
    """Append the node with its dimensions in the order of some letters."""
    assert isinstance(a.held, int)
    if letters == a.letters:
        return a.held
    order = (0, *(a.letters.index(letter) + 1 for letter in letters))
    return make.append(ops.Permute(order), composed.shaped(make, a.held, a.shape))


def letters_of(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with letters for an ellipsis."""
    equation = equation.replace(" ", "")
    given, arrow, out = equation.partition("->")
    parts = given.split(",")
    refuse(len(parts) != len(ranks), f"{len(ranks)} operands for {equation!r}")
    refuse(not all(part.replace("...", "").isalpha() for part in parts), f"{equation!r}")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    dots = [rank - len(p.replace("...", "")) for p, rank in zip(parts, ranks, strict=True)]
    refuse(max(dots) > len(spare) or min(dots) < 0, f"{equation!r} for operands of ranks {ranks}")
    most = "".join(spare[: max([n for p, n in zip(parts, dots, strict=True) if "..." in p] or [0])])
    parts = [p.replace("...", most[len(most) - n :]) for p, n in zip(parts, dots, strict=True)]
    if not arrow:
        joined = "".join(parts)
        singles = sorted(c for c in set(joined) - set(most) if joined.count(c) == 1)
        return parts, most + "".join(singles)
    return parts, out.replace("...", most)


def bilinear(make: Maker, a: int, b: int, weight: Tensor, bias: Tensor | None) -> int:
    """Append `a^T W_k b + bias_k` for each matrix, over the last dimension of both."""
    places = "pqrstuvw"[: len(make.shape_of(a)) - 1]
    first, second = (Operand(i, places + c, make.shape_of(i)) for i, c in ((a, "i"), (b, "j")))
    matrices = Operand(weight, "kij", tuple(weight.shape))
    found = einsum(make, (second, matrices, first), places + "k")
    return found if bias is None else make.append(ops.Shift(bias), found)
