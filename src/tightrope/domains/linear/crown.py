"""Bounds on every neuron of a network: CROWN-IBP, CROWN and alpha-CROWN.

`relax` walks the network once. Interval bounds come first at every node; before an activation,
rows of linear bounds tighten the neurons that are still undecided (none for CROWN-IBP), with
slopes optimised or not. What it returns, a `Relaxation`, bounds any linear function of the
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tightrope.box import BallBox, Box, flat
from tightrope.budget import fitting, rows_at_once
from tightrope.deadline import check_time
from tightrope.domains import interval
from tightrope.domains.linear.alpha import alpha_bounds, optimize_slopes
from tightrope.domains.linear.bounded import COPIES, MEMORY, Relaxation
from tightrope.domains.linear.coefficients import Coefficients, Windows, unit_rows
from tightrope.domains.linear.extrema import as_extremum
from tightrope.domains.linear.factors import PRODUCTS, Factors, varies
from tightrope.domains.linear.forms import few_inputs, tighter
from tightrope.domains.linear.magnitudes import Magnitudes, largest
from tightrope.domains.linear.refining import Refining
from tightrope.domains.linear.relaxations import lines, unstable
from tightrope.domains.linear.rules import ACTIVATIONS, BOXED, RULES, by_intervals
from tightrope.domains.linear.together import optimized_units, worthwhile
from tightrope.domains.reduced.reduction import Reducer, reduce, reducible
from tightrope.domains.rounding import cornered
from tightrope.graph import Graph, Node, ops
from tightrope.graph.steps import tests_a_sign

# Operations that look at each number by itself.
MOVES = (ops.Reshape, ops.Permute, ops.Pad, ops.Slice, ops.Take, ops.Concat)
APART = (*MOVES, ops.Shift, ops.Scale, ops.BatchNorm)
DIFFERENCES = 1 << 10  # that are bounded one by one
# Bytes of windows at a time: they are looked at many times, and fast in a cache.
CACHED = COPIES << 22
JUMPS = (ops.Step, ops.Where, ops.ArgMax)
# Layers over which signs are looked for first; one in so many neurons tells if that is worth it: if
# no more than that share stays undecided.
SHORT, FURTHER, TRIED, UNDECIDED = (2, 6), 3, 16, 0.5
WORK = 2e11  # multiply-adds that optimising the slopes of one layer may take


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    `iterations` optimises slopes (0: CROWN with the default ones, None: CROWN-IBP, interval
    bounds before all activations, with affine `forms` where few inputs vary). Layers whose
    optimisation would take more than `work` multiply-adds, or more than `memory` bytes for their
    matrices, keep default slopes.
    """

    iterations: int | None = 10
    rate: float = 0.5
    memory: int = MEMORY
    work: float = WORK
    forms: bool = True


ALPHA = Effort()
CROWN = Effort(iterations=0)
CROWN_FORMS = Effort(iterations=None)
CROWN_IBP = Effort(iterations=None, forms=False)


def relax(
    graph: Graph,
    box: Box,
    *,
    effort: Effort = ALPHA,
    rounding: float = 0.0,
    known: Mapping[int, Box] | None = None,
    settled: dict[int, Box] | None = None,
) -> Relaxation:
    """Bound all nodes of a network on a batch of boxes.

    For proofs, `graph` and `box` are float64 and `rounding` is `torch.finfo(float64).eps`. Slopes
    are optimised on a reduced network for one box, on the network itself for several. What `known`
    bounds of nodes decide needs no more bounding.
    """
    readers = graph.consumers()
    box = cornered(box, rounding)
    sizes = Magnitudes(graph, box)
    found = Relaxation(graph, {0: box}, {}, sizes.terms, rounding)
    mixed, factors = _mixed(graph), Factors(graph, box, rounding)
    forms = few_inputs(graph, box, rounding) if effort.forms else None
    reducer = None
    if effort.iterations and reducible(graph) and len(box.lower) == 1:
        reducer = Reducer(found, memory=effort.memory)
    worker = _Worker(found, effort, reducer, settled)
    for i, node in enumerate(graph.nodes[1:], start=1):
        check_time()
        inputs = [found.boxes[j] for j in node.inputs]
        bounds = interval.RULES[type(node.op)](node.op, *inputs, rounding=rounding)
        bounds = as_extremum(graph, found.boxes, i, Box(*bounds.corners))
        if rounding:
            bounds = _told(bounds)
        if known is not None and i in known:
            bounds = tighter(bounds, known[i])
        if settled is not None and i in settled:
            bounds = tighter(bounds, settled[i])
        if rounding:
            sizes.visit(i)
        if isinstance(node.op, ACTIVATIONS):
            found.lines[i] = lines(node.op, found.boxes[node.inputs[0]], rounding=rounding)
        if forms is not None:
            before = found.boxes[node.inputs[0]]
            bounds = tighter(bounds, forms.visit(i, bounds, before, found.lines.get(i)))
        if i not in found.lines:
            heard = [(j, graph.nodes[j].op) for j in readers[i]]
            heard = [(j, op) for j, op in heard if _worthwhile(found, effort, mixed[i], op)]
            reading = [op for _, op in heard]
            needs = _needed(i, bounds, heard, factors)
            # What has no rule has no better bounds than its box.
            if needs is not None and not _many(node) and not _by_intervals(node.op):
                bounds = worker.at(i, bounds, needs, reading)
                if forms is not None:
                    forms.tighten(i, bounds)
        found.boxes[i] = bounds
        if rounding:
            sizes.hold(i, bounds)
    return found


def _worthwhile(found: Relaxation, effort: Effort, mixed: int, reader: ops.Op) -> bool:
    """Return whether linear bounds of a node that `reader` reads can be tighter than intervals."""
    if isinstance(found.box, BallBox) and not found.lines:
        return mixed > 0  # intervals know nothing of the ball, with CROWN-IBP either
    # What has jumps is bounded by nothing else.
    wanted = effort.iterations is not None or isinstance(reader, JUMPS)
    return wanted and (bool(found.lines) or mixed > 1)


def _mixed(graph: Graph) -> list[int]:
    """Return how many operations up to each node mix numbers.

    Before the first activation, intervals are exact after one of them (but for inputs that meet
    again), and can be far too wide after two: the second one does not know that its inputs are
    made of the same numbers.
    """
    counts = [0]
    for node in graph.nodes[1:]:
        before = max((counts[j] for j in node.inputs), default=0)
        counts.append(before + (not isinstance(node.op, APART)))
    return counts


def best_bounds(
    relaxation: Relaxation, matrix: Tensor, *, effort: Effort = ALPHA, threshold: float = 0.0
) -> Tensor:
    """Return lower bounds of `matrix @ output` with optimised slopes, for batch size 1.

    Rows whose bound exceeds the threshold are not improved any further.
    """
    assert effort.iterations
    if reducible(relaxation.graph) and reduction_fits(relaxation, effort.memory):
        network = reduce(relaxation, matrix, matrix.new_zeros(len(matrix)), memory=effort.memory)
        return alpha_bounds(
            network, iterations=effort.iterations, rate=effort.rate, threshold=threshold
        )[0]
    return optimized_rows(relaxation, matrix, effort=effort, threshold=threshold)[0]


def optimized_rows(
    relaxation: Relaxation, matrix: Tensor, *, effort: Effort = ALPHA, threshold: float = 0.0
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return lower bounds of `matrix @ output`, for batch size 1, and the slopes behind them.

    This goes through the network itself, whatever it is made of.
    """
    assert effort.iterations
    rows = Coefficients(matrix.view(len(matrix), *relaxation.graph.output_shape), None)
    slopes = optimize_slopes(
        relaxation.rough,
        relaxation.output,
        rows.like(rows.values.float()),
        iterations=effort.iterations,
        rate=effort.rate,
        threshold=threshold,
    )
    exact = {i: t.to(matrix.dtype) for i, t in slopes.items()}
    bounds = relaxation.lower(relaxation.output, rows, slopes=exact)
    # The rows may have been rounded to float64.
    output = largest(relaxation.boxes[relaxation.output])
    return bounds - 4 * relaxation.rounding * (matrix.abs() @ output.flatten()), exact


def reduction_fits(relaxation: Relaxation, memory: int = MEMORY) -> bool:
    """Return whether the matrices of a reduced network fit into memory."""
    return reduction_bytes(relaxation) <= fitting(memory, relaxation.box.lower.device)


def reduction_bytes(relaxation: Relaxation) -> int:
    """Return what the matrices of a reduced network take, in both precisions."""
    neurons = unstable_neurons(relaxation)
    return 12 * neurons * (relaxation.box.lower[0].numel() + neurons)


def unstable_neurons(relaxation: Relaxation) -> int:
    """Count the unstable neurons of all activations whose lines are known."""
    nodes = relaxation.graph.nodes
    return sum(int(unstable(relaxation.boxes[nodes[i].inputs[0]]).sum()) for i in relaxation.lines)


def _told(bounds: Box) -> Box:
    """Return bounds that are numbers: what is none says nothing."""
    lower, upper = bounds.corners
    return Box(
        torch.where(lower.isnan(), -torch.inf, lower), torch.where(upper.isnan(), torch.inf, upper)
    )


def _needed(
    i: int, bounds: Box, readers: list[tuple[int, ops.Op]], factors: Factors
) -> Tensor | None:
    """Return which numbers of node i the nodes that read them would like to know better."""
    masks = []
    for j, op in readers:
        if isinstance(op, ops.Relu | ops.LeakyRelu):
            masks.append(unstable(bounds))
        elif tests_a_sign(op):
            masks.append((bounds.lower <= 0) & (bounds.upper >= 0) & (bounds.lower < bounds.upper))
        elif isinstance(op, PRODUCTS):
            masks.append(varies(bounds) & factors.bend(i, j))
        elif isinstance(op, (*ACTIVATIONS, *BOXED, ops.Differences)) or _by_intervals(op):
            masks.append(varies(bounds))
    if not masks:
        return None
    return torch.stack(masks).any(0)


@dataclass(frozen=True)
class _Worker:
    """Bounds nodes better than intervals do, those apart that were settled before."""

    found: Relaxation
    effort: Effort
    reducer: Reducer | None
    settled: dict[int, Box] | None

    def at(self, i: int, bounds: Box, needs: Tensor, readers: list[ops.Op]) -> Box:
        """Return better bounds of a node, whose neurons its readers would like to know."""
        # ReLUs need no more than a sign.
        signs = all(isinstance(op, ops.Relu | ops.LeakyRelu) or tests_a_sign(op) for op in readers)
        work = _Tightening(self.found, i, self.effort, self.reducer, signs)
        if self.settled is None or i not in self.settled or work.optimised(needs):
            bounds = work.of(bounds, needs)
        alone = len(self.found.box.lower) == 1
        if self.effort.iterations and alone and any(map(tests_a_sign, readers)):
            bounds = _refined(self.found, i, self.effort, bounds)
        if self.settled is not None and self.effort.iterations is not None:
            self.settled[i] = bounds
        return bounds


def _refined(found: Relaxation, i: int, effort: Effort, bounds: Box) -> Box:
    """Find out more about signs that are tested."""
    left = (bounds.lower <= 0) & (bounds.upper >= 0) & (bounds.lower < bounds.upper)
    assert effort.iterations
    if not left.any() or not found.lines:
        return bounds
    own = replace(found)  # what it computes from the bounds changes with them
    return Refining(own, i, effort.iterations).of(bounds, left)


def _open_sign(bounds: Box) -> Tensor:
    """Return where zero lies between the bounds."""
    return (bounds.lower <= 0) & (bounds.upper >= 0)


def _many(node: Node) -> bool:
    """Return whether there are so many differences that those of bounds have to do."""
    return isinstance(node.op, ops.Differences) and math.prod(node.shape) > DIFFERENCES


def _by_intervals(op: ops.Op) -> bool:
    return RULES[type(op)] is by_intervals


@dataclass(frozen=True)
class _Tightening:
    """Linear bounds on some neurons of one node."""

    found: Relaxation
    target: int
    effort: Effort
    reducer: Reducer | None
    signs: bool  # whether nobody needs more than a sign

    def of(self, bounds: Box, needs: Tensor) -> Box:
        """Intersect interval bounds with linear ones where they are needed.

        A sign that linear bounds over the last few layers show need not be looked for any further.
        """
        passed = sorted((i for i in self.found.lines if i < self.target), reverse=True)
        for depth in SHORT if self.signs else ():
            if len(passed) > depth + FURTHER and needs.any():
                bounds, needs = self._by_the_last(passed[depth], bounds, needs)
        return self._within(0, bounds, needs)

    def _by_the_last(self, stop: int, bounds: Box, needs: Tensor) -> tuple[Box, Tensor]:
        """Bound numbers over what lies behind the node at `stop`; return what is needed still.

        A few of them say first whether that decides enough.
        """
        order = flat(needs).cumsum(1).view_as(needs)
        tried = needs & (order % TRIED == 1)
        bounds = self._within(stop, bounds, tried)
        left = needs & _open_sign(bounds)
        if int((left & tried).sum()) > UNDECIDED * int(tried.sum()):
            return bounds, left
        bounds = self._within(stop, bounds, left & ~tried)
        return bounds, needs & _open_sign(bounds)

    def _within(self, stop: int, bounds: Box, needs: Tensor) -> Box:
        lower, upper = (t.clone(memory_format=torch.contiguous_format) for t in bounds.corners)
        for sign, side in ((1.0, lower), (-1.0, upper)):
            if not needs.any():
                break
            owner, place = flat(needs).nonzero(as_tuple=True)
            rows = flat(side)  # the same memory
            held = rows[owner, place]
            new = sign * self._lower_bounds(sign, owner, place, stop)
            # A bound that is not a number is no bound.
            new = torch.where(torch.isfinite(new), new, held)
            rows[owner, place] = torch.maximum(held, new) if sign > 0 else torch.minimum(held, new)
            if self.signs:
                needs = needs & (lower < 0)
        return Box(lower, torch.maximum(lower, upper))

    def _lower_bounds(self, sign: float, owner: Tensor, place: Tensor, stop: int) -> Tensor:
        """Return lower bounds of neurons (or of minus them)."""
        if not stop and self.reducer is not None and self._affordable(len(place)):
            self.reducer.catch_up()
            rows = self.reducer.pull_units(self.target, place)
            network = self.reducer.network(rows if sign > 0 else -rows)
            assert self.effort.iterations
            return alpha_bounds(network, iterations=self.effort.iterations, rate=self.effort.rate)[
                0
            ]
        batch = len(self.found.box.lower)
        if not stop and batch > 1 and worthwhile(self.found, self.target, len(place), self.effort):
            return optimized_units(self.found, self.target, place, owner, self.effort, sign=sign)
        mine = None if batch == 1 else owner
        shape, like = self.found.graph.nodes[self.target].shape, self.found.box.lower
        parts = []
        for part in self._chunks(place):
            owners = None if mine is None else mine[part]
            units = unit_rows(shape, place[part], owners, like, windows=True)
            signed = units.like(units.values * sign)
            parts.append(self.found.lower(self.target, signed, stop=stop))
        return torch.cat(parts)

    def optimised(self, needs: Tensor) -> bool:
        """Whether these neurons are bounded with slopes of their own."""
        return self.reducer is not None and self._affordable(int(needs.sum()))

    def _affordable(self, rows: int) -> bool:
        """Whether slopes of that many rows can be optimised on the reduced network."""
        neurons = unstable_neurons(self.found)
        box = self.found.box.lower
        inputs = box[0].numel()
        assert self.effort.iterations
        work = rows * neurons * (inputs + neurons / 2) * 2 * self.effort.iterations
        matrices = 12 * (rows + neurons) * (inputs + neurons)
        return work <= self.effort.work and matrices <= fitting(self.effort.memory, box.device)

    def _chunks(self, place: Tensor) -> Iterator[slice]:
        """Split rows so that the coefficients of each part fit into memory."""
        few = len(place) <= self.found.rows_at_once(self.target, min(CACHED, self.effort.memory))
        size = max(1, len(place)) if few else self._rows_at_once
        for start in range(0, len(place), size):
            yield slice(start, start + size)

    @cached_property
    def _rows_at_once(self) -> int:
        """How many rows fit into memory: what windows grow to is seen of one of them."""
        found, like = self.found, self.found.box.lower
        shape = found.graph.nodes[self.target].shape
        if len(shape) != 3:
            return found.rows_at_once(self.target, self.effort.memory)
        first = torch.zeros(1, dtype=torch.long, device=like.device)
        owner = None if len(like) == 1 else first
        form = found.pull(self.target, unit_rows(shape, first, owner, like, windows=True))
        memory = fitting(self.effort.memory, like.device)
        if isinstance(form.coefficients, Windows):
            memory = min(memory, CACHED)
        return rows_at_once(memory, COPIES * form.largest * like.element_size(), form.work)
