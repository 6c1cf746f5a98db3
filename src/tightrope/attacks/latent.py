"""Attacks inside latent boxes: one point per wrong class, or one point for all.

The multi-estimator attack (the paper's Section 3.3) looks, for every wrong class i of every
sample, for the point of the sample's box where `o_i - o_y` is largest. All samples and classes
are searched in one batch, cut into pieces by memory only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tightrope.attacks import few_launches
from tightrope.attacks.goals import CrossEntropy, Targeted
from tightrope.attacks.kernels.chain_attack import attack_chain
from tightrope.attacks.kernels.chains import FOLLOWED, Chain, chain
from tightrope.attacks.pgd import NetworkLandscape, Search, Steps, climb, pgd, starting_points
from tightrope.attacks.points import for_points
from tightrope.box import Box
from tightrope.budget import memory_budget
from tightrope.devices import launches
from tightrope.graph import Graph

# Larger pieces than this many bytes are no faster on common processors.
MEMORY = 512 << 20


def latent_steps(
    count: int, size: float | None = None, decay: float = 0.1, decay_from: int = 20
) -> Steps:
    """Return the steps of the paper's latent attack.

    `size` is relative to the full width, by default `max(0.2, 2 / count)`; it drops by `decay`
    late in the attack if that has at least `decay_from` steps.
    """
    width_share = max(0.2, 2 / count) if size is None else size
    if count < decay_from:
        milestones: tuple[float, ...] = ()
    elif count <= 50:
        milestones = (0.7,)
    elif count <= 80:
        milestones = (0.4, 0.7)
    else:
        milestones = (0.3, 0.6, 0.8)
    return Steps(count, size=2 * width_share, decay=decay, milestones=milestones)


def wrong_classes(labels: Tensor, classes: int) -> Tensor:
    """Return the classes other than the label, in order: [batch, classes - 1]."""
    others = torch.arange(classes - 1, device=labels.device).expand(len(labels), -1)
    return others + (others >= labels[:, None])


@torch.no_grad()
def attack_margins(
    classifier: Graph,
    box: Box,
    labels: Tensor,
    *,
    steps: Steps,
    restarts: int = 1,
    start: Tensor | None = None,
    memory: int | None = None,
    plain: bool = False,
) -> Tensor:
    """Return the point with the largest `o_i - o_y` found, for every wrong class i.

    The result is [batch, classes - 1, ...], in the order of `wrong_classes`. Every estimator
    begins at its own uniform random point (in the first restart at `start`, if given), and the
    best point it visits counts, the first one included. It stops where a step leads nowhere.

    `memory` is the number of bytes to use besides the points themselves, by default what suits
    the processor; it does not change the result. On a CPU, networks of affine layers and ReLUs
    are reduced to what changes (`chain_attack`): less work for the same result, unless `plain`.
    Elsewhere they are attacked by few launches (`few_launches`).
    """
    box, classifier = box.detach(), classifier.detach()
    start = None if start is None else start.detach()
    targets = wrong_classes(labels, classifier.output_shape[0])
    count = targets.shape[1]
    if memory is None:
        memory = _suitable_memory(box.lower.device)
    followed = chain(classifier) if not plain and box.lower.dtype in FOLLOWED else None
    if followed is not None and launches(box.lower):
        return _launched(followed, box, labels, targets, steps, restarts, start, memory)
    if followed is not None and followed.worthwhile:
        return attack_chain(
            followed,
            box,
            labels,
            targets,
            steps=steps,
            restarts=restarts,
            start=start,
            memory=memory,
        )
    network = for_points(classifier)
    starts = starting_points(box, start, lambda: box.sample(count), restarts)
    points, searches = next(starts), dict[int, Search]()
    for fresh in itertools.chain([points], starts):
        for piece in _pieces(classifier, points, memory):
            rows = points[piece].flatten(0, 1)
            search = searches.setdefault(piece.start, Search(rows, settle=True))
            search.revive()
            boxes = box[piece].repeat(count)
            goal = Targeted(labels[piece].repeat_interleave(count), targets[piece].flatten())
            landscape = NetworkLandscape(network, goal)
            climb(landscape, boxes, fresh[piece].flatten(0, 1).clone(), steps, search)
    return points


def _launched(
    followed: Chain,
    box: Box,
    labels: Tensor,
    targets: Tensor,
    steps: Steps,
    restarts: int,
    start: Tensor | None,
    memory: int,
) -> Tensor:
    """Attack by few launches, in pieces that fit into memory."""
    count = targets.shape[1]
    starts = list(starting_points(box, start, lambda: box.sample(count), restarts))
    found = [
        few_launches.attack_chain(
            followed, box[p], labels[p], targets[p], [t[p] for t in starts], steps
        )
        for p in _pieces(followed.classifier, starts[0], memory)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def attack_loss(
    classifier: Graph, box: Box, labels: Tensor, *, steps: Steps, restarts: int = 1
) -> Tensor:
    """Return one point per box with the largest cross-entropy found: [batch, 1, ...]."""
    network = for_points(classifier)
    return pgd(network, box, CrossEntropy(labels), steps=steps, restarts=restarts).unsqueeze(1)


def _pieces(classifier: Graph, points: Tensor, memory: int) -> Iterator[slice]:
    """Cut the samples into pieces whose search fits into `memory` bytes."""
    latent = math.prod(classifier.input_shape)
    activations = sum(math.prod(node.shape) for node in classifier.nodes[1:])
    # Corners, radius, points, moved points, gradient and its sign; activations and their own.
    samples, count = points.shape[:2]
    each = (8 * latent + 2 * activations) * points.element_size() * count
    size = max(1, memory // max(each, 1))
    for start in range(0, samples, size):
        yield slice(start, min(start + size, samples))


def _suitable_memory(device: torch.device) -> int:
    return memory_budget(device) if device.type == "cuda" else MEMORY
