"""AutoAttack's standard suite (Croce and Hein 2020): four attacks, each on what is left.

APGD on the cross-entropy, APGD on the targeted difference-of-logits ratio, FAB-T and Square, with
the published parameters. Targets are the classes that come next at the clean input, nine at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tightrope.attacks.apgd import Ball, apgd, cross_entropy, targeted_dlr
from tightrope.attacks.fab import fab
from tightrope.attacks.pgd import Network
from tightrope.attacks.square import square

TARGETS = 9


def _by_cross_entropy(network: Network, ball: Ball, target: int) -> Tensor:
    return apgd(network, ball, cross_entropy(ball.labels))


def _by_ratio(network: Network, ball: Ball, target: int) -> Tensor:
    targets = ranked_classes(network, ball)[:, target]
    return apgd(network, ball, targeted_dlr(ball.labels, targets))


def _nearest(network: Network, ball: Ball, target: int) -> Tensor:
    return fab(network, ball, ranked_classes(network, ball)[:, target])


def _by_squares(network: Network, ball: Ball, target: int) -> Tensor:
    return square(network, ball)


# In their order: each attack on one target, and how many targets there are at most.
ATTACKS: dict[str, tuple[Callable[[Network, Ball, int], Tensor], int]] = {
    "apgd-ce": (_by_cross_entropy, 1),
    "apgd-t": (_by_ratio, TARGETS),
    "fab-t": (_nearest, TARGETS),
    "square": (_by_squares, 1),
}


def ranked_classes(network: Network, ball: Ball) -> Tensor:
    """Return the wrong classes of each sample, the most likely first: [batch, classes - 1]."""
    with torch.no_grad():
        logits = network(ball.x).scatter(1, ball.labels[:, None], -torch.inf)
    return logits.argsort(1, descending=True)[:, :-1]


def autoattack(
    network: Network, ball: Ball, confirm: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Attack samples that are classified correctly; yield each attack's name and who is left.

    `confirm(points, index)` says which of the points, of the samples at those positions, are
    counterexamples; samples leave when it says so.
    """
    left = torch.arange(len(ball.labels), device=ball.labels.device)
    for name, (attack, targets) in ATTACKS.items():
        for target in range(targets):
            if not len(left) or (target and target >= _wrong_classes(network, ball)):
                break
            points = attack(network, ball[left], target)
            left = left[~confirm(points, left)]
        yield name, left


def _wrong_classes(network: Network, ball: Ball) -> int:
    with torch.no_grad():
        return int(network(ball.x[:1]).shape[1]) - 1
