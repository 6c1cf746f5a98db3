"""Random points inside boxes, compiled."""

from __future__ import annotations

from tightrope.attacks.kernels.chains import Array
from tightrope.attacks.kernels.compiling import compiled


@compiled
def place(shares: Array, lower: Array, upper: Array) -> None:
    """Turn shares of the width [boxes, points, coordinates] into points, in place."""
    for b in range(len(shares)):
        low, up = lower[b], upper[b]
        for e in range(shares.shape[1]):
            point = shares[b, e]
            for i in range(len(point)):
                # Rounding may lead out of the box by a unit in the last place.
                point[i] = min(max(point[i] * (up[i] - low[i]) + low[i], low[i]), up[i])
