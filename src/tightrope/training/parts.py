"""Gradients of a batch that is computed in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tightrope.graph import Graph
from tightrope.training.distributed import Group
from tightrope.training.objectives import Loss


class PartGradients:
    """Adds up the gradients of a loss that combines means over a batch computed in parts.

    Each mean gets gradients of its own, which are weighted once the means of the whole batch
    are known. Losses that are means themselves need one backward pass, like a whole batch. Other
    processes of `group` have other parts.
    """

    def __init__(self, inputs: Sequence[Tensor], group: Group | None = None) -> None:
        self.inputs, self.group = inputs, group
        self.gradients: list[list[Tensor | None]] = []
        self.means: Tensor | None = None
        self.combine: Callable[..., Tensor] = lambda *means: sum(means)

    def add(self, loss: Loss, extra: Tensor, factor: float, share: float) -> None:
        """Add the gradients of a part that holds that share of the batch."""
        terms: tuple[Tensor, ...] = (factor * loss.value + extra,)
        if combine := loss.combine:
            terms = (*loss.means, extra)
            self.combine = lambda *means: factor * combine(*means[:-1]) + means[-1]
        means = torch.stack([term.detach() for term in terms]) * share
        self.means = means if self.means is None else self.means + means
        self.gradients = self.gradients or [[None] * len(self.inputs) for _ in terms]
        for k, term in enumerate(terms):
            if not term.requires_grad:
                continue
            later = any(t.requires_grad for t in terms[k + 1 :])
            new = torch.autograd.grad(
                term * share, self.inputs, retain_graph=later, allow_unused=True
            )
            before = self.gradients[k]
            self.gradients[k] = [_plus(a, b) for a, b in zip(before, new, strict=True)]

    def finish(self) -> float:
        """Leave the weighted gradients in the inputs, and return the loss of the batch."""
        assert self.means is not None
        if self.group is not None:
            self.group.add(self.means)
        with torch.enable_grad():
            means = [m.requires_grad_() for m in self.means.unbind()]
            value = self.combine(*means)
            factors = torch.autograd.grad(value, means)
        for factor, gradients in zip(factors, self.gradients, strict=True):
            for tensor, gradient in zip(self.inputs, gradients, strict=True):
                tensor.grad = _plus(tensor.grad, None if gradient is None else factor * gradient)
        return float(value.detach())


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def parameters_of(graph: Graph) -> list[Tensor]:
    """Return the tensors of a graph that have gradients."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found[id(tensor)] = tensor
        return tensor

    graph.map_tensors(note)
    return list(found.values())
