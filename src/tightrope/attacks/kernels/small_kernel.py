"""Small networks and their gradients, compiled: 16 points at a time.

Values of all levels are rows, one number per point; each level ends with a row of zeros, which
stands for padding.
"""

from __future__ import annotations

from tightrope.attacks.kernels.chains import Array
from tightrope.attacks.kernels.compiling import compiled
from tightrope.attacks.kernels.lanes_kernel import LANES, gather, is_zero, scatter
from tightrope.attacks.kernels.windows import Layer


@compiled
def forwards(
    points: Array, layers: tuple[Layer, ...], levels: Array, values: Array, outputs: Array
) -> None:
    """Evaluate `points` [points, inputs]; `values` [groups, numbers] keeps the activations.

    `levels` are the first rows of all levels.
    """
    zero = points.dtype.type(0)
    for first in range(0, len(points), LANES):
        used, rows = min(LANES, len(points) - first), values[first // LANES]
        for e in range(used):
            point = points[first + e]
            for i in range(len(point)):
                rows[i * LANES + e] = point[i]
        for k in range(len(layers)):
            taps, weights, biases = layers[k]
            below, goal = rows[levels[k] * LANES :], rows[levels[k + 1] * LANES :]
            count = len(taps) * len(weights)
            for p in range(len(taps)):
                for o in range(len(weights)):
                    row = p * len(weights) + o
                    for e in range(LANES):
                        goal[row * LANES + e] = biases[o]
                    gather(goal, row, goal, below, taps[p], weights[o], 0, taps.shape[1])
            if k < len(layers) - 1:
                for i in range(count * LANES):
                    goal[i] = max(goal[i], zero)
            else:
                for e in range(used):
                    for j in range(count):
                        outputs[first + e, j] = goal[j * LANES + e]


@compiled
def backwards(
    gradients: Array,
    layers: tuple[Layer, ...],
    levels: Array,
    values: Array,
    slopes: Array,
    result: Array,
) -> None:
    """Turn gradients of the outputs [points, classes] into those of the points."""
    top = levels[len(layers)]
    for first in range(0, len(gradients), LANES):
        used, rows = min(LANES, len(gradients) - first), values[first // LANES]
        for i in range(len(slopes)):
            slopes[i] = 0
        for e in range(used):
            for j in range(gradients.shape[1]):
                slopes[(top + j) * LANES + e] = gradients[first + e, j]
        for k in range(len(layers) - 1, -1, -1):
            taps, weights, _ = layers[k]
            begin = levels[k + 1]
            if k < len(layers) - 1:
                for i in range(begin * LANES, (begin + len(taps) * len(weights)) * LANES):
                    slopes[i] = slopes[i] if rows[i] > 0 else slopes.dtype.type(0)
            for p in range(len(taps)):
                for o in range(len(weights)):
                    row = begin + p * len(weights) + o
                    if not is_zero(slopes, row):
                        length = taps.shape[1]
                        scatter(slopes, levels[k], slopes, row, taps[p], weights[o], 0, length)
        for e in range(used):
            gradient = result[first + e]
            for i in range(len(gradient)):
                gradient[i] = slopes[i * LANES + e]
