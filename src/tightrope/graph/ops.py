"""The operations a network is made of.

The set is closed on purpose: a domain is complete when it has one rule for each class here. A new
one takes a class here (listed in `ALL_OPS`), a converter from PyTorch's operators
(`trace/converters.py`), and a row in the table at the end of

- `evaluate.py`: its value at points, and what rounding does to it;
- `domains/interval.py`: its boxes;
- each tighter domain: `domains/zonotope.py`, `domains/linear/rules.py` and `magnitudes.py`,
  `domains/milp/expressions.py`. Where it has no rule, it is named in the list above the table.

Ops hold the *live* tensors of the traced module, so bounds and attacks see every optimiser
step and gradients reach the parameters. Shapes never include the batch dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Op:
    """Base of all operations."""

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same operation with `function` applied to each tensor it holds."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: function(v) for k, v in held.items() if isinstance(v, Tensor)}
        return replace(self, **tensors) if tensors else self


@dataclass(frozen=True, eq=False)
class Input(Op):
    """The network's input; always the first node."""


@dataclass(frozen=True, eq=False)
class Linear(Op):
    """`weight @ x + bias` over the last dimension."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Conv2d(Op):
    """Two-dimensional convolution with zero padding."""

    weight: Tensor
    bias: Tensor | None
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


@dataclass(frozen=True, eq=False)
class ConvTranspose2d(Op):
    """Transposed convolution: the transpose of a convolution with this weight, and a bias.

    `extra` is its output padding, below the stride in each direction.
    """

    weight: Tensor
    bias: Tensor | None
    stride: Pair
    padding: Pair
    extra: Pair
    dilation: Pair
    groups: int


@dataclass(frozen=True, eq=False)
class BatchNorm(Op):
    """`(x - mean) / sqrt(variance + epsilon) * weight + bias` per channel.

    `mean` and `variance` are the module's running statistics, or those of a batch once a
    clean pass has fixed them (see `tightrope.training.batchnorm`).
    """

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    epsilon: float
    momentum: float | None
    batches: Tensor | None


@dataclass(frozen=True, eq=False)
class Shift(Op):
    """`x + offset`, or `x - offset` when `subtract` is set (the offset stays a live tensor)."""

    offset: Tensor
    subtract: bool = False


@dataclass(frozen=True, eq=False)
class Scale(Op):
    """`x * factor`, or `x / factor` when `divide` is set (kept apart to stay exact)."""

    factor: Tensor
    divide: bool = False


@dataclass(frozen=True, eq=False)
class AvgPool(Op):
    """Average pooling."""

    kernel: Pair
    stride: Pair
    padding: Pair
    ceil_mode: bool
    count_include_pad: bool


@dataclass(frozen=True, eq=False)
class MaxPool(Op):
    """Max pooling."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool


@dataclass(frozen=True, eq=False)
class Reshape(Op):
    """Reshape each sample to `shape`."""

    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Permute(Op):
    """Permute dimensions; `dims[0]` is 0, the batch."""

    dims: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Pad(Op):
    """Pad with a constant; `pads` counts from the last dimension as in torch."""

    pads: tuple[int, ...]
    value: float


@dataclass(frozen=True, eq=False)
class Slice(Op):
    """Index each sample with slices and integers."""

    index: tuple[slice | int, ...]


@dataclass(frozen=True, eq=False)
class Take(Op):
    """Numbers of each sample, by their flat places: copies in any order, each any number of times.

    `index` has the shape of the result.
    """

    index: Tensor


@dataclass(frozen=True, eq=False)
class Concat(Op):
    """Concatenate along `dim` (the batch is dimension 0)."""

    dim: int


@dataclass(frozen=True, eq=False)
class Add(Op):
    """Sum of two nodes: a residual join."""


@dataclass(frozen=True, eq=False)
class Sub(Op):
    """Difference of two nodes."""


@dataclass(frozen=True, eq=False)
class Relu(Op):
    """`max(x, 0)`."""


@dataclass(frozen=True, eq=False)
class LeakyRelu(Op):
    """`x` where positive, `slope * x` elsewhere; `slope >= 0`."""

    slope: float


@dataclass(frozen=True, eq=False)
class Sigmoid(Op):
    """Logistic function."""


@dataclass(frozen=True, eq=False)
class Tanh(Op):
    """Hyperbolic tangent."""


@dataclass(frozen=True, eq=False)
class Function(Op):
    """A function of each number by itself: a row of `functions.FUNCTIONS`.

    `least` is a number that the argument is never below, whatever boxes say.
    """

    name: str
    parameters: tuple[float, ...] = ()
    least: float = -math.inf


@dataclass(frozen=True, eq=False)
class Mul(Op):
    """Product of two nodes, number by number, broadcast onto each other.

    Its absolute value is never above `limit`, whatever boxes say.
    """

    limit: float = math.inf


@dataclass(frozen=True, eq=False)
class MatMul(Op):
    """Product of two nodes as matrices in their last two dimensions, broadcast in the others."""


@dataclass(frozen=True, eq=False)
class Differences(Op):
    """`x_j - x_i` for all pairs of numbers along the last dimension, at place i, j."""


@dataclass(frozen=True, eq=False)
class Softmax(Op):
    """`exp(x_i) / sum_j exp(x_j)` over the last dimension, or its logarithm."""

    logarithm: bool = False


@dataclass(frozen=True, eq=False)
class Standardize(Op):
    """`(x - mean) / sqrt(variance + epsilon)` over the last dimension of each sample.

    Without `center` nothing is subtracted: `x / sqrt(mean of squares + epsilon)`.
    """

    epsilon: float
    center: bool = True


@dataclass(frozen=True, eq=False)
class Step(Op):
    """A function that is constant but for jumps, by its name in `steps.py`.

    `positive`, `nonnegative` and `zero` are 1 where that holds, else 0; others round.
    """

    kind: str


@dataclass(frozen=True, eq=False)
class Where(Op):
    """The second of three nodes where the first is not zero, the third elsewhere."""


@dataclass(frozen=True, eq=False)
class ArgMax(Op):
    """The place of the largest number along the last dimension: of several the first, or `last`."""

    last: bool = False


@dataclass(frozen=True, eq=False)
class Distance(Op):
    """Distances `a_j = |x_j - w_j|` to each row of the weights, of samples of one dimension.

    The value is `sum_i shares_i a_(i)` over the largest ones in falling order; no share is
    negative. One share of 1 is the largest distance.
    """

    weight: Tensor
    shares: Tensor


ALL_OPS: tuple[type[Op], ...] = (
    Input,
    Linear,
    Conv2d,
    ConvTranspose2d,
    BatchNorm,
    Shift,
    Scale,
    AvgPool,
    MaxPool,
    Reshape,
    Permute,
    Pad,
    Slice,
    Take,
    Concat,
    Add,
    Sub,
    Relu,
    LeakyRelu,
    Sigmoid,
    Tanh,
    Function,
    Mul,
    MatMul,
    Differences,
    Softmax,
    Standardize,
    Step,
    Where,
    ArgMax,
    Distance,
)
