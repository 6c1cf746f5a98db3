"""The shapes of ONNX values: what each operator makes of them, and how large they may get.

Nothing here looks at numbers of a value, so a size is known before anything is computed. Whatever
does not fit raises `NotImplementedError` with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tightrope.graph.values import refuse
from tightrope.limits import ONNX_PRODUCTS, ONNX_TENSOR_ELEMENTS, ONNX_TOTAL_ELEMENTS

Shape = tuple[int, ...]
Index = Sequence[slice | int]

# Neither PyTorch nor numpy handle many more.
MOST_DIMENSIONS = 16
# Of longer lists it is not asked whether they are slices.
MOST_PARTS = 1 << 12


class Sizes:
    """How many elements a network's constants and values have, and the work of one evaluation."""

    def __init__(self) -> None:
        self.constants = 0
        self.values = 0
        self.products = 0

    def hold_constant(self, shape: Shape, what: str) -> None:
        """Take note of one more constant, if the limits allow it."""
        self.constants += self._count(shape, what)

    def hold_value(self, shape: Shape, what: str) -> None:
        """Take note of one more value, if the limits allow it."""
        self.values += self._count(shape, what)

    def _count(self, shape: Shape, what: str) -> int:
        check_rank(shape)
        count = ONNX_TENSOR_ELEMENTS.check(math.prod(shape), f"{what} of shape {shape}")
        total = self.constants + self.values + count
        ONNX_TOTAL_ELEMENTS.check(total, f"the network, with {what} of shape {shape},")
        return count

    def multiply(self, products: int, what: str) -> None:
        """Take note of work."""
        self.products = ONNX_PRODUCTS.check(self.products + products, f"the network, with {what},")


def check_rank(shape: Shape) -> None:
    """Refuse shapes of very many dimensions."""
    refuse(len(shape) > MOST_DIMENSIONS, f"{len(shape)} dimensions")


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    refuse(not -rank <= axis < rank, f"axis {axis} of {rank} dimensions")
    return axis % rank


def axes_of(axes: Sequence[int], rank: int) -> list[int]:
    """Return distinct axes counted from the front."""
    found = [axis_of(axis, rank) for axis in axes]
    refuse(len(set(found)) != len(found), f"axes {list(axes)}, one of them twice")
    return found


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape of an elementwise result."""
    rank = max(len(shape) for shape in shapes)
    sizes = []
    for column in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        wide = {size for size in column if size != 1}
        refuse(len(wide) > 1, f"shapes {' and '.join(map(str, shapes))} do not fit")
        sizes.append(wide.pop() if wide else 1)
    return tuple(sizes)


def flattened(shape: Shape, axis: int) -> Shape:
    """Return the shape of `Flatten`."""
    refuse(not -len(shape) <= axis <= len(shape), f"axis {axis} of {len(shape)} dimensions")
    axis = axis + len(shape) if axis < 0 else axis
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def reshaped(shape: Shape, target: Sequence[int], allow_zero: bool) -> Shape:
    """Return the shape of `Reshape`: 0 keeps a size, -1 is what remains."""
    refuse(min(target, default=0) < -1 or list(target).count(-1) > 1, f"reshape to {list(target)}")
    sizes = list(target)
    if not allow_zero:
        refuse(0 in target[len(shape) :], f"reshape of {shape} to {list(target)}")
        sizes = [shape[i] if size == 0 else size for i, size in enumerate(target)]
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        refuse(known == 0, f"reshape of {shape} to {list(target)}")
        sizes[sizes.index(-1)] = math.prod(shape) // known
    refuse(math.prod(sizes) != math.prod(shape), f"reshape of {shape} to {list(target)}")
    return tuple(sizes)


def squeezed(shape: Shape, axes: Sequence[int] | None) -> Shape:
    """Return the shape of `Squeeze`."""
    refuse(axes is not None and not len(axes), "a list of no axes")
    ones = [axis for axis, size in enumerate(shape) if size == 1]
    dropped = ones if axes is None else axes_of(axes, len(shape))
    refuse(not set(dropped) <= set(ones), f"squeezing {shape} along {dropped}")
    return tuple(size for axis, size in enumerate(shape) if axis not in dropped)


def unsqueezed(shape: Shape, axes: Sequence[int]) -> Shape:
    """Return the shape of `Unsqueeze`."""
    rank = len(shape) + len(axes)
    inserted = axes_of(axes, rank)
    sizes = iter(shape)
    return tuple([1 if axis in inserted else next(sizes) for axis in range(rank)])


def permuted(shape: Shape, order: Sequence[int]) -> Shape:
    """Return the shape of `Transpose`."""
    refuse(sorted(order) != list(range(len(shape))), f"perm={list(order)} of {shape}")
    return tuple(shape[axis] for axis in order)


def slices(
    shape: Shape,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None,
    steps: Sequence[int] | None,
) -> list[slice]:
    """Return the index of `Slice`."""
    chosen = list(range(len(starts))) if axes is None else list(axes)
    steps = [1] * len(starts) if steps is None else steps
    refuse(len({len(starts), len(ends), len(chosen), len(steps)}) != 1, "a slice without an end")
    index = [slice(None)] * len(shape)
    for axis, start, end, step in zip(
        axes_of(chosen, len(shape)), starts, ends, steps, strict=True
    ):
        index[axis] = slice(start, end, step)
    return index


def indexed(shape: Shape, index: Index) -> Shape:
    """Return the shape of what an index chooses."""
    return tuple(
        len(range(*part.indices(size)))
        for part, size in zip(index, shape, strict=True)
        if isinstance(part, slice)
    )


def padded(
    shape: Shape, pads: Sequence[int], axes: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return how many elements `Pad` puts before and after, for each dimension."""
    chosen = list(range(len(shape))) if axes is None else axes_of(axes, len(shape))
    refuse(len(pads) != 2 * len(chosen), f"pads={list(pads)} along {len(chosen)} axes")
    refuse(min(pads, default=0) < 0, "padding below zero")
    before, after = [0] * len(shape), [0] * len(shape)
    for axis, low, high in zip(chosen, pads[: len(chosen)], pads[len(chosen) :], strict=True):
        before[axis], after[axis] = low, high
    return before, after


def concatenated(shapes: Sequence[Shape], axis: int) -> Shape:
    """Return the shape of `Concat`, along an axis counted from the front."""
    rests = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    fit = len(rests) == 1 and all(len(shape) == len(shapes[0]) for shape in shapes)
    refuse(not fit, f"concatenation of shapes {', '.join(map(str, shapes))}")
    total = sum(shape[axis] for shape in shapes)
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def reduced(shape: Shape, axes: Sequence[int], keep: bool) -> Shape:
    """Return the shape of `ReduceSum` and the like, along axes counted from the front."""
    if keep:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


def product(a: Shape, b: Shape) -> Shape:
    """Return the shape of `MatMul`."""
    refuse(not a or not b, "product with a number")
    left = a if len(a) > 1 else (1, *a)
    right = b if len(b) > 1 else (*b, 1)
    refuse(left[-1] != right[-2], f"product of shapes {a} and {b}")
    outer = broadcast(left[:-2], right[:-2])
    return (*outer, *left[-2:-1][: len(a) - 1], *right[-1:][: len(b) - 1])
