"""Bounds by zonotopes as losses: in parts that fit into memory, merged with the last layer or not.

Every error term is kept for every layer behind it, so a batch goes some samples at a time, which
are computed again when the gradient asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tightrope.attacks import wrong_classes
from tightrope.box import Box
from tightrope.budget import fitting
from tightrope.domains import interval, zonotope
from tightrope.domains.error_terms import Errors
from tightrope.draws import uniform_like
from tightrope.errors import UserError
from tightrope.graph import Graph, ops
from tightrope.training.batchnorm import FixedModel

MEMORY = 1 << 31  # bytes that bounds may keep for the gradient
SAMPLE = 1 << 31  # bytes of one sample, beyond which networks are refused
AFFINE = (ops.Linear, ops.Conv2d, ops.ConvTranspose2d)


def worst_logits(
    model: FixedModel, box: Box, y: Tensor, errors: Errors, *, elided: bool = True
) -> Tensor:
    """Return logits that are as bad as the bounds allow: [batch, classes].

    Elided ones are `-(o_y - o_i)` of bounded margins; the others the lower bound of `o_y` and
    upper bounds of the others, which cannot be met together.
    """
    graph = model.graph
    if errors.inputs == 0 and not errors.fresh and errors.relu == "box":
        return _interval_logits(graph, box, y, elided=elided)
    # All that is random is drawn for the whole batch, whatever its parts are.
    chances = uniform_like(box.lower) if errors.inputs else box.lower

    def of_part(lower: Tensor, upper: Tensor, labels: Tensor, chances: Tensor) -> Tensor:
        part, fresh = Box(lower, upper), replace(errors, chances=chances, used=0)
        if elided:
            return -zonotope.margins(graph, part, labels, errors=fresh)[0]
        return _apart(zonotope.bounds(graph, part, errors=fresh)[0], labels)

    return some_at_a_time(of_part, sample_bytes(graph, errors), *box.corners, y, chances)


def _interval_logits(graph: Graph, box: Box, y: Tensor, *, elided: bool) -> Tensor:
    """The same of boxes, which keep little."""
    if elided:
        return -interval.margins(graph, box, y)[0]
    return _apart(interval.bounds(graph, box)[0], y)


def _apart(output: Box, y: Tensor) -> Tensor:
    """Return the lower bound of `o_y` and the upper bounds of the others."""
    own = torch.arange(output.upper.shape[1], device=y.device) == y[:, None]
    return torch.where(own, output.lower, output.upper)


def some_at_a_time(of_part: Callable[..., Tensor], each: int, *given: Tensor) -> Tensor:
    """Return what `of_part` makes of all samples, of which each keeps so many bytes."""
    at_once = max(1, fitting(MEMORY, given[0].device) // max(1, each))
    if at_once >= len(given[0]):
        return of_part(*given)
    parts = zip(*(t.split(at_once) for t in given), strict=True)
    return torch.cat([checkpoint(of_part, *part, use_reentrant=False) for part in parts])


def check_memory(each: int, method: str, advice: str) -> None:
    """Refuse networks of which one sample keeps too much."""
    if each > SAMPLE:
        raise UserError(
            f"{method} would keep {each / (1 << 30):.1f} GiB for each sample of this network, "
            f"more than {SAMPLE >> 30}; {advice}"
        )


def worst_loss(logits: Tensor, y: Tensor, loss: str) -> Tensor:
    """Return the cross-entropy of worst logits, or `ln(1 + e^m)` of the worst margin m alone."""
    if loss != "worst":
        return F.cross_entropy(logits, y)
    wrong = logits.gather(1, wrong_classes(y, logits.shape[1]))
    return F.softplus(wrong.amax(1) - logits.gather(1, y[:, None])[:, 0]).mean()


def sample_bytes(graph: Graph, errors: Errors) -> int:
    """Return about how many bytes the bounds of one sample keep for the gradient.

    New error terms belong to one neuron each until the next layer writes them out.
    """
    size = math.prod(graph.input_shape)
    waiting = size if errors.inputs is None else min(errors.inputs, size)
    terms = numbers = 0
    for node in graph.nodes[1:]:
        size = math.prod(node.shape)
        if isinstance(node.op, AFFINE):
            terms, waiting = terms + _most(waiting, errors), 0
        elif isinstance(node.op, ops.Relu | ops.LeakyRelu) and errors.fresh:
            waiting += size
        numbers += (2 * terms + 8) * size
    return 4 * numbers


def _most(terms: int, errors: Errors) -> int:
    return min(terms, errors.projections) if errors.projections else terms
