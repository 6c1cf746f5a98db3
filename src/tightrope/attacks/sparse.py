"""Margins of a classifier `convolution, ReLU, linear`, reduced to what can change in the box.

Inside a latent box most ReLUs are always active or always inactive, and many coordinates have no
width. What remains is a sparse matrix per sample, from the coordinates that move to the ReLUs
that can switch; the active ReLUs add a constant slope. All estimators of a sample share the
matrix, so one product of a sparse and a dense matrix evaluates all of them.

Points are kept as [coordinates of all samples, estimators].
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.attacks.pgd import Search, Steps, View, climb
from tightrope.box import Box
from tightrope.graph import Graph, evaluate, ops
from tightrope.graph.dense import LARGEST_MATRIX, convolution_matrix

# The full convolution is faster when a larger share of its weights than this can matter.
LARGEST_SHARE = 0.15


def convolution_pair(classifier: Graph) -> tuple[ops.Conv2d, ops.Linear] | None:
    """Return the layers of a classifier `convolution, ReLU, flatten, linear`, if it is one."""
    kinds = [type(node.op) for node in classifier.nodes[1:]]
    if kinds not in (
        [ops.Conv2d, ops.Relu, ops.Reshape, ops.Linear],
        [ops.Conv2d, ops.Reshape, ops.Relu, ops.Linear],
    ):
        return None
    first, last = classifier.nodes[1].op, classifier.nodes[-1].op
    assert isinstance(first, ops.Conv2d) and isinstance(last, ops.Linear)
    flat = len(classifier.nodes[-2].shape) == 1
    square = first.weight.shape[2] == first.weight.shape[3] and len({*first.stride}) == 1
    plain = first.groups == 1 and first.dilation == (1, 1) and len({*first.padding}) == 1
    return (first, last) if flat and square and plain else None


def is_sparse(layer: ops.Conv2d, box: Box) -> bool:
    """Return whether so little can change in the boxes that the reduction pays."""
    moves = (box.upper > box.lower).float().mean()
    switching = _stability(layer, box)[1].float().mean()
    return bool(moves * switching < LARGEST_SHARE)


@dataclass(frozen=True)
class SparseMargins:
    """The landscape `o_i - o_y` for all wrong classes i, over the coordinates that move."""

    forward: Tensor  # sparse: ReLUs that can switch x coordinates
    backward: Tensor  # its transpose
    base: Tensor  # what the coordinates without width add to the ReLUs
    outer: Tensor  # weight of each such ReLU in each margin
    slope: Tensor  # gradient that the always active ReLUs add
    offset: Tensor  # what they add to the margins: [samples, estimators]
    of_coordinates: Tensor  # sparse: sums over each sample's coordinates
    of_relus: Tensor  # sparse: sums over each sample's ReLUs

    def look(self, points: Tensor, *, gradient: bool = True) -> View:
        """Evaluate the points."""
        hidden = torch.addmm(self.base, self.forward, points)
        weight = self.outer * (hidden > 0)
        slope = torch.addmm(self.slope, self.backward, weight)
        # On its own piece a piecewise linear function is its gradient times the point.
        scores = self.of_coordinates @ (slope * points)
        scores += self.of_relus @ (weight * self.base)
        scores += self.offset
        return View(scores, scores > 0, slope)

    def select(self, index: Tensor) -> SparseMargins:
        """Samples stay together here."""
        raise NotImplementedError


class _JointSearch(Search):
    """The best point of each estimator of each sample, in the layout of this module."""

    def __init__(self, best: Tensor, sample: Tensor, scores: Tensor) -> None:
        self.best, self.score, self.sample = best, scores, sample
        self.stop, self.settle = False, None

    def record(self, points: Tensor, view: View) -> None:
        """Take note of `points`."""
        better = view.scores > self.score
        torch.maximum(self.score, view.scores, out=self.score)
        if better.all():
            self.best.copy_(points)
        else:
            torch.where(better.index_select(0, self.sample), points, self.best, out=self.best)


def attack_reduced(
    first: ops.Conv2d,
    last: ops.Linear,
    box: Box,
    labels: Tensor,
    targets: Tensor,
    *,
    steps: Steps,
    restarts: int,
    start: Tensor | None,
    memory: int,
) -> Tensor:
    """Return the best points as `attack_margins` does, searching moving coordinates only."""
    lower, upper = (t.permute(0, 2, 3, 1) for t in box.corners)  # channels last
    estimators = targets.shape[1]
    result = lower.unsqueeze(-1).repeat(1, 1, 1, 1, estimators)
    moves = upper > lower
    counts = moves.flatten(1).sum(1)
    begins = [0, *counts.cumsum(0).tolist()]
    places = _places(moves)
    # One column per estimator: the steps are several times faster without broadcasting.
    inside = Box(*(_chosen(t.unsqueeze(-1), places).repeat(1, estimators) for t in (lower, upper)))
    per_sample = 64 * lower[0].numel() * lower.element_size() * estimators // 9
    size = max(1, memory // per_sample)
    fresh = [inside.sample() for _ in range(restarts)]
    if start is not None:
        fresh[0] = inside.project(_chosen(start.permute(0, 3, 4, 2, 1), places))
    best = torch.empty_like(fresh[0])
    for begin in range(0, len(labels), size):
        piece = slice(begin, min(begin + size, len(labels)))
        rows = slice(begins[piece.start], begins[piece.stop])
        landscape = reduce_margins(first, last, box[piece], labels[piece], targets[piece])
        sample = torch.arange(piece.stop - begin, device=labels.device)
        sample = sample.repeat_interleave(counts[piece])
        scores = best.new_full((piece.stop - begin, estimators), -torch.inf)
        search = _JointSearch(best[rows], sample, scores)
        for points in fresh:
            climb(landscape, inside[rows], points[rows], steps, search)
    result.view(-1, estimators).index_copy_(0, places.long(), best)
    # One copy into the order that the layers use: mixing orders is slow ever after.
    return result.permute(0, 4, 1, 2, 3).contiguous().permute(0, 1, 4, 2, 3)


def reduce_margins(
    first: ops.Conv2d, last: ops.Linear, box: Box, labels: Tensor, targets: Tensor
) -> SparseMargins:
    """Build the landscape of some samples' latent boxes."""
    moves = box.upper > box.lower
    fixed = evaluate.RULES[ops.Conv2d](first, torch.where(moves, 0.0, box.lower))
    active, switching = _stability(first, box)

    rows = last.weight.view(-1, *fixed.shape[1:])
    margins = rows[targets] - rows[labels].unsqueeze(1)  # [samples, estimators, O, P, Q]
    constant = (margins * active.unsqueeze(1)).contiguous()
    offset = (constant * fixed.unsqueeze(1)).flatten(2).sum(2)
    if last.bias is not None:
        offset = offset + last.bias[targets] - last.bias[labels].unsqueeze(1)
    slope = _transposed(first, constant.flatten(0, 1), moves.shape[1:])
    slope = slope.unflatten(0, constant.shape[:2])
    moves, switching = moves.permute(0, 2, 3, 1), switching.permute(0, 2, 3, 1)
    forward, backward = _matrices(first, moves, switching)
    outputs = _places(switching)
    return SparseMargins(
        forward,
        backward,
        _chosen(fixed.permute(0, 2, 3, 1).unsqueeze(-1), outputs).repeat(1, targets.shape[1]),
        _chosen(margins.permute(0, 3, 4, 2, 1), outputs),
        _chosen(slope.permute(0, 3, 4, 2, 1), _places(moves)),
        offset,
        _sums(moves, offset.dtype),
        _sums(switching, offset.dtype),
    )


def _stability(layer: ops.Conv2d, box: Box) -> tuple[Tensor, Tensor]:
    """Return which ReLUs behind the layer are always active, and which can switch."""
    convolve = evaluate.RULES[ops.Conv2d]
    center, radius = box.middle
    magnitude = replace(layer, weight=layer.weight.abs(), bias=None)
    middle, spread = convolve(layer, center), convolve(magnitude, radius)
    return middle - spread >= 0, middle.abs() < spread


def _transposed(layer: ops.Conv2d, outputs: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient with respect to the layer's inputs."""
    if outputs[0].numel() * shape.numel() <= LARGEST_MATRIX:
        matrix, _ = convolution_matrix(layer, shape)
        return (outputs.flatten(1) @ matrix).unflatten(1, shape)
    outputs = outputs.contiguous(memory_format=torch.channels_last)
    # What the strides leave over at the end belongs to the input, too.
    rest = [
        size - ((count - 1) * stride - 2 * padding + kernel)
        for size, count, stride, padding, kernel in zip(
            shape[1:],
            outputs.shape[2:],
            layer.stride,
            layer.padding,
            layer.weight.shape[2:],
            strict=True,
        )
    ]
    return F.conv_transpose2d(outputs, layer.weight, None, layer.stride, layer.padding, rest)


def _places(mask: Tensor) -> Tensor:
    """Return the numbers of the marked places; 32 bits, by which taking is much faster."""
    return mask.flatten().nonzero()[:, 0].to(torch.int32)


def _chosen(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows `values[..., :]` at the places."""
    return values.reshape(-1, values.shape[-1]).index_select(0, places)


def _matrices(layer: ops.Conv2d, moves: Tensor, switching: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer as a sparse matrix between masked outputs and inputs, and its transpose.

    Both masks are channels last. All outputs of a window share its list of moving inputs, and
    all inputs at a pixel share the list of switching outputs above it: the lists are made once
    per window and pixel, then repeated for every row that uses them.
    """
    kernel, stride, padding = layer.weight.shape[2], layer.stride[0], layer.padding[0]
    columns = F.pad(_numbers(moves), (0, 0, padding, padding, padding, padding), value=-1)
    windows = columns.unfold(1, kernel, stride).unfold(2, kernel, stride)
    windows = windows.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(0, 2)  # taps (dy, dx, channel)
    taps = layer.weight.permute(0, 2, 3, 1).flatten(1)
    size = (int(switching.sum()), int(moves.sum()))
    forward = _repeat_lists(windows, switching.flatten(0, 2), taps, None, size)

    above, weights, phase = _windows_above(layer, _numbers(switching), moves.shape[1:3])
    transposed = _repeat_lists(above, moves.flatten(0, 2), weights, phase, size[::-1])
    return forward, transposed


def _windows_above(
    layer: ops.Conv2d, rows: Tensor, size: torch.Size
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of the outputs above each input pixel, and where their weights are.

    In a stride of s, pixel y (counted with the padding) lies in the windows `y // s - a`, at the
    taps `y % s + a s`. The numbers are [pixels, (a, b, output)]; the weights are [channel,
    (phase, a, b, output)], of which a pixel uses the part that begins at its third result.
    """
    kernel, stride, padding = layer.weight.shape[2], layer.stride[0], layer.padding[0]
    depth = -(-kernel // stride)
    spans = [
        _windows_of_pixels(n, m, stride, padding, depth, rows.device)
        for n, m in zip(size, rows.shape[1:3], strict=True)
    ]
    (first, valid_y, phase_y), (second, valid_x, phase_x) = spans
    found = rows[:, first][:, :, :, second]  # [samples, height, a, width, b, output]
    found = found.masked_fill_(~(valid_y[:, :, None, None] & valid_x)[..., None], -1)
    found = found.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(0, 2)

    missing = depth * stride - kernel
    weight = F.pad(layer.weight, (0, missing, 0, missing))
    weight = weight.unflatten(3, (depth, stride)).unflatten(2, (depth, stride))
    weight = weight.permute(1, 3, 5, 2, 4, 0).flatten(1)  # [channel, (phases, a, b, output)]
    phase = (phase_y[:, None] * stride + phase_x).flatten() * found.shape[1]
    return found, weight, phase.repeat(len(rows))


def _windows_of_pixels(
    pixels: int, windows: int, stride: int, padding: int, depth: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, along one axis, the windows of each pixel, which of them exist, and its phase."""
    pixel = torch.arange(pixels, device=device) + padding
    index = pixel[:, None] // stride - torch.arange(depth, device=device)
    valid = (index >= 0) & (index < windows)
    return index.clamp(0, windows - 1), valid, pixel % stride


def _numbers(mask: Tensor) -> Tensor:
    """Number the marked places in order, -1 elsewhere."""
    order = mask.flatten().cumsum(0, dtype=torch.int32).view(mask.shape) - 1
    return order.masked_fill_(~mask, -1)


def _repeat_lists(
    lists: Tensor, users: Tensor, weights: Tensor, begin: Tensor | None, size: tuple[int, int]
) -> Tensor:
    """Make a sparse matrix whose rows repeat the lists of their groups.

    `lists` are column numbers or -1 per group; `users` says which rows of each group exist. The
    value is `weights[kind of row, begin of the group + place in the list]`.
    """
    group, kind = users.nonzero(as_tuple=True)
    wanted = lists >= 0
    lengths = wanted.sum(1)
    entries = wanted.flatten().nonzero()[:, 0]
    columns = lists.flatten().index_select(0, entries)
    places = (entries % lists.shape[1]).to(torch.int32)
    counts = lengths[group]
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    begins = ((lengths.cumsum(0) - lengths)[group] - (ends - counts)).to(torch.int32)
    corner = (kind * weights.shape[1] + (0 if begin is None else begin[group])).to(torch.int32)
    row = torch.arange(len(group), dtype=torch.int32, device=lists.device)
    row = row.repeat_interleave(counts, output_size=total)
    source = torch.arange(total, dtype=torch.int32, device=lists.device)
    source += begins.index_select(0, row)
    weight = corner.index_select(0, row).add_(places.index_select(0, source))
    values = weights.flatten().index_select(0, weight)
    return _sparse(F.pad(ends, (1, 0)), columns.index_select(0, source), values, size)


def _sums(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sparse matrix that sums the marked places of each sample."""
    ends = F.pad(mask.flatten(1).sum(1).cumsum(0), (1, 0))
    total = int(ends[-1])
    columns = torch.arange(total, device=mask.device)
    return _sparse(
        ends, columns, torch.ones(total, dtype=dtype, device=mask.device), (len(mask), total)
    )


def _sparse(ends: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "beta state"
        return torch.sparse_csr_tensor(
            ends.to(torch.int32),
            columns.to(torch.int32),
            values,
            size=size,
            check_invariants=False,
        )
