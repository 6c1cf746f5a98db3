"""Linear bounds of a whole batch, differentiable in the network's parameters: for training.

Every sample has the same number of rows. Lines of activations are those of plain CROWN and follow
from bounds that are differentiable themselves, so gradients flow through slopes and intercepts into
the bounds before. Plain floating-point arithmetic: nothing here reaches a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tightrope.box import Box
from tightrope.devices import launches
from tightrope.domains import interval
from tightrope.domains.linear.batch_kernel import least, least_gradient, pull, pull_gradient
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.relaxations import Lines, kinked, lines
from tightrope.domains.linear.rules import ACTIVATIONS, BOXED, Pass, by_intervals, pull_activation
from tightrope.domains.linear.rules import RULES as LINEAR
from tightrope.graph import Graph, ops

SMALL = 1 << 16  # numbers that one thread is fast enough for
FEW = 4  # channels
KEPT = 3  # tensors of a row's coefficients that each activation keeps for the gradient


@dataclass(frozen=True)
class SampleRows(Coefficients):
    """Coefficients of `each` rows for every sample, sample by sample: [batch * each, *shape]."""

    each: int = 1

    def take(self, field: Tensor, *, outside: float = 0.0) -> Tensor:
        """Return a quantity held per sample as each row sees it."""
        if self.each == 1 or len(field) == 1:
            return field
        return field.repeat_interleave(self.each, 0)

    def dot(self, field: Tensor) -> Tensor:
        """Return the sum over the neurons of coefficients times a field, one per row."""
        shape = self.values.shape[1:]
        if len(field) == 1:
            return lanes(self.values) @ lanes(field.expand(1, *shape)).flatten()
        rows = lanes(self.values).unflatten(0, (-1, self.each))
        return torch.bmm(rows, lanes(field.expand(-1, *shape)).unsqueeze(2)).flatten()

    def plus(self, other: Coefficients) -> Coefficients:
        """Add the coefficients that reach the same node on another path."""
        return self.like(self.values + other.values)

    def through(self, op: ops.Conv2d, shape: tuple[int, ...]) -> Coefficients:
        """Return the coefficients before a convolution of inputs of that shape."""
        strided = op.stride[0] == op.stride[1] > 1 and op.dilation == (1, 1) and op.groups == 1
        if strided and op.weight.shape[1] <= FEW:
            return self.like(shuffled(self.values, op, shape))
        return super().through(op, shape)


def shuffled(values: Tensor, op: ops.Conv2d, shape: tuple[int, ...]) -> Tensor:
    """Return a transposed convolution as a convolution whose channels are pixels, rearranged.

    Library kernels are slow where few channels come out. With stride s, output `s q + r` of a side
    is the sum of inputs q - j times weights s j + r, one convolution for each of the s x s
    remainders r; for this the padding has to be a multiple of s, and zeros before the weights
    make it one.
    """
    s = op.stride[0]
    skips = [-(-padding // s) for padding in op.padding]  # multiples of s that are cut off
    lead = [skip * s - padding for skip, padding in zip(skips, op.padding, strict=True)]
    sizes = [k + e for k, e in zip(op.weight.shape[2:], lead, strict=True)]
    taps = [-(-size // s) for size in sizes]
    ends = [tap * s - size for tap, size in zip(taps, sizes, strict=True)]
    weight = F.pad(op.weight, (lead[1], ends[1], lead[0], ends[0]))
    weight = weight.unflatten(3, (taps[1], s)).unflatten(2, (taps[0], s))  # [out, in, j, r, j, r]
    kernel = weight.permute(1, 3, 5, 0, 2, 4).flip(4, 5).flatten(0, 2)
    before = [tap - 1 - skip for tap, skip in zip(taps, skips, strict=True)]
    # As many as there are inputs, also those that no window reaches.
    after = [
        -(-size // s) - count + skip
        for size, count, skip in zip(shape[1:], values.shape[2:], skips, strict=True)
    ]
    padding = tuple(before)
    if before != after or min(before) < 0:
        values, padding = F.pad(values, (before[1], after[1], before[0], after[0])), (0, 0)
    whole = F.pixel_shuffle(F.conv2d(values, kernel, None, 1, padding), s)
    if whole.shape[1:] == shape:
        return whole
    return whole[:, :, : shape[1], : shape[2]]


def lanes(t: Tensor) -> Tensor:
    """Return [batch, numbers], in the order of memory where channels come last."""
    if t.dim() == 4:
        return t.permute(0, 2, 3, 1).contiguous().flatten(1)
    return t.contiguous().flatten(1)


def from_lanes(values: Tensor, shape: torch.Size) -> Tensor:
    """Undo `lanes`."""
    if len(shape) == 4:
        return values.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    return values.view(shape)


@dataclass(frozen=True)
class Bender:
    """Pulls coefficients through the lines of activations, ReLUs in closed form.

    `biases` are those of the layers before ReLUs, by the ReLU's position: they are added in the
    same pass, and the layers themselves have none.
    """

    biases: Mapping[int, Tensor]

    def __call__(self, op: ops.Op, a: Coefficients, i: int, state: Pass) -> Coefficients:
        """Return the coefficients before activation i."""
        assert isinstance(a, SampleRows)
        if not kinked(op):
            return pull_activation(op, a, i, state)
        low, high = (lanes(t) for t in state.boxes[state.graph.nodes[i].inputs[0]].corners)
        left = op.slope if isinstance(op, ops.LeakyRelu) else 0.0
        bias = self.biases.get(i)
        if bias is None:
            bias = low.new_zeros(low.shape[1])
        rows = lanes(a.values).unflatten(0, (-1, a.each))
        if is_compiled(rows):
            values, constant = _Bend.apply(rows, low, high, bias, left)
        else:
            values, constant = bent(rows, lines(op, Box(low, high)), bias)
        state.add_number(constant.flatten())
        return a.like(from_lanes(values.flatten(0, 1), a.values.shape))


def without_biases(graph: Graph, target: int) -> tuple[Graph, dict[int, Tensor]]:
    """Return the graph without the biases of layers that only a ReLU reads, and these.

    Rows of the target meet the ReLUs up to it only.
    """
    readers = graph.consumers()
    plain: dict[int, ops.Op] = {}
    biases: dict[int, Tensor] = {}
    for i, node in enumerate(graph.nodes[: target + 1]):
        before = node.inputs[0] if kinked(node.op) else 0
        op, shape = graph.nodes[before].op, graph.nodes[before].shape
        if not isinstance(op, ops.Linear | ops.Conv2d) or len(readers[before]) != 1:
            continue
        if op.bias is not None:
            per_channel = (-1, *(1 for _ in shape[1:])) if isinstance(op, ops.Conv2d) else (-1,)
            biases[i] = lanes(op.bias.view(per_channel).expand(1, *shape)).flatten()
            plain[before] = replace(op, bias=None)
    return graph.replace_ops(plain), biases


def is_compiled(rows: Tensor) -> bool:
    """Return whether there are compiled loops for such rows."""
    return not launches(rows) and rows.dtype in (torch.float32, torch.float64)


def bent(rows: Tensor, line: Lines, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows, [batch, rows, neurons], before ReLUs, and what they add to the bound.

    The same as the compiled loops, for other devices and dtypes.
    """
    below, above, intercept = (
        t.unsqueeze(1) for t in (line.lower_slope, line.upper_slope, line.upper_intercept)
    )
    negative = rows.clamp(max=0)
    values = (rows - negative) * below + negative * above
    return values, (negative * intercept).sum(2) + values @ bias


class _Bend(torch.autograd.Function):
    """`out = max(a, 0) s_lower + min(a, 0) s_upper` and `min(a, 0) . t + out . bias`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, low: Tensor, high: Tensor, bias: Tensor, left: float) -> Any:
        ctx.save_for_backward(a, low, high, bias)
        ctx.left = left
        found = torch.empty_like(a), a.new_empty(a.shape[:2])
        fixed = bias.detach().numpy()
        _in_parts(lambda part: pull(*part(a, low, high), fixed, left, part(*found)), a)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, low, high, bias = ctx.saved_tensors
        found = (torch.empty_like(a), *(torch.empty_like(low) for _ in range(3)))
        given, fixed = tuple(g.contiguous() for g in grads), bias.detach().numpy()
        _in_parts(
            lambda part: pull_gradient(
                *part(a, low, high), fixed, ctx.left, part(*given), part(*found)
            ),
            a,
        )
        return *found[:3], found[3].sum(0), None


class _Least(torch.autograd.Function):
    """`a . center - |a| . radius` of rows on boxes of inputs, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, center: Tensor, radius: Tensor) -> Tensor:
        ctx.save_for_backward(a, center, radius)
        found = a.new_empty(a.shape[:2])
        _in_parts(lambda part: least(*part(a, center, radius, found)), a)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, center, radius = ctx.saved_tensors
        given, found = grads[0].contiguous(), torch.empty_like(a)
        _in_parts(lambda part: least_gradient(*part(a, center, radius, given, found)), a)
        return found, None, None


def _in_parts(work: Callable[[Callable[..., tuple[Any, ...]]], None], a: Tensor) -> None:
    """Call `work` with parts of a batch, on as many threads as torch has."""
    count = len(a)
    threads = min(torch.get_num_threads(), count) if a.numel() > SMALL else 1

    def part(k: int) -> Callable[..., tuple[Any, ...]]:
        where = slice(count * k // threads, count * (k + 1) // threads)
        return lambda *tensors: tuple(t.detach()[where].numpy() for t in tensors)

    if threads == 1:
        work(part(0))
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda k: work(part(k)), range(threads)))


def read_by_activations(graph: Graph) -> set[int]:
    """Return the positions whose bounds linear bounds need."""
    nodes = graph.nodes
    needed = {0}
    for i, node in enumerate(nodes):
        if isinstance(node.op, (*ACTIVATIONS, *BOXED)):
            needed.update(node.inputs)
        if isinstance(node.op, ops.Function) or LINEAR.get(type(node.op)) is by_intervals:
            needed.update((i, *node.inputs))
    return needed


def relaxed_by_intervals(graph: Graph, box: Box, known: Mapping[int, Box]) -> Relaxation:
    """Return the relaxation that follows from interval bounds: CROWN-IBP's."""
    return _relaxed(graph, {**known, 0: Box(*box.corners)}, len(graph.nodes))


def relaxed_by_lines(graph: Graph, box: Box) -> Relaxation:
    """Return the relaxation whose bounds are linear ones, too: CROWN's, for small networks."""
    boxes: dict[int, Box] = {0: Box(*box.corners)}
    needed = read_by_activations(graph)
    for i, node in enumerate(graph.nodes[1:], start=1):
        inputs = [boxes[j] for j in node.inputs]
        boxes[i] = Box(*interval.RULES[type(node.op)](node.op, *inputs, rounding=0.0).corners)
        if i in needed and not isinstance(node.op, ACTIVATIONS):
            boxes[i] = _tightened(_relaxed(graph, boxes, i), i, boxes[i])
    return _relaxed(graph, boxes, len(graph.nodes))


def _relaxed(graph: Graph, boxes: Mapping[int, Box], end: int) -> Relaxation:
    """Return what is known of the nodes before `end`; lines of ReLUs are found when needed."""
    curved = {
        i: lines(node.op, boxes[node.inputs[0]])
        for i, node in enumerate(graph.nodes[:end])
        if isinstance(node.op, ACTIVATIONS) and not kinked(node.op)
    }
    return Relaxation(graph, dict(boxes), curved, {}, 0.0)


def _tightened(before: Relaxation, target: int, bounds: Box) -> Box:
    """Intersect bounds of a node with linear ones of each of its numbers."""
    if not any(isinstance(node.op, ACTIVATIONS) for node in before.graph.nodes[:target]):
        return bounds  # intervals are exact, or nearly so
    shape, batch = before.graph.nodes[target].shape, len(bounds.lower)
    size = math.prod(shape)
    unit = torch.eye(size, dtype=bounds.lower.dtype, device=bounds.lower.device)
    rows = torch.cat((unit, -unit)).view(1, 2 * size, *shape).expand(batch, -1, *shape)
    low, high = lower_bounds(before, target, rows).unflatten(1, (2, size)).unbind(1)
    lower = torch.maximum(bounds.lower, low.unflatten(1, shape))
    return Box(lower, torch.maximum(lower, torch.minimum(bounds.upper, -high.unflatten(1, shape))))


def lower_bounds(
    relaxation: Relaxation, target: int, rows: Tensor, *, memory: float = math.inf
) -> Tensor:
    """Return lower bounds of linear functions of a node: [batch, rows] of [batch, rows, *shape].

    Where all samples at once would keep more than `memory` bytes for the gradient, some of them go
    at a time and are computed again when the gradient asks for them.
    """
    batch = len(rows)
    each = bytes_kept(relaxation.graph, target, rows)
    at_once = batch if each * batch <= memory else max(1, int(memory // each))
    if at_once >= batch:
        return _pulled(relaxation, target, rows)
    parts = []
    for start in range(0, batch, at_once):
        part = slice(start, start + at_once)
        piece = Relaxation(
            relaxation.graph,
            {i: box[part] for i, box in relaxation.boxes.items()},
            {i: type(line)(*(t[part] for t in line)) for i, line in relaxation.lines.items()},
            {},
            0.0,
        )
        parts.append(checkpoint(_pulled, piece, target, rows[part], use_reentrant=False))
    return torch.cat(parts)


def bytes_kept(graph: Graph, target: int, rows: Tensor) -> int:
    """Return about how many bytes a sample's rows keep for the gradient."""
    numbers = sum(math.prod(node.shape) for node in graph.nodes[:target])
    return KEPT * rows.shape[1] * numbers * rows.element_size()


def _pulled(relaxation: Relaxation, target: int, rows: Tensor) -> Tensor:
    batch, each = rows.shape[:2]
    start = SampleRows(rows.flatten(0, 1), None, each)
    graph, biases = without_biases(relaxation.graph, target)
    form = replace(relaxation, graph=graph).pull(target, start, activation=Bender(biases))
    rows, box = form.coefficients.values, relaxation.box
    if is_compiled(rows) and not box.center.requires_grad:
        center, radius = (lanes(t) for t in box.middle)
        lowest = _Least.apply(lanes(rows).unflatten(0, (-1, each)), center, radius)
        return form.constant.view(batch, each) + lowest
    # Where nothing depends on the input, the form's coefficients are of another kind.
    return replace(form, coefficients=start.like(rows)).minimum(box).view(batch, each)
