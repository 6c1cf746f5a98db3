"""The error terms of zonotopes, in groups: one for the input and one for every layer that made any.

A group is a linear map from its own error terms, each in [-1, 1], to the neurons of a layer, for a
whole batch. It goes through linear maps, and says how far its terms together move each neuron.

- `Own`: one term per neuron, so far. It costs no more than a box; the first layer that mixes
  neurons is read off its weights, once for all samples.
- `Spread`: a generator per term, [batch, terms, *shape].
- `Projected`: the generators times k random Cauchy vectors, [batch, k, *shape], whose median
  absolute value estimates the sum of absolute values (Wong et al. 2018). An estimate, on either
  side of the truth: for training only, never for a bound that somebody relies on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from tightrope.box import Box, flat
from tightrope.draws import uniform_like

LARGEST = 1e10  # of a Cauchy number, which has no mean

Linear = Callable[[Tensor], Tensor]


class Group(Protocol):
    """Error terms, and what they do to each neuron of a layer."""

    def size(self) -> Tensor:
        """Return how far the terms together move each neuron: [batch, *shape]."""

    def through(self, linear: Linear) -> Group:
        """Return the group behind a linear map of samples, the same for all of them."""

    def along(self, linear: Linear) -> Group:
        """Return the group behind a linear map that keeps every neuron in its place."""

    def spread(self) -> Spread:
        """Return a generator per term (or per projection)."""


@dataclass(frozen=True, eq=False)
class Spread:
    """One generator per error term: [batch, terms, *shape]."""

    values: Tensor

    def size(self) -> Tensor:
        """Sum up absolute values."""
        return self.values.abs().sum(1)

    def through(self, linear: Linear) -> Self:
        """Apply the map to every generator."""
        batch = self.values.shape[:2]
        return replace(self, values=linear(self.values.flatten(0, 1)).unflatten(0, batch))

    along = through

    def spread(self) -> Spread:
        """It is."""
        return self


@dataclass(frozen=True, eq=False)
class Projected(Spread):
    """Generators times k Cauchy vectors: [batch, k, *shape]."""

    def size(self) -> Tensor:
        """Estimate the sum of absolute values: the median of what Cauchy numbers make of it."""
        return self.values.abs().median(1).values


@dataclass(frozen=True, eq=False)
class Own:
    """One error term of size `radius` for each of the neurons at `places` (of the flat layer)."""

    radius: Tensor
    places: Tensor

    def size(self) -> Tensor:
        """Return the sizes themselves."""
        return self.radius.abs()

    def along(self, linear: Linear) -> Own:
        """Every neuron keeps its term."""
        return replace(self, radius=linear(self.radius))

    def through(self, linear: Linear) -> Spread:
        """Send unit vectors through the map, which are those of all samples."""
        shape = self.radius.shape[1:]
        units = self.radius.new_zeros(len(self.places), shape.numel())
        units[torch.arange(len(units), device=units.device), self.places] = 1.0
        images = linear(units.view(-1, *shape))
        sizes = flat(self.radius)[:, self.places]
        return Spread(sizes.view(*sizes.shape, *(1 for _ in images.shape[1:])) * images)

    def spread(self) -> Spread:
        """Write the terms as generators."""
        return self.through(lambda t: t)


def own(radius: Tensor, mask: Tensor | None = None) -> Own:
    """Return one term per neuron, or per neuron of a (flat) mask."""
    if mask is None:
        return Own(radius, torch.arange(radius[0].numel(), device=radius.device))
    return Own(radius, mask.nonzero()[:, 0])


def chosen(radius: Tensor, chances: Tensor, count: int) -> Spread:
    """Return terms of the `count` neurons of each sample with the largest chances."""
    sizes = flat(radius)
    places = flat(chances).topk(min(count, sizes.shape[1]), 1).indices
    values = sizes.new_zeros(*places.shape, sizes.shape[1])
    values = values.scatter(2, places.unsqueeze(2), sizes.gather(1, places).unsqueeze(2))
    return Spread(values.view(*places.shape, *radius.shape[1:]))


def projected(radius: Tensor, count: int, seed: int | None = None) -> Projected:
    """Return `count` Cauchy combinations of one term per neuron, the same for all samples.

    They follow from the seed, or are drawn if there is none.
    """
    random = torch.empty(count, *radius.shape[1:], dtype=radius.dtype)
    if seed is None:
        random.cauchy_()
    else:
        random.cauchy_(generator=torch.Generator().manual_seed(seed))
    kept = random.clamp_(-LARGEST, LARGEST).to(radius.device)
    return Projected(radius.unsqueeze(1) * kept)


@dataclass
class Errors:
    """What becomes of errors on their way through a network, and the names of their groups.

    `relu` names the strip around ReLUs (`strips.py`). The error terms are those

    - of all inputs, or of `inputs` of them for each sample (DiffAI's HRand; 0 is its Box): those
      with the largest `chances`, drawn if there are none;
    - of every activation (`fresh`), which makes zonotopes of hybrid ones.

    Other errors go into `rest`, where they are never added up with each other. With `projections`,
    groups of more terms than that are random projections, which follow from the `seed` if there
    is one.
    """

    relu: str = "deepz"
    fresh: bool = True
    inputs: int | None = None
    projections: int = 0
    chances: Tensor | None = None
    seed: int | None = None
    used: int = 0

    def name(self) -> int:
        """Return a name that no group has."""
        self.used += 1
        return self.used

    def of_input(self, box: Box) -> tuple[dict[int, Group], Tensor | None]:
        """Return the error terms of a box, and the sizes of what has none."""
        radius = box.radius
        if self.inputs is None:
            return {self.name(): self._terms(radius)}, None
        if self.inputs == 0:
            return {}, radius
        chances = uniform_like(radius) if self.chances is None else self.chances
        group = chosen(radius, chances, self.inputs)
        return {self.name(): group}, radius - group.size()

    def of_layer(
        self, radius: Tensor, mask: Tensor | None = None
    ) -> tuple[dict[int, Group], Tensor | None]:
        """Return new error terms of a layer, none outside of `mask` (flat), or their sizes."""
        if not self.fresh:
            return {}, radius
        if mask is not None and not self._many(radius) and not bool(mask.any()):
            return {}, None
        return {self.name(): self._terms(radius, mask)}, None

    def _many(self, radius: Tensor) -> bool:
        return 0 < self.projections < radius[0].numel()

    def _terms(self, radius: Tensor, mask: Tensor | None = None) -> Group:
        if self._many(radius):
            seed = None if self.seed is None else self.seed + self.used
            return projected(radius, self.projections, seed)
        return own(radius, mask)
