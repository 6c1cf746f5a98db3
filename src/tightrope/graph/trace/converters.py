"""How each of PyTorch's operators becomes operations of the graph.

A converter gets the arguments of the call, with graph values in place of tensors, and
returns `apply(...)`: the operations to append. It raises `NotImplementedError` with a
reason when the operator exists but not with these options. Converters are found by the operator
without its variant: `aten.add` for `aten.add.Tensor` and `aten.add.Scalar`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tightrope.graph import ops
from tightrope.graph.distance import DISTANCE
from tightrope.graph.trace import (
    constants,
    contractions,
    elementwise,
    moves,
    recurrent,
    reductions,
    shapes,
    smooth,
    steps,
    windows,
)
from tightrope.graph.values import Apply, Value, apply, refuse

# --- affine layers --------------------------------------------------------------------------


def _linear(x: Value, weight: Tensor, bias: Tensor | None = None) -> Any:
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    refuse(weight.dim() != 2, f"a weight of shape {tuple(weight.shape)}")
    return apply(x, ops.Linear(weight, bias))


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


# --- activations ----------------------------------------------------------------------------


def _activation(op: type[ops.Op]) -> Callable[..., Any]:
    return lambda x: apply(x, op())


def _pass(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _dropout(x: Value, p: float, train: bool) -> Any:
    refuse(train and p > 0, "its result is random, in evaluation mode, too")
    return x


def _distance(x: Value, weight: Tensor, shares: Tensor) -> Any:
    refuse(isinstance(weight, Value), "a weight that depends on the input")
    refuse(len(x.shape) != 1, f"samples of shape {x.shape}")
    refuse(bool((shares < 0).any()), "a negative share")
    return Apply((x,), (ops.Distance(weight, shares),), first_of_several=True)


aten = torch.ops.aten

CONVERTERS: dict[Any, Callable[..., Any]] = {
    aten.linear: _linear,
    aten.batch_norm: _batch_norm,
    aten._native_batch_norm_legit_no_training: _batch_norm_at_rest,
    aten.relu: _activation(ops.Relu),
    aten.sigmoid: _activation(ops.Sigmoid),
    aten.tanh: _activation(ops.Tanh),
    DISTANCE: _distance,
    aten.dropout: _dropout,
    aten.feature_dropout: _dropout,
    aten.alpha_dropout: _dropout,
    aten.feature_alpha_dropout: _dropout,
    aten.clone: _pass,
    aten.contiguous: _pass,
    aten.detach: _pass,
    aten.detach_: _pass,
    aten.alias: _pass,
    aten._assert_tensor_metadata: lambda x, *args, **kwargs: None,
    **shapes.CONVERTERS,
    **windows.CONVERTERS,
    **moves.CONVERTERS,
    **elementwise.CONVERTERS,
    **reductions.CONVERTERS,
    **steps.CONVERTERS,
    **smooth.CONVERTERS,
    **contractions.CONVERTERS,
    **constants.CONVERTERS,
    **recurrent.CONVERTERS,
}

OF_LAYERS = recurrent.OF_LAYERS

# Those that take a value with minus infinity at some places.
OF_MASKED = (aten.softmax, aten._softmax, *(aten.dropout, aten.clone, aten.contiguous, aten.alias))

# The layers of `torch.nn` that consist of these operators, for messages.
LAYERS = (
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Bilinear",
    "CELU",
    "ChannelShuffle",
    "CircularPad2d",
    "ConstantPad2d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "CosineSimilarity",
    "Dropout",
    "Dropout2d",
    "ELU",
    "Flatten",
    "Fold",
    "GELU",
    "GLU",
    "GRU",
    "GRUCell",
    "GroupNorm",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "Identity",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LPPool2d",
    "LSTM",
    "LSTMCell",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LocalResponseNorm",
    "LogSigmoid",
    "LogSoftmax",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mish",
    "MultiheadAttention",
    "PReLU",
    "PairwiseDistance",
    "PixelShuffle",
    "PixelUnshuffle",
    "RMSNorm",
    "RNN",
    "RNNCell",
    "RReLU",
    "ReLU",
    "ReLU6",
    "ReflectionPad2d",
    "ReplicationPad2d",
    "SELU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "Unflatten",
    "Unfold",
    "Upsample",
    "ZeroPad2d",
)
