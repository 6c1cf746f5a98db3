"""Strict linear bounds of a property on many boxes of inputs at once.

A bounder is made for one box and bounds the rows of the property on parts of it: each row is at
least `slope . x + constant` there, in exact arithmetic. Networks of ReLUs are condensed and bounded
by a compiled loop (`kernel`), others by CROWN on the graph.
"""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tightrope.box import Box, flat
from tightrope.compiling import in_time
from tightrope.deadline import check_time
from tightrope.devices import launches
from tightrope.domains.boxes.condensed import Condensed, varying_inputs
from tightrope.domains.boxes.condensing import condense
from tightrope.domains.boxes.room import Found, Rows, make_room
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, CROWN_IBP, Effort, relax
from tightrope.domains.linear.magnitudes import largest
from tightrope.domains.linear.rules import growth
from tightrope.graph import Graph
from tightrope.precision import ROUNDING

FORMS = 1 << 23  # numbers that the forms of one box may take in each thread


@dataclass(frozen=True)
class RowBounds:
    """Linear lower bounds of rows on boxes, over the inputs that vary.

    `lower` is the smallest value of each on its box; `blame` estimates what of the looseness of a
    bound is due to the width of each input; `bent` counts the activations that lines enclose.
    """

    slope: Tensor  # [boxes, rows, inputs]
    constant: Tensor  # [boxes, rows]
    lower: Tensor  # [boxes, rows]
    blame: Tensor  # [boxes, rows, inputs]
    bent: Tensor  # [boxes]


class BoxBounder(Protocol):
    """Bounds the rows of a property on boxes [boxes, inputs] of the inputs that vary."""

    @property
    def varying(self) -> Tensor:
        """Positions of these inputs, flat."""

    def __call__(self, lower: Tensor, upper: Tensor, wanted: Tensor | None = None) -> RowBounds:
        """Return strict bounds; the boxes are parts of the one that this was made for.

        Of rows that are not `wanted`, [boxes, rows], nothing need be said.
        """


def box_bounder(
    graph: Graph, box: Box, matrix: Tensor, offset: Tensor, known: dict[int, Box] | None = None
) -> BoxBounder:
    """Return the bounder of the rows `matrix @ output + offset` on parts of a box (batch 1).

    The network and the box are float64; `known` are proved bounds of nodes on the box.
    """
    rows = None
    if not launches(box.lower):
        if known is None:
            known = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING).boxes
        rows = condense(graph, known, matrix, offset, rounding=ROUNDING)
    if rows is None or not loop_is_ready():
        return GraphBounder(graph, box, matrix, offset)
    return CompiledBounder(rows)


def loop_is_ready() -> bool:
    """Return whether the compiled loop can be used without being late."""
    from tightrope.domains.boxes import kernel

    return in_time(kernel.bound_boxes)


class CompiledBounder:
    """Bounds of a condensed network, by threads that share the boxes."""

    def __init__(self, network: Condensed) -> None:
        from tightrope.domains.boxes import kernel  # the compiler takes a while to load

        self.kernel, self.network = kernel, network
        self.varying = torch.from_numpy(network.varying)
        self.rows = Rows(
            network.neurons,
            network.pointer,
            network.source,
            network.weight,
            network.bias,
            network.slack,
            network.left,
            network.square,
        )
        width = network.inputs + 1 + network.neurons
        self.capacity = min(FORMS, network.neurons * width)
        self.threads = min(torch.get_num_threads(), os.cpu_count() or 1)
        self.pool = ThreadPoolExecutor(self.threads)
        self.mine = threading.local()

    def __call__(self, lower: Tensor, upper: Tensor, wanted: Tensor | None = None) -> RowBounds:
        """Bound the rows on boxes."""
        boxes, rows, inputs = len(lower), self.network.rows, self.network.inputs
        found = Found(
            np.empty((boxes, rows, inputs)),
            np.empty((boxes, rows)),
            np.empty((boxes, rows)),
            np.empty((boxes, rows, inputs)),
            np.empty(boxes, np.int64),
        )
        corners = lower.contiguous().numpy(), upper.contiguous().numpy()
        asked = np.ones((boxes, rows), bool) if wanted is None else wanted.contiguous().numpy()

        def run(part: slice) -> None:
            if not hasattr(self.mine, "room"):
                self.mine.room = make_room(self.rows, inputs, self.capacity)
            room = self.mine.room
            some = Found(*(t[part] for t in found))
            low, high = (side[part] for side in corners)
            self.kernel.bound_boxes(low, high, asked[part], self.rows, room, some)

        size = max(1, math.ceil(boxes / (8 * self.threads)))
        parts = [slice(i, i + size) for i in range(0, boxes, size)]
        list(self.pool.map(run, parts))
        return RowBounds(*(torch.from_numpy(t) for t in found))


@dataclass(frozen=True)
class GraphBounder:
    """Bounds by CROWN of all layers on the graph, for any operation that has linear bounds."""

    graph: Graph
    box: Box
    matrix: Tensor
    offset: Tensor
    effort: Effort = CROWN

    @property
    def varying(self) -> Tensor:
        """Positions of the inputs that vary, flat."""
        moving: np.ndarray = np.flatnonzero(varying_inputs(self.box.map(lambda t: t.cpu())))
        return torch.from_numpy(moving).to(self.box.lower.device)

    def rows_at(self, points: Tensor) -> Tensor:
        """Return the rows at points of the inputs that vary, as they are computed."""
        whole = flat(self.box.lower).repeat(len(points), 1)
        whole[:, self.varying] = points
        outputs = flat(self.graph(whole.view(-1, *self.graph.input_shape)))
        return outputs @ self.matrix.T + self.offset

    def __call__(self, lower: Tensor, upper: Tensor, wanted: Tensor | None = None) -> RowBounds:
        """Bound the rows on boxes."""
        check_time()
        varying = self.varying
        count, rows = len(lower), len(self.matrix)
        corners = [flat(t).repeat(count, 1) for t in self.box.corners]
        corners[0][:, varying], corners[1][:, varying] = lower, upper
        box = Box(*(t.view(count, *self.graph.input_shape) for t in corners))
        relaxation = relax(self.graph, box, effort=self.effort, rounding=ROUNDING)
        owner = torch.arange(count, device=lower.device).repeat_interleave(rows)
        shape = self.graph.output_shape
        values = self.matrix.view(rows, *shape).repeat(count, *(1 for _ in shape))
        form = relaxation.pull(relaxation.output, Coefficients(values, owner))
        slope = flat(form.coefficients.dense().values)
        constant, lost = form.constant + self.offset.repeat(count), form.slack
        # The offset's sum is rounded, and the rows may have been rounded to float64.
        size = form.constant.abs() + self.offset.abs().repeat(count)
        reach = flat(largest(relaxation.boxes[relaxation.output]))
        size = size + (reach @ self.matrix.abs().T).flatten()
        # What hardly varies takes its worst value at once.
        still = torch.ones(slope.shape[1], dtype=torch.bool, device=slope.device)
        still[varying] = False
        thin = [t[owner][:, still] for t in corners]
        rest = slope[:, still]
        constant = constant + (rest.clamp(min=0) * thin[0] + rest.clamp(max=0) * thin[1]).sum(1)
        size = size + (rest.abs() * torch.maximum(thin[0].abs(), thin[1].abs())).sum(1)
        lost = lost + growth(rest.shape[1] + 8, ROUNDING) * (size + lost + constant.abs())
        constant = torch.nextafter(constant - lost, torch.full_like(lost, -torch.inf))
        slope = slope[:, varying].view(count, rows, -1)
        constant = constant.view(count, rows)
        width = (upper - lower)[:, None]
        smallest = smallest_values(slope, constant, lower, upper)
        bent = sum(
            flat(relaxation.boxes[self.graph.nodes[i].inputs[0]].radius > 0).sum(1)
            for i in relaxation.lines
        )
        counts = torch.as_tensor(bent, device=lower.device).expand(count)
        return RowBounds(slope, constant, smallest, slope.abs() * width, counts)


@dataclass(frozen=True)
class OffsetBounder:
    """Bounds of rows whose offsets are inputs, too: behind those of the network, with one more.

    The last one means nothing to the network.
    """

    inner: BoxBounder
    rows: int

    @property
    def varying(self) -> Tensor:
        """All of these inputs."""
        known = self.inner.varying
        return torch.arange(len(known) + self.rows + 1, device=known.device)

    def __call__(self, lower: Tensor, upper: Tensor, wanted: Tensor | None = None) -> RowBounds:
        """Bound the rows on boxes."""
        more = self.rows + 1
        found = self.inner(lower[:, :-more], upper[:, :-more])
        unit = torch.eye(self.rows, more, dtype=lower.dtype, device=lower.device)
        slope = torch.cat((found.slope, unit.expand(len(lower), -1, -1)), 2)
        blame = torch.cat((found.blame, torch.zeros_like(slope[:, :, -more:])), 2)
        least = smallest_values(slope, found.constant, lower, upper)
        return RowBounds(slope, found.constant, least, blame, found.bent)


def smallest_values(slope: Tensor, constant: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Return strict lower bounds of linear functions on their boxes, [boxes, rows]."""
    low, high = lower[:, None], upper[:, None]
    least = (slope.clamp(min=0) * low + slope.clamp(max=0) * high).sum(2) + constant
    size = (slope.abs() * torch.maximum(low.abs(), high.abs())).sum(2) + constant.abs()
    lost = growth(slope.shape[2] + 4, ROUNDING) * size * (1 + 1e-9)
    return least - lost - torch.finfo(least.dtype).tiny * (1 + size)
