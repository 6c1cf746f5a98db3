"""Training on zonotope bounds (Wong and Kolter 2018: CAP; the same bounds as DeepZ's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tightrope.box import Box
from tightrope.domains import zonotope
from tightrope.domains.error_terms import Errors
from tightrope.domains.linear import dual
from tightrope.errors import UserError
from tightrope.graph import Graph
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import options
from tightrope.training.objectives.base import Loss, Objective, certified
from tightrope.training.objectives.propagation import margin_loss
from tightrope.training.objectives.zonotopes import check_memory, sample_bytes, some_at_a_time
from tightrope.training.parsing import setting


@dataclass(frozen=True)
class CAP(Objective):
    """The loss of zonotope bounds of the margins, with an error term for every unstable ReLU.

    Sound, and tighter than intervals by far; for small networks. With `projections`, bounds of the
    layers are random estimates (Wong et al. 2018), and what follows is no bound of anything.
    """

    name: ClassVar[str] = "cap"
    summary: ClassVar[str] = "zonotope bounds of the margins (Wong-Kolter, DeepZ)"
    annealing_share: ClassVar[float | None] = 1 / 3

    projections: int = setting(
        0, options.count_or_none, "Cauchy vectors that estimate the bounds of layers (0: exact)"
    )

    def check(self, graph: Graph) -> None:
        """Refuse networks that are too large, or have other activations."""
        for node in graph.nodes:
            if not isinstance(node.op, dual.KNOWN):
                raise UserError(
                    f"cap is for networks of ReLUs, and {node.name!r} is a "
                    f"{type(node.op).__name__}; use method = diffai"
                )
        check_memory(self._bytes(graph), "cap", "use method = diffai or a smaller network")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the cross-entropy of `-J(e_y - e_i)`, J the dual bound of a margin."""
        graph = model.graph
        seed = int(torch.randint(1 << 40, ())) if self.projections else 0

        def of_part(lower: Tensor, upper: Tensor, labels: Tensor) -> Tensor:
            box = Box(lower, upper)
            return dual.margins(graph, box, labels, self._layers(graph, box, seed))

        ball = Box.ball(x, radius)
        margins = some_at_a_time(of_part, self._bytes(graph), *ball.corners, y)
        return Loss(margin_loss(margins, y), certified(margins, y))

    def _layers(self, graph: Graph, box: Box, seed: int) -> dict[int, Box]:
        """Return bounds, or estimates of bounds, of what ReLUs read."""
        if not self.projections:
            return dual.bounds(graph, box)
        errors = Errors(projections=self.projections, seed=seed)
        return zonotope.bounds(graph, box, keep=dual.relu_inputs(graph), errors=errors)[1]

    def _bytes(self, graph: Graph) -> int:
        if self.projections:
            return sample_bytes(graph, Errors(projections=self.projections))
        return 4 * dual.numbers_kept(graph)
