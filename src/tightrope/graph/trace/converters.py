"""How each of PyTorch's operators becomes operations of the graph.

A converter gets the arguments of the call, with graph values in place of tensors, and
returns `apply(...)`: the operations to append. It raises `NotImplementedError` with a
reason when the operator exists but not with these options. Converters are found by the operator
without its variant: `aten.add` for `aten.add.Tensor` and `aten.add.Scalar`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tightrope.graph import ops
from tightrope.graph.trace import shapes, smooth
from tightrope.graph.values import Value, apply, pair, refuse
from tightrope.graph.windows import Side

# --- affine layers --------------------------------------------------------------------------


def _linear(x: Value, weight: Tensor, bias: Tensor | None = None) -> Any:
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    refuse(weight.dim() != 2, f"a weight of shape {tuple(weight.shape)}")
    return apply(x, ops.Linear(weight, bias))


def _conv2d(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    before, inside = _explicit_padding(x, padding, weight, pair(dilation))
    conv = ops.Conv2d(weight, bias, pair(stride), inside, pair(dilation), groups)
    return apply(x, *before, conv)


def _explicit_padding(
    x: Value, padding: Any, weight: Tensor, dilation: ops.Pair
) -> tuple[tuple[ops.Op, ...], ops.Pair]:
    """Resolve `padding="same"`; an odd total needs a padding layer of its own."""
    if not isinstance(padding, str):
        return (), pair(padding)
    if padding == "valid":
        return (), (0, 0)
    (top, bottom), (left, right) = (
        Side(size, kernel, dilation=step).same
        for size, kernel, step in zip(x.shape[-2:], weight.shape[2:], dilation, strict=True)
    )
    if (top, left) == (bottom, right):
        return (), (top, left)
    return (ops.Pad((left, right, top, bottom), 0.0),), (0, 0)


def _batch_norm(
    x: Value,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
    *backend: bool,
) -> Any:
    refuse(
        training or mean is None or variance is None,
        "it uses the statistics of the batch (track_running_stats=False)",
    )
    assert mean is not None and variance is not None
    return apply(x, ops.BatchNorm(weight, bias, mean, variance, epsilon, momentum, None))


def _batch_norm_at_rest(
    x: Value,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    epsilon: float,
) -> Any:
    """The form without in-place changes, which returns three results."""
    norm = _batch_norm(x, weight, bias, mean, variance, False, momentum, epsilon)
    return replace(norm, first_of_several=True)


def complete_batch_norm(op: ops.BatchNorm, layer: nn.Module) -> ops.BatchNorm:
    """Return the operation with what its layer knows about keeping its statistics."""
    if not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return op
    return replace(op, momentum=layer.momentum, batches=layer.num_batches_tracked)


def _constant(value: Any) -> Tensor:
    # A Python number is exact in its tensor and, having no dimension, never promotes a batch.
    if isinstance(value, Tensor | int):
        return torch.as_tensor(value)
    return torch.tensor(float(value), dtype=torch.float64)


def _aligned(constant: Any, x: Value) -> Tensor:
    """Check that a constant broadcasts onto the samples without touching the batch."""
    tensor = _constant(constant)
    shape = tuple(tensor.shape)
    if len(shape) == len(x.shape) + 1 and shape[0] == 1:
        shape = shape[1:]
    try:
        fits = torch.broadcast_shapes(shape, x.shape) == torch.Size(x.shape)
    except RuntimeError:
        fits = False
    refuse(not fits, f"a constant of shape {shape} with samples of shape {x.shape}")
    return tensor


def _add(a: Any, b: Any, *, alpha: float = 1) -> Any:
    refuse(alpha != 1, "alpha")
    if isinstance(a, Value) and isinstance(b, Value):
        refuse(a.shape != b.shape, f"sum of shapes {a.shape} and {b.shape}")
        return apply((a, b), ops.Add())
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    return apply(value, ops.Shift(_aligned(constant, value)))


def _sub(a: Any, b: Any, *, alpha: float = 1) -> Any:
    refuse(alpha != 1, "alpha")
    if isinstance(a, Value) and isinstance(b, Value):
        refuse(a.shape != b.shape, f"difference of shapes {a.shape} and {b.shape}")
        return apply((a, b), ops.Sub())
    if isinstance(a, Value):
        return apply(a, ops.Shift(_aligned(b, a), subtract=True))
    return apply(b, ops.Scale(torch.tensor(-1.0)), ops.Shift(_aligned(a, b)))


def _rsub(a: Any, b: Any, alpha: float = 1) -> Any:
    return _sub(b, a, alpha=alpha)


def _mul(a: Any, b: Any) -> Any:
    if isinstance(a, Value) and isinstance(b, Value):
        return smooth.product(a, b)
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    return apply(value, ops.Scale(_aligned(constant, value)))


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    refuse(rounding_mode is not None, f"rounding_mode={rounding_mode!r}")
    if isinstance(b, Value) and isinstance(a, Value):
        return smooth.quotient(a, b)
    if isinstance(b, Value):
        return apply(b, ops.Function("reciprocal"), ops.Scale(_aligned(a, b)))
    divisor = _aligned(b, a)
    refuse(bool((divisor == 0).any()), "division by zero")
    return apply(a, ops.Scale(divisor, divide=True))


def _neg(x: Value) -> Any:
    return apply(x, ops.Scale(torch.tensor(-1.0)))


# --- pooling --------------------------------------------------------------------------------


def _avg_pool(
    x: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    refuse(divisor_override is not None, "divisor_override")
    kernel, inside = pair(kernel_size), pair(padding)
    pool = ops.AvgPool(kernel, pair(stride or kernel), inside, ceil_mode, count_include_pad)
    return apply(x, pool)


def _adaptive_avg_pool(x: Value, output_size: Any) -> Any:
    size = [o or s for o, s in zip(pair(output_size), x.shape[-2:], strict=True)]
    uneven = any(s % o for s, o in zip(x.shape[-2:], size, strict=True))
    refuse(uneven, f"adaptive pooling of {x.shape[-2:]} to {tuple(size)}: not a divisor")
    kernel = (x.shape[-2] // size[0], x.shape[-1] // size[1])
    return _avg_pool(x, kernel)


def _mean(
    x: Value, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    dims = {d % (len(x.shape) + 1) for d in dim or ()}
    refuse(len(x.shape) != 3 or dims != {2, 3}, "mean over anything but height and width")
    pool = ops.AvgPool(pair(x.shape[1:]), pair(x.shape[1:]), (0, 0), False, True)
    return apply(x, pool) if keepdim else apply(x, pool, ops.Reshape((x.shape[0],)))


def _max_pool(
    x: Value,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    kernel, stride = pair(kernel_size), pair(stride or kernel_size)
    return apply(x, ops.MaxPool(kernel, stride, pair(padding), pair(dilation), ceil_mode))


def _max_pool_and_indices(x: Value, *options: Any) -> Any:
    raise NotImplementedError("return_indices")


# --- activations ----------------------------------------------------------------------------


def _leaky(x: Value, negative_slope: float = 0.01) -> Any:
    fits = 0 <= negative_slope < math.inf
    refuse(not fits, f"a negative slope of {negative_slope}, which is not a number of at least 0")
    return apply(x, ops.LeakyRelu(float(negative_slope)))


def _activation(op: type[ops.Op]) -> Callable[..., Any]:
    return lambda x: apply(x, op())


def _pass(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _to(x: Value, *target: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Hand a value through; that it keeps its type is checked for every operator."""
    return x


def _dropout(x: Value, p: float, train: bool) -> Any:
    refuse(train and p > 0, "its result is random, in evaluation mode, too")
    return x


def _overwritten(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("a tensor or a part of it is overwritten in place")


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.linear: _linear,
    aten.conv2d: _conv2d,
    aten.batch_norm: _batch_norm,
    aten._native_batch_norm_legit_no_training: _batch_norm_at_rest,
    aten.add: _add,
    aten.sub: _sub,
    aten.rsub: _rsub,
    aten.mul: _mul,
    aten.div: _div,
    aten.neg: _neg,
    aten.avg_pool2d: _avg_pool,
    aten.adaptive_avg_pool2d: _adaptive_avg_pool,
    aten.mean: _mean,
    aten.max_pool2d: _max_pool,
    aten.max_pool2d_with_indices: _max_pool_and_indices,
    aten.relu: _activation(ops.Relu),
    aten.leaky_relu: _leaky,
    aten.sigmoid: _activation(ops.Sigmoid),
    aten.tanh: _activation(ops.Tanh),
    aten.dropout: _dropout,
    aten.feature_dropout: _dropout,
    aten.alpha_dropout: _dropout,
    aten.feature_alpha_dropout: _dropout,
    aten.clone: _pass,
    aten.contiguous: _pass,
    aten.detach: _pass,
    aten.detach_: _pass,
    aten.alias: _pass,
    aten.to: _to,
    aten._to_copy: _to,
    aten._assert_tensor_metadata: lambda x, *args, **kwargs: None,
    aten.fill: _overwritten,
    aten.copy: _overwritten,
    aten.select_scatter: _overwritten,
    aten.slice_scatter: _overwritten,
    **shapes.CONVERTERS,
    **smooth.CONVERTERS,
}

# The layers of `torch.nn` that consist of these operators, for messages.
LAYERS = (
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "ConstantPad2d",
    "Conv2d",
    "Dropout",
    "Dropout2d",
    "Flatten",
    "Identity",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "ReLU",
    "Sigmoid",
    "Tanh",
    "Unflatten",
    "ZeroPad2d",
)
