"""What a file computes from constants alone: shapes, scaled weights, steps of a range.

Only the operators in `OPERATORS` are computed, each after the sizes of its results are known to be
within the limits, by onnxruntime and in the precision of the file. Whatever only rearranges numbers
or calculates with small integers is exact; other results are rounded once per operator, and the
network that is bounded is the one with these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tightrope.errors import UserError
from tightrope.graph.values import refuse
from tightrope.nets.messages import short
from tightrope.nets.onnx import dimensions
from tightrope.nets.onnx.builder import Array, Call
from tightrope.nets.onnx.dimensions import Shape, Sizes
from tightrope.nets.onnx.runtime import compute_node

_NUMBERS = "biuf"  # kinds of numpy types: booleans, integers and floats


def read_tensor(tensor: Any, sizes: Sizes) -> Array:
    """Return a stored tensor whose data fit its shape."""
    from onnx import numpy_helper

    shape = tuple(int(size) for size in tensor.dims)
    refuse(min(shape, default=0) < 0, f"shape {shape}")
    sizes.hold_constant(shape, f"the constant {short(tensor.name)}")
    refuse(tensor.HasField("segment"), "a tensor in segments")
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except Exception as error:  # onnx and numpy raise many kinds
        raise NotImplementedError(f"its data do not fit the shape {shape}") from error
    refuse(array.shape != shape, f"its data do not fit the shape {shape}")
    refuse(array.dtype.kind not in _NUMBERS, "numbers of an unusual type")
    return array


def compute(node: Any, call: Call, sizes: Sizes, version: int) -> Array:
    """Compute an operator of constants; `version` is that of the file's format."""
    if call.kind == "Constant":
        return _constant(call, sizes)
    shape = OPERATORS[call.kind](call, sizes)
    refuse(sum(map(bool, node.output)) != 1, "several results")
    sizes.hold_constant(shape, f"the result of {short(call.name)}")
    arguments = [call.constant(i) for i in range(len(call.inputs))]
    try:
        (found,) = compute_node(node, arguments, call.opset, version)
    except UserError as error:
        raise NotImplementedError(str(error)) from error
    refuse(found.shape != shape, f"onnxruntime gives shape {found.shape} instead of {shape}")
    refuse(found.dtype.kind not in _NUMBERS, "numbers of an unusual type")
    return found


def _constant(call: Call, sizes: Sizes) -> Array:
    refuse(len(call.attributes) != 1, "a constant without a value, or with several")
    ((kind, value),) = call.attributes.items()
    if kind == "value":
        return read_tensor(value, sizes)
    types = {"value_float": np.float32, "value_int": np.int64}
    refuse(kind.removesuffix("s") not in types, f"a constant by {kind}")
    array = np.array(value, dtype=types[kind.removesuffix("s")])
    sizes.hold_constant(array.shape, f"the constant {short(call.name)}")
    return array


# --- shapes of results ------------------------------------------------------------------------

Rule = Callable[[Call, Sizes], Shape]


def _of(call: Call, index: int = 0) -> Array:
    found = call.constant(index)
    assert found is not None, f"input {index} is missing"
    return found


def _list(call: Call, index: int, attribute: str | None = None) -> list[int]:
    found = call.integers(index, attribute)
    assert found is not None, f"input {index} is missing"
    return found


def _same(call: Call, sizes: Sizes) -> Shape:
    return _of(call).shape


def _elementwise(call: Call, sizes: Sizes) -> Shape:
    return dimensions.broadcast(*(_of(call, i).shape for i in range(len(call.inputs))))


def _product(call: Call, sizes: Sizes) -> Shape:
    shapes = [_of(call, i).shape for i in (0, 1)]
    shape = dimensions.product(*shapes)
    sizes.multiply(math.prod(shape) * shapes[0][-1], short(call.name))
    return shape


def _gemm(call: Call, sizes: Sizes) -> Shape:
    first, second = _of(call).shape, _of(call, 1).shape
    first = first[::-1] if call.get("transA", 0) else first
    second = second[::-1] if call.get("transB", 0) else second
    refuse(len(first) != 2 or len(second) != 2, "matrices of other dimensions")
    shape = dimensions.product(first, second)
    sizes.multiply(math.prod(shape) * first[-1], short(call.name))
    return shape


def _places(call: Call, sizes: Sizes) -> Shape:
    return max(_of(call).ndim, 1), int(np.count_nonzero(_of(call)))


def _filled(call: Call, sizes: Sizes) -> Shape:
    shape = tuple(_list(call, 0))
    refuse(min(shape, default=0) < 0, f"shape {shape}")
    return shape


def _expanded(call: Call, sizes: Sizes) -> Shape:
    return dimensions.broadcast(_of(call).shape, tuple(_list(call, 1)))


def _tiled(call: Call, sizes: Sizes) -> Shape:
    shape, repeats = _of(call).shape, _list(call, 1)
    refuse(min(repeats, default=0) < 0, f"repeats={repeats}")
    return tuple(size * times for size, times in zip(shape, repeats, strict=True))


def _range(call: Call, sizes: Sizes) -> Shape:
    refuse(any(_of(call, i).dtype.kind != "i" for i in range(3)), "a range of floats")
    start, end, step = (int(_of(call, i).reshape(())) for i in range(3))
    return (len(range(start, end, step)),)


def _reshaped(call: Call, sizes: Sizes) -> Shape:
    return dimensions.reshaped(_of(call).shape, _list(call, 1), bool(call.get("allowzero", 0)))


def _sliced(call: Call, sizes: Sizes) -> Shape:
    return dimensions.indexed(_of(call).shape, slice_index(call, _of(call).shape))


def slice_index(call: Call, shape: Shape) -> list[slice]:
    """Return the index of a `Slice`, whose arguments were attributes once."""
    starts, ends = _list(call, 1, "starts"), _list(call, 2, "ends")
    return dimensions.slices(shape, starts, ends, call.integers(3, "axes"), call.integers(4))


def _gathered(call: Call, sizes: Sizes) -> Shape:
    shape = _of(call).shape
    axis = dimensions.axis_of(int(call.get("axis", 0)), len(shape))
    return (*shape[:axis], *_of(call, 1).shape, *shape[axis + 1 :])


def _concatenated(call: Call, sizes: Sizes) -> Shape:
    shapes = [_of(call, i).shape for i in range(len(call.inputs))]
    axis = dimensions.axis_of(int(call.attributes["axis"]), len(shapes[0]))
    return dimensions.concatenated(shapes, axis)


def _padded(call: Call, sizes: Sizes) -> Shape:
    shape = _of(call).shape
    sides = dimensions.padded(shape, _list(call, 1, "pads"), call.integers(3))
    return tuple(size + low + high for size, low, high in zip(shape, *sides, strict=True))


def _transposed(call: Call, sizes: Sizes) -> Shape:
    shape = _of(call).shape
    return dimensions.permuted(shape, call.get("perm", range(len(shape))[::-1]))


def _reduced(call: Call, sizes: Sizes) -> Shape:
    shape = _of(call).shape
    axes = call.integers(1, "axes")
    if not axes and call.get("noop_with_empty_axes", 0):
        return shape
    chosen = dimensions.axes_of(axes or range(len(shape)), len(shape))
    return dimensions.reduced(shape, chosen, bool(call.get("keepdims", 1)))


OPERATORS: dict[str, Rule] = {
    "Constant": lambda call, sizes: (),  # its own value says
    **dict.fromkeys(
        (
            *("Identity", "Cast", "Neg", "Abs", "Sqrt", "Reciprocal", "Exp", "Log", "Floor"),
            *("Ceil", "Round", "Not", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Clip", "Sign"),
            *("Sin", "Cos", "Erf", "Softplus", "Softmax", "Trilu", "CumSum", "ScatterND"),
            *("ScatterElements", "Scatter", "DequantizeLinear", "QuantizeLinear", "LogSoftmax"),
            *("Elu", "Selu", "Softsign", "HardSigmoid", "HardSwish", "Gelu", "Atan", "Tan"),
            *("BatchNormalization", "LayerNormalization", "EyeLike", "CastLike", "IsNaN"),
        ),
        _same,
    ),
    **dict.fromkeys(
        (
            *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "And", "Or", "Where"),
            *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Or", "Xor", "Sum"),
            *("Mean", "PRelu"),
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2"), _reduced
    ),
    "MatMul": _product,
    "Gemm": _gemm,
    "NonZero": _places,
    "ConstantOfShape": _filled,
    "Expand": _expanded,
    "Tile": _tiled,
    "Range": _range,
    "Reshape": _reshaped,
    "Flatten": lambda call, sizes: dimensions.flattened(_of(call).shape, int(call.get("axis", 1))),
    "Squeeze": lambda call, sizes: dimensions.squeezed(_of(call).shape, call.integers(1, "axes")),
    "Unsqueeze": lambda call, sizes: dimensions.unsqueezed(_of(call).shape, _list(call, 1, "axes")),
    "Transpose": _transposed,
    "Slice": _sliced,
    "Gather": _gathered,
    "Concat": _concatenated,
    "Pad": _padded,
}
