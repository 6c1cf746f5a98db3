"""Random networks, boxes and points for property tests.

`networks()` draws an `nn.Module` made of any operations that Tightrope knows, `boxes()` a
batch of boxes of every size, `points_in()` a batch of points that likes corners. What a
network looks like (its layers, their options, how they are wired) is drawn by hypothesis and
shrinks; the numbers inside come from a drawn seed, which keeps examples fast. `rounding_errors`
says how far two ways of computing the same value may be apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set

import network_moves
import smooth_moves
import torch
from hypothesis import strategies as st
from network_programs import IMAGE_ONLY, MOVES, WEIGHTS, Draw, Program, Shape, Writer, generator_of
from torch import Tensor

from tightrope.box import Box
from tightrope.graph import Graph, ops
from tightrope.graph.evaluate import RULES as POINT_RULES
from tightrope.graph.evaluate import batchnorm_map


@st.composite
def networks(
    draw: Draw,
    *,
    containing: type[ops.Op] | None = None,
    allowed: Set[type[ops.Op]] = frozenset(ops.ALL_OPS) - {ops.Input},
    classes: int | None = None,
    longest: int = 7,
) -> Program:
    """Draw a network in evaluation mode with float64 weights.

    `containing` is an operation that occurs in it for sure, `allowed` all that may be asked for.
    (Reshapes and linear layers always occur: they make the others fit. And some layers are made
    of two operations: `1 - x` is a scale and a shift.) With `classes` the network ends in a
    linear layer with so many outputs, otherwise in anything of one dimension.
    """
    kinds = [op for op in MOVES for _ in range(WEIGHTS.get(op, 1)) if op in allowed]
    plan = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=longest))
    if containing is not None:
        plan.insert(draw(st.integers(0, len(plan))), containing)
    image = containing in IMAGE_ONLY or draw(st.booleans())
    sizes = st.tuples(st.integers(1, 3), st.integers(2, 5), st.integers(2, 5))
    input_shape = draw(sizes) if image else (draw(st.integers(1, 6)),)
    writer = Writer(draw, input_shape, allowed)
    for kind in plan:
        if kind in IMAGE_ONLY and len(writer.shape) != 3:
            writer.to_image()
        MOVES[kind](writer)
        writer.keep_small()
    writer.flatten()
    if classes is not None:
        writer.linear(classes)
    return writer.program.eval()


@st.composite
def boxes(draw: Draw, shape: Shape, *, batch: int = 2, dtype: torch.dtype = torch.float64) -> Box:
    """Draw `batch` boxes: points, slivers, ordinary and huge ones, also far from the origin."""
    generator = generator_of(draw)

    def normal() -> Tensor:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    kind = draw(
        st.sampled_from(["clipped", "point", "partly flat", "tiny", "normal", "huge", "far"])
    )
    if kind == "clipped":
        radius = draw(st.sampled_from([0.0, 1e-8, 2 / 255, 0.3, 1.0]))
        x = torch.rand(batch, *shape, generator=generator, dtype=torch.float64)
        return Box.ball(x.to(dtype), radius)
    center, radius = normal(), normal().abs()
    if kind == "point":
        radius = torch.zeros_like(radius)
    elif kind == "partly flat":
        radius = radius * (normal() > 0)
    elif kind == "tiny":
        radius = radius * draw(st.sampled_from([1e-4, 1e-7, 1e-12]))
    elif kind == "huge":
        center, radius = center * 1e6, radius * 1e6
    elif kind == "far":
        center = center * 1e6
    # Conversion to float32 is monotone, so lower stays below upper.
    return Box((center - radius).to(dtype), (center + radius).to(dtype))


def points_in(box: Box, count: int, *, seed: int = 0) -> Tensor:
    """Return `count` points of each box, [count * batch, ...], box after box within a round.

    The first two rounds are the extreme corners; then random corners and points drawn from
    Beta(1/2, 1/2), which crowds towards the faces, take turns.
    """
    generator = torch.Generator().manual_seed(seed)
    lower, upper = box.corners
    rounds = [lower, upper]
    while len(rounds) < count:
        uniform = torch.rand(lower.shape, generator=generator, dtype=torch.float64)
        if len(rounds) % 2:
            rounds.append(torch.where(uniform < 0.5, lower, upper))
        else:
            beta = torch.sin(uniform * (math.pi / 2)) ** 2
            rounds.append(box.project((lower + beta * (upper - lower)).to(lower.dtype)))
    return torch.cat(rounds[:count])


# --- the scale of rounding errors -------------------------------------------------------------


def rounding_errors(graph: Graph, box: Box, dtype: torch.dtype) -> dict[int, Tensor]:
    """Return, for every node, how far plain arithmetic can be off on a box, [batch, ...]."""
    unit = roundings(graph) * torch.finfo(dtype).eps
    return {i: unit * scale for i, scale in magnitudes(graph, box).items()}


def magnitudes(graph: Graph, box: Box) -> dict[int, Tensor]:
    """Return, for every node, a scale s such that rounding errors are below `n * eps * s`.

    Here n is the number of roundings that a value goes through (`roundings`). Each rule maps
    the scale of the inputs to the sum of absolute values that the operation adds up; an error
    of the inputs grows by no more than that. (A tolerance relative to a node's own value
    would be wrong where large numbers cancel.)
    """
    start = torch.maximum(box.lower.abs(), box.upper.abs()).to(torch.float64)
    everything = range(len(graph.nodes))
    return graph.detach().to(torch.float64).propagate(_MAGNITUDE, start, keep=everything)


def roundings(graph: Graph) -> int:
    """Return how often a value is rounded on its way through the network, at most.

    A dot product of length n counts n, anything else a few; the 16 covers the latter.
    """
    total = 0
    for node in graph.nodes:
        if isinstance(node.op, ops.Linear | ops.Conv2d):
            total += node.op.weight[0].numel()
        elif isinstance(node.op, ops.ConvTranspose2d):
            total += node.op.weight[:, 0].numel()
        elif isinstance(node.op, ops.AvgPool):
            total += math.prod(node.op.kernel)
        elif isinstance(node.op, ops.MatMul):
            total += graph.nodes[node.inputs[0]].shape[-1]
        elif isinstance(node.op, ops.Softmax | ops.Standardize):
            total += 4 * node.shape[-1]
        total += 16
    return total


def _affine_magnitude(op: ops.Op, s: Tensor) -> Tensor:
    return POINT_RULES[type(op)](op.map_tensors(torch.abs), s)


def _batch_norm_magnitude(op: ops.BatchNorm, s: Tensor) -> Tensor:
    shape = (-1,) + (1,) * (s.dim() - 2)
    factor = batchnorm_map(op)[0].abs().view(shape)
    bias = 0 if op.bias is None else op.bias.abs().view(shape)
    return (s + op.mean.abs().view(shape)) * factor + bias


def _same(op: ops.Op, *scales: Tensor) -> Tensor:
    return POINT_RULES[type(op)](op, *scales)


_MAGNITUDE: dict[type[ops.Op], Callable[..., Tensor]] = {
    ops.Linear: _affine_magnitude,
    ops.Conv2d: _affine_magnitude,
    ops.ConvTranspose2d: _affine_magnitude,
    ops.BatchNorm: _batch_norm_magnitude,
    ops.Shift: lambda op, s: s + op.offset.abs(),
    ops.Scale: _affine_magnitude,
    ops.AvgPool: _same,
    ops.MaxPool: _same,
    ops.Reshape: _same,
    ops.Permute: _same,
    ops.Pad: lambda op, s: POINT_RULES[ops.Pad](ops.Pad(op.pads, abs(op.value)), s),
    ops.Slice: _same,
    ops.Take: _same,
    ops.Concat: _same,
    ops.Add: lambda op, a, b: a + b,
    ops.Sub: lambda op, a, b: a + b,
    ops.Relu: lambda op, s: s,
    ops.LeakyRelu: lambda op, s: s * max(1.0, op.slope),
    ops.Sigmoid: lambda op, s: s + 1,  # Lipschitz, so errors don't grow; values up to 1
    ops.Tanh: lambda op, s: s + 1,
    **smooth_moves.MAGNITUDES,
    **network_moves.MAGNITUDES,
}
