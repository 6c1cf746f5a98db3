"""Which ReLUs of a classifier keep their sign inside a box, by interval bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.attacks.kernels.chains import Chain, flat, image
from tightrope.box import Box
from tightrope.graph import evaluate, ops

DEAD, ACTIVE, UNSTABLE = 0, 1, 2
# Bounds nearer to zero than so many rounding errors do not tell a sign.
DOUBT = 64


@dataclass(frozen=True)
class Stability:
    """What bounds say: flat values, channels last."""

    middle: Tensor  # pre-activations behind the first layer at the centre of the box
    kinds: list[Tensor]  # of the neurons behind each layer
    before: Box  # the values before the last hidden layer


def stability(chain: Chain, box: Box) -> Stability:
    """Bound a chain over boxes of flat values."""
    centers: list[Tensor] = []
    kinds: list[Tensor] = []
    before = box
    lower, upper = (image(t, chain.shapes[0]) for t in box.corners)
    for node in chain.classifier.nodes[1 : chain.affine[-1]]:
        rule = evaluate.RULES[type(node.op)]
        if not isinstance(node.op, ops.Conv2d | ops.Linear):
            lower, upper = rule(node.op, lower), rule(node.op, upper)
            continue
        shape = chain.shapes[len(kinds)]
        before = Box(*(flat(t.reshape(len(t), *shape), 1) for t in (lower, upper)))
        size = replace(node.op, weight=node.op.weight.abs(), bias=None)
        center, radius = rule(node.op, (lower + upper) / 2), rule(size, (upper - lower) / 2)
        centers.append(flat(center, 1))
        kinds.append(flat(_kind(center, radius), 1))
        lower, upper = center - radius, center + radius
    return Stability(centers[0], kinds, before)


def _kind(center: Tensor, radius: Tensor) -> Tensor:
    doubt = DOUBT * torch.finfo(center.dtype).eps * (center.abs() + radius)
    doubt[radius == 0] = 0  # what never changes never flips
    kind = torch.full_like(center, UNSTABLE, dtype=torch.int8)
    kind[center - radius > doubt] = ACTIVE
    kind[(center + radius < -doubt) | ((radius == 0) & (center <= 0))] = DEAD
    return kind
