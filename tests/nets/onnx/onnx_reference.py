"""The ONNX reference implementation in double precision, with a few operators of our own.

Pooling deviates there from the specification for some paddings; here it goes window by window.
BatchNormalization of older versions takes batch statistics there as soon as `momentum` is given.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun


def _along(
    size: int, kernel: int, stride: int, dilation: int, mode: str, pads: tuple[int, int], ceil: bool
) -> tuple[list[list[int]], tuple[int, int]]:
    """Return the positions that each window looks at along one dimension, and the padding."""
    reach = dilation * (kernel - 1) + 1
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        total = (-(-size // stride) - 1) * stride + reach - size
        pads = (total // 2, total - total // 2)
        pads = pads if mode == "SAME_UPPER" else (pads[1], pads[0])
    free = size + sum(pads) - reach
    count = (-(-free // stride) if ceil else free // stride) + 1
    if ceil and (count - 1) * stride >= size + pads[0]:
        count -= 1
    starts = [i * stride - pads[0] for i in range(count)]
    return [[start + k * dilation for k in range(kernel)] for start in starts], pads


class _Pool(OpRun):
    def pooled(self, x: Any, attributes: dict[str, Any], average: bool) -> tuple[Any, ...]:
        kernel = attributes["kernel_shape"]
        pads = attributes.get("pads") or [0, 0, 0, 0]
        mode = attributes.get("auto_pad") or "NOTSET"
        ceil = bool(attributes.get("ceil_mode"))
        (rows, vertical), (columns, horizontal) = (
            _along(
                x.shape[2 + i],
                kernel[i],
                (attributes.get("strides") or [1, 1])[i],
                (attributes.get("dilations") or [1, 1])[i],
                mode,
                (pads[i], pads[i + 2]),
                ceil,
            )
            for i in (0, 1)
        )
        result = np.zeros((*x.shape[:2], len(rows), len(columns)), x.dtype)
        height, width = x.shape[2:]
        for (i, ys), (j, xs) in itertools.product(enumerate(rows), enumerate(columns)):
            inside = [(a, b) for a in ys for b in xs if 0 <= a < height and 0 <= b < width]
            window = np.stack([x[:, :, a, b] for a, b in inside])
            counted = len(inside)
            if attributes.get("count_include_pad"):
                counted = sum(-vertical[0] <= a < height + vertical[1] for a in ys)
                counted *= sum(-horizontal[0] <= b < width + horizontal[1] for b in xs)
            result[:, :, i, j] = window.sum(0) / counted if average else window.max(0)
        return (result,)


class MaxPool(_Pool):
    """Max pooling."""

    op_domain = ""

    def _run(self, x: Any, **attributes: Any) -> tuple[Any, ...]:
        (found,) = self.pooled(x, attributes, average=False)
        return (found, np.zeros(found.shape, np.int64))[: len(self.onnx_node.output)]


class AveragePool(_Pool):
    """Average pooling."""

    op_domain = ""

    def _run(self, x: Any, **attributes: Any) -> tuple[Any, ...]:
        return self.pooled(x, attributes, average=True)


class BatchNormalization(OpRun):
    """Normalisation with stored statistics."""

    op_domain = ""

    def _run(
        self, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, **attributes: Any
    ) -> tuple[Any, ...]:
        shape = (-1, *(1 for _ in x.shape[2:]))
        scale, bias, mean, variance = (t.reshape(shape) for t in (scale, bias, mean, variance))
        epsilon = float(np.float32(attributes["epsilon"]))
        return ((x - mean) / np.sqrt(variance + epsilon) * scale + bias,)


def _widened(tensor: TensorProto) -> TensorProto:
    if tensor.data_type != TensorProto.FLOAT:
        return tensor
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)


def in_double_precision(model: ModelProto) -> ModelProto:
    """Return the same model with its numbers, which stay what they are, in float64."""
    wide = ModelProto()
    wide.CopyFrom(model)
    del wide.graph.initializer[:]
    wide.graph.initializer.extend(_widened(tensor) for tensor in model.graph.initializer)
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                attribute.t.CopyFrom(_widened(attribute.t))
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE
    for value in (*wide.graph.input, *wide.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return wide


def evaluator(model: ModelProto) -> ReferenceEvaluator:
    """Return the reference implementation of a model in double precision."""
    return ReferenceEvaluator(
        in_double_precision(model), new_ops=[MaxPool, AveragePool, BatchNormalization]
    )
