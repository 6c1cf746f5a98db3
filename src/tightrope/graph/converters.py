"""How each torch layer, function and method becomes operations of the graph.

A converter gets the arguments of the call, with graph values in place of tensors, and
returns `apply(...)`: the operations to append. It raises `NotImplementedError` with a
reason when the layer exists but not with these options.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.graph import ops, shapes
from tightrope.graph.values import BATCH, Value, apply, pair, refuse


def _identity(module: nn.Module, x: Value) -> Any:
    return x


# --- affine layers --------------------------------------------------------------------------


def _linear(module: nn.Linear, x: Value) -> Any:
    return apply(x, ops.Linear(module.weight, module.bias))


def _conv2d(module: nn.Conv2d, x: Value) -> Any:
    refuse(module.padding_mode != "zeros", f"padding_mode={module.padding_mode!r}")
    before, conv_padding = _explicit_padding(module)
    conv = ops.Conv2d(
        module.weight,
        module.bias,
        pair(module.stride),
        conv_padding,
        pair(module.dilation),
        module.groups,
    )
    return apply(x, *before, conv)


def _explicit_padding(module: nn.Conv2d) -> tuple[tuple[ops.Op, ...], ops.Pair]:
    """Resolve `padding="same"`; an odd total needs a padding layer of its own."""
    if not isinstance(module.padding, str):
        return (), pair(module.padding)
    if module.padding == "valid":
        return (), (0, 0)
    total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if all(t % 2 == 0 for t in total):
        return (), (total[0] // 2, total[1] // 2)
    (top, left), (bottom, right) = [t // 2 for t in total], [t - t // 2 for t in total]
    return (ops.Pad((left, right, top, bottom), 0.0),), (0, 0)


def _linear_function(x: Value, weight: Tensor, bias: Tensor | None = None) -> Any:
    return apply(x, ops.Linear(weight, bias))


def _conv2d_function(
    x: Value,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    refuse(isinstance(padding, str), f"padding={padding!r} in a function call")
    conv = ops.Conv2d(weight, bias, pair(stride), pair(padding), pair(dilation), groups)
    return apply(x, conv)


def _batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d, x: Value) -> Any:
    refuse(module.running_mean is None, "track_running_stats=False")
    assert module.running_mean is not None and module.running_var is not None
    return apply(
        x,
        ops.BatchNorm(
            module.weight,
            module.bias,
            module.running_mean,
            module.running_var,
            module.eps,
            module.momentum,
            module.num_batches_tracked,
        ),
    )


def _constant(value: Any) -> Tensor:
    # A Python number is exact in float64 and, having no dimension, never promotes a batch.
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


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


def _mul(a: Any, b: Any) -> Any:
    refuse(BATCH in (a, b), "a product with the batch size")
    both = isinstance(a, Value) and isinstance(b, Value)
    refuse(both, "product of two values that depend on the input")
    value, constant = (a, b) if isinstance(a, Value) else (b, a)
    return apply(value, ops.Scale(_aligned(constant, value)))


def _div(a: Any, b: Any) -> Any:
    refuse(isinstance(b, Value), "division by a value that depends on the input")
    divisor = _aligned(b, a)
    refuse(bool((divisor == 0).any()), "division by zero")
    return apply(a, ops.Scale(divisor, divide=True))


def _neg(x: Value) -> Any:
    return apply(x, ops.Scale(torch.tensor(-1.0)))


# --- pooling --------------------------------------------------------------------------------


def _avg_pool(
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    refuse(divisor_override is not None, "divisor_override")
    stride = kernel_size if stride is None else stride
    pool = ops.AvgPool(pair(kernel_size), pair(stride), pair(padding), ceil_mode, count_include_pad)
    return apply(x, pool)


def _avg_pool_module(m: nn.AvgPool2d, x: Value) -> Any:
    return _avg_pool(
        x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override
    )


def _adaptive_avg_pool(x: Value, output_size: Any) -> Any:
    size = [o or s for o, s in zip(pair(output_size), x.shape[-2:], strict=True)]
    uneven = any(s % o for s, o in zip(x.shape[-2:], size, strict=True))
    refuse(uneven, f"adaptive pooling of {x.shape[-2:]} to {tuple(size)}: not a divisor")
    kernel = (x.shape[-2] // size[0], x.shape[-1] // size[1])
    return _avg_pool(x, kernel)


def _mean(x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    dims = {d % (len(x.shape) + 1) for d in (dim if isinstance(dim, tuple | list) else (dim,))}
    refuse(len(x.shape) != 3 or dims != {2, 3}, "mean over anything but height and width")
    pool = ops.AvgPool(pair(x.shape[1:]), pair(x.shape[1:]), (0, 0), False, True)
    return apply(x, pool) if keepdim else apply(x, pool, ops.Reshape((x.shape[0],)))


def _max_pool(
    x: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    refuse(return_indices, "return_indices")
    stride = kernel_size if stride is None else stride
    return apply(
        x,
        ops.MaxPool(pair(kernel_size), pair(stride), pair(padding), pair(dilation), ceil_mode),
    )


def _max_pool_module(m: nn.MaxPool2d, x: Value) -> Any:
    return _max_pool(
        x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices
    )


# --- activations ----------------------------------------------------------------------------


def _leaky(x: Value, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    refuse(negative_slope < 0, "a negative slope below zero")
    return apply(x, ops.LeakyRelu(float(negative_slope)))


def _activation(op: type[ops.Op]) -> Callable[..., Any]:
    return lambda x, inplace=False: apply(x, op())


def _activation_module(op: type[ops.Op]) -> Callable[..., Any]:
    return lambda module, x: apply(x, op())


def _pass(x: Value, *args: Any, **kwargs: Any) -> Any:
    return x


MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.AvgPool2d: _avg_pool_module,
    nn.AdaptiveAvgPool2d: lambda m, x: _adaptive_avg_pool(x, m.output_size),
    nn.MaxPool2d: _max_pool_module,
    nn.Flatten: lambda m, x: shapes.flatten(x, m.start_dim, m.end_dim),
    nn.Unflatten: lambda m, x: shapes.unflatten(x, m.dim, m.unflattened_size),
    nn.ZeroPad2d: shapes.constant_pad,
    nn.ConstantPad2d: shapes.constant_pad,
    nn.ReLU: _activation_module(ops.Relu),
    nn.LeakyReLU: lambda m, x: _leaky(x, m.negative_slope),
    nn.Sigmoid: _activation_module(ops.Sigmoid),
    nn.Tanh: _activation_module(ops.Tanh),
    nn.Identity: _identity,
    nn.Dropout: _identity,
    nn.Dropout2d: _identity,
}


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    operator.add: _add,
    torch.add: _add,
    operator.sub: _sub,
    torch.sub: _sub,
    operator.mul: _mul,
    torch.mul: _mul,
    operator.truediv: _div,
    torch.div: _div,
    operator.neg: _neg,
    torch.neg: _neg,
    operator.getitem: shapes.getitem,
    getattr: shapes.get_attribute,
    F.linear: _linear_function,
    F.conv2d: _conv2d_function,
    torch.flatten: shapes.flatten,
    torch.reshape: lambda x, shape: shapes.reshape(x, *shape),
    torch.permute: shapes.permute,
    torch.transpose: shapes.transpose,
    torch.cat: shapes.concat,
    torch.concat: shapes.concat,
    torch.mean: _mean,
    F.pad: shapes.pad,
    F.avg_pool2d: _avg_pool,
    F.adaptive_avg_pool2d: _adaptive_avg_pool,
    F.max_pool2d: _max_pool,
    F.dropout: _pass,
    F.relu: _activation(ops.Relu),
    torch.relu: _activation(ops.Relu),
    F.leaky_relu: _leaky,
    torch.sigmoid: _activation(ops.Sigmoid),
    F.sigmoid: _activation(ops.Sigmoid),
    torch.tanh: _activation(ops.Tanh),
    F.tanh: _activation(ops.Tanh),
}

METHODS: dict[Any, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "flatten": shapes.flatten,
    "view": shapes.reshape,
    "reshape": shapes.reshape,
    "permute": shapes.permute,
    "transpose": shapes.transpose,
    "mean": _mean,
    "relu": _activation(ops.Relu),
    "sigmoid": _activation(ops.Sigmoid),
    "tanh": _activation(ops.Tanh),
    "contiguous": _pass,
    "size": shapes.size,
}


def supported_layers() -> list[str]:
    """Names of the layer classes that can be traced."""
    return sorted(layer.__name__ for layer in MODULES)
