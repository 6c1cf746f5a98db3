"""The last hidden layer of a large classifier, without the neurons that cannot flip.

To follow changes through a large linear layer means to read most of its weights, for each
estimator and step. Inside a sample's box only some of its neurons can flip. Dead ones are left
out; active ones add up to one linear function per margin, which becomes a neuron of its own: less
a lower bound, it is always active. What remains is small enough for the processor's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tightrope.attacks.kernels.chains import Array, Task, bias, flat
from tightrope.attacks.kernels.stability import ACTIVE, UNSTABLE, stability
from tightrope.graph import ops

if TYPE_CHECKING:  # the compiler takes a while to load
    from tightrope.attacks.kernels.changes_kernel import Layer
    from tightrope.attacks.kernels.increments_kernel import Readout

# Smaller layers stay in the cache as they are.
SMALLEST = 1 << 20
# Margins may be as many as one in so many neurons.
SHARE = 4


class LastLayer:
    """The last hidden layer for each of some samples."""

    def __init__(self, task: Task, layer: Layer, piece: slice, values: Tensor) -> None:
        """`values` are the activations before the layer: [samples, estimators, values]."""
        *_, hidden, last = task.chain.layers
        known = stability(task.chain, task.box[piece])
        rows = flat(last.weight.unflatten(1, task.chain.shapes[-1]), 1)
        labels, targets = task.labels[piece], task.targets[piece]
        self.layer, self.kinds = layer, known.kinds[-1]
        self.slopes = rows[targets] - rows[labels].unsqueeze(1)
        active = self.slopes * (self.kinds == ACTIVE).unsqueeze(1)
        self.direct = active @ torch.from_numpy(layer.backwards.weights)
        constants = active @ bias(hidden)
        center, radius = (t.unsqueeze(2) for t in known.before.middle)
        lowest = (self.direct @ center - self.direct.abs() @ radius).squeeze(2) + constants
        self.shifts = lowest - 1 - 1e-3 * lowest.abs()
        self.linear = values @ self.direct.mT + (constants - self.shifts).unsqueeze(1)
        offsets = bias(last)
        self.offsets = offsets[targets] - offsets[labels].unsqueeze(1) + self.shifts

    def of(self, b: int, hidden: Array) -> tuple[Layer, Readout, Array]:
        """Return the layer of sample b, what reads it out, and `hidden` [estimators, neurons]."""
        from tightrope.attacks.kernels.changes_kernel import narrow
        from tightrope.attacks.kernels.increments_kernel import Readout

        kept = (self.kinds[b] == UNSTABLE).nonzero()[:, 0].numpy()
        above, below = self.layer.forwards, self.layer.backwards
        inputs, count = len(above.weights), len(self.direct[b])
        size = len(kept) + count
        upwards = np.empty((inputs, size), hidden.dtype)
        downwards = np.empty((size, inputs), hidden.dtype)
        narrow(above.weights, below.weights, kept, self.direct[b].numpy(), upwards, downwards)
        layer = self.layer._replace(
            forwards=above._replace(weights=upwards),
            backwards=below._replace(
                weights=downwards, blocks=np.zeros(size, np.int64), picks=np.arange(size)
            ),
        )
        rows = np.zeros((count + 1, size), hidden.dtype)  # the last one stands for the label
        rows[:-1, : len(kept)] = self.slopes[b].numpy()[:, kept]
        rows[:-1, len(kept) :] = np.eye(count)
        offsets = np.append(self.offsets[b].numpy(), hidden.dtype.type(0))
        readout = Readout(rows, offsets, np.array([count]), np.arange(count)[None])
        return layer, readout, np.hstack([hidden[:, kept], self.linear[b].numpy()])


def narrows(task: Task) -> bool:
    """Return whether the last hidden layer is worth it."""
    hidden = task.chain.layers[-2]
    large = hidden.weight.numel() >= SMALLEST
    deep = len(task.chain.layers) > 2  # else too few changes arrive
    few = SHARE * task.targets.shape[1] <= len(hidden.weight)  # each margin adds a neuron
    return isinstance(hidden, ops.Linear) and deep and large and few
