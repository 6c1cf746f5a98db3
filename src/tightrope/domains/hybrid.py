"""Hybrid zonotopes (DiffAI): a centre, error terms, and errors that belong to one neuron each.

The set `centre + sum_e generator_e * noise_e + rest * noise`, with every noise in [-1, 1]: error
terms that neurons share, and for each neuron an error of its own of size `rest` (DiffAI's beta),
which is never added up with another. Without a rest it is a zonotope, without terms a box.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tightrope.box import Box, flat
from tightrope.domains import interval
from tightrope.domains.error_terms import Errors, Group, Own, Spread
from tightrope.domains.strips import Strip
from tightrope.graph import ops
from tightrope.graph.evaluate import RULES as POINT_RULES


@dataclass(frozen=True, eq=False)
class Zonotope:
    """A centre [batch, *shape], groups of error terms, and the sizes of what has no terms.

    Groups have names: branches of a network make terms of their own, and only groups of the same
    name add up where they join.
    """

    center: Tensor
    groups: Mapping[int, Group]
    rest: Tensor | None = None

    @cached_property
    def box(self) -> Box:
        """The smallest box around the zonotope."""
        sizes = [group.size() for group in self.groups.values()]
        sizes += [] if self.rest is None else [self.rest]
        return Box.around(self.center, sum(sizes, start=torch.zeros_like(self.center)))

    @property
    def generators(self) -> Tensor:
        """The generators of all groups: [batch, error terms, *shape]."""
        none = self.center.new_zeros(len(self.center), 0, *self.center.shape[1:])
        rows = [self.groups[name].spread().values for name in sorted(self.groups)]
        return torch.cat((none, *rows), 1)

    def through(self, op: ops.Op, rule: Callable[[Group], Group], linear: ops.Op) -> Zonotope:
        """Return the image under an affine operation, whose linear part is `linear`."""
        groups = {name: rule(group) for name, group in self.groups.items()}
        return Zonotope(POINT_RULES[type(op)](op, self.center), groups, spread_rest(linear, self))


def between_lines(z: Zonotope, lines: Strip, mask: Tensor | None, errors: Errors) -> Zonotope:
    """Enclose by `slope * x + middle ± radius`; the radius is zero outside of `mask` (flat)."""
    slope, middle, radius = lines
    groups = {name: _scaled(group, slope) for name, group in z.groups.items()}
    rest = None if z.rest is None else slope.abs() * z.rest
    return with_errors(Zonotope(slope * z.center + middle, groups, rest), radius, mask, errors)


def _scaled(group: Group, factor: Tensor) -> Group:
    """Multiply each neuron of each sample by its factor."""
    if isinstance(group, Own):
        return group.along(lambda t: t * factor)
    rows = group.spread()
    return replace(rows, values=rows.values * factor.unsqueeze(1))


def with_errors(
    zonotope: Zonotope, radius: Tensor, mask: Tensor | None, errors: Errors
) -> Zonotope:
    """Add an error of size `radius` to each neuron in `mask` (flat, for all samples)."""
    if zonotope.rest is not None:
        radius, mask = zonotope.rest + radius, None
    groups, rest = errors.of_layer(radius, mask)
    return Zonotope(zonotope.center, {**zonotope.groups, **groups}, rest)


def spread_rest(op: ops.Op, *zonotopes: Zonotope) -> Tensor | None:
    """Return what an operation makes of errors without terms: the radius of a box around zero."""
    if all(z.rest is None for z in zonotopes):
        return None
    boxes = []
    for z in zonotopes:
        zero = torch.zeros_like(z.center)
        boxes.append(Box.around(zero, zero if z.rest is None else z.rest))
    return interval.RULES[type(op)](op, *boxes, rounding=0.0).radius


def aligned(name: int, zonotopes: tuple[Zonotope, ...]) -> list[Spread]:
    """Return the generators of a group in each zonotope, zeros where it has none."""
    found = [z.groups[name].spread() if name in z.groups else None for z in zonotopes]
    known = next(group for group in found if group is not None)
    batch = known.values.shape[:2]
    return [
        replace(known, values=z.center.new_zeros(*batch, *z.center.shape[1:]))
        if group is None
        else group
        for group, z in zip(found, zonotopes, strict=True)
    ]


def differences(output: Zonotope, labels: Tensor) -> Tensor:
    """Return lower bounds on `o_y - o_i`, error term by error term."""
    center = output.center.gather(1, labels[:, None]) - output.center
    spread = torch.zeros_like(center)
    for group in output.groups.values():
        rows = group.spread()
        own = labels.view(-1, 1, 1).expand(-1, rows.values.shape[1], 1)
        spread = spread + replace(rows, values=rows.values.gather(2, own) - rows.values).size()
    if output.rest is not None:
        both = output.rest.gather(1, labels[:, None]) + output.rest
        spread = spread + both.scatter(1, labels[:, None], 0.0)
    return center - spread


def somewhere(mask: Tensor) -> Tensor:
    """Return which neurons (of the flat layer) a mask holds of any sample."""
    return flat(mask).any(0)
