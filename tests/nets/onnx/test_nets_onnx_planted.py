"""Wrong conversions are found by the check, beside an output of 1e9 that would hide them.

Each case breaks one converter in a way that keeps shapes (mostly) and looks right at a glance. The
same file is read without the change first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from onnx_models import node, random_array, save_model

from tightrope.errors import UserError
from tightrope.graph import ops
from tightrope.nets.onnx import builder as onnx_builder
from tightrope.nets.onnx import operators as onnx_operators
from tightrope.nets.onnx import shapes as onnx_shapes
from tightrope.nets.onnx import windows as onnx_windows
from tightrope.nets.onnx.builder import Call
from tightrope.nets.onnx.importing import read_onnx

IMAGE = (1, 2, 6, 6)
SQUARE = (1, 4, 4)
VECTOR = (1, 4)
MASK = 1e9

Change = Callable[[Call], Call]
ints = np.array


@dataclass(frozen=True)
class Planted:
    """A wrong converter of `operator`, which reads `m`: the input with one element of 1e9."""

    operator: Any
    change: Change
    shape: tuple[int, ...] = IMAGE
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    opset: int = 13


def attributes(**changed: Any) -> Change:
    return lambda call: replace(call, attributes={**call.attributes, **changed})


def without(name: str) -> Change:
    return lambda call: replace(
        call, attributes={k: v for k, v in call.attributes.items() if k != name}
    )


def constant(index: int, change: Callable[[Any], Any]) -> Change:
    """Change one of the inputs."""

    def changed(call: Call) -> Call:
        inputs = list(call.inputs)
        inputs[index] = change(inputs[index])
        return replace(call, inputs=tuple(inputs))

    return changed


def inputs(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Change:
    return lambda call: replace(call, inputs=change(call.inputs))


def one_element(array: np.ndarray) -> np.ndarray:
    """Change one number a little."""
    array = np.array(array)
    array.reshape(-1)[-1] *= 1.0001
    return array


W = random_array(4, 2, 3, 3)
BIAS = random_array(4, seed=2)
BATCH_NORM = {
    **{name: random_array(2, seed=i) for i, name in enumerate("abc")},
    "d": random_array(2, low=0.2),
}
DENSE = {"w": random_array(4, 4, seed=5), "b": random_array(4, seed=6)}

conv = node("Conv", "m w b", "z", pads=[1, 1, 1, 1])
PLANTED = {
    "conv: pads moved": Planted(conv, attributes(pads=[0, 1, 2, 1]), constants={"w": W, "b": BIAS}),
    "conv: bias dropped": Planted(conv, inputs(lambda i: i[:2]), constants={"w": W, "b": BIAS}),
    "conv: kernel transposed": Planted(
        conv, constant(1, lambda w: w.transpose(0, 1, 3, 2)), constants={"w": W, "b": BIAS}
    ),
    "conv: channels swapped": Planted(
        conv, constant(1, lambda w: w[:, ::-1]), constants={"w": W, "b": BIAS}
    ),
    "conv: kernel mirrored": Planted(
        conv, constant(1, lambda w: w[..., ::-1, ::-1]), constants={"w": W, "b": BIAS}
    ),
    "conv: one weight": Planted(conv, constant(1, one_element), constants={"w": W, "b": BIAS}),
    "conv: one bias": Planted(conv, constant(2, one_element), constants={"w": W, "b": BIAS}),
    "conv: strides swapped": Planted(
        node("Conv", "m w", "z", strides=[2, 1]), attributes(strides=[1, 2]), constants={"w": W}
    ),
    "conv: dilations swapped": Planted(
        node("Conv", "m w", "z", dilations=[2, 1]), attributes(dilations=[1, 2]), constants={"w": W}
    ),
    "conv: dilation for stride": Planted(
        node("Conv", "m w", "z", strides=[2, 2]),
        attributes(strides=[1, 1], dilations=[2, 2]),
        constants={"w": W},
    ),
    "conv: groups swapped": Planted(
        node("Conv", "m w", "z", group=2),
        constant(1, lambda w: np.roll(w, 2, axis=0)),
        constants={"w": W[:, :1]},
    ),
    "conv: same lower for upper": Planted(
        node("Conv", "m w", "z", auto_pad="SAME_UPPER", strides=[2, 2]),
        attributes(auto_pad="SAME_LOWER"),
        constants={"w": W},
    ),
    "max pool: window off by one": Planted(
        node("MaxPool", "m", "z", kernel_shape=[2, 2], strides=[2, 2]),
        attributes(kernel_shape=[1, 2]),
    ),
    "max pool: average": Planted(
        node("AveragePool", "m", "z", kernel_shape=[2, 2], strides=[2, 2]),
        lambda call: replace(call, kind="MaxPool"),
    ),
    "average pool: padding counted": Planted(
        node("AveragePool", "m", "z", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        attributes(count_include_pad=1),
    ),
    "average pool: window off by one": Planted(
        node("AveragePool", "m", "z", kernel_shape=[3, 3], strides=[3, 3]),
        attributes(kernel_shape=[2, 3]),
    ),
    "matmul: transposed": Planted(
        node("MatMul", "m w", "z"), constant(1, np.transpose), SQUARE, {"w": DENSE["w"]}
    ),
    "matmul: from the other side": Planted(
        node("MatMul", "m w", "z"), inputs(lambda i: i[::-1]), SQUARE, {"w": DENSE["w"]}
    ),
    "matmul: constant on the left transposed": Planted(
        node("MatMul", "w m", "z"), constant(0, np.transpose), SQUARE, {"w": DENSE["w"]}
    ),
    "gemm: alpha ignored": Planted(
        node("Gemm", "x w b", "z", alpha=0.5), without("alpha"), VECTOR, DENSE
    ),
    "gemm: beta ignored": Planted(
        node("Gemm", "x w b", "z", beta=2.0), without("beta"), VECTOR, DENSE
    ),
    "gemm: beta for alpha": Planted(
        node("Gemm", "x w b", "z", alpha=0.5, beta=2.0),
        attributes(alpha=2.0, beta=0.5),
        VECTOR,
        DENSE,
    ),
    "gemm: transB ignored": Planted(
        node("Gemm", "x w b", "z", transB=1), without("transB"), VECTOR, DENSE
    ),
    "gemm: bias dropped": Planted(
        node("Gemm", "x w b", "z"), inputs(lambda i: i[:2]), VECTOR, DENSE
    ),
    "batch norm: epsilon": Planted(
        node("BatchNormalization", "m a b c d", "z", epsilon=0.01),
        without("epsilon"),
        constants=BATCH_NORM,
    ),
    "batch norm: mean for bias": Planted(
        node("BatchNormalization", "m a b c d", "z"),
        inputs(lambda i: (i[0], i[1], i[3], i[2], i[4])),
        constants=BATCH_NORM,
    ),
    "batch norm: deviation for variance": Planted(
        node("BatchNormalization", "m a b c d", "z"), constant(4, np.sqrt), constants=BATCH_NORM
    ),
    "leaky relu: slope": Planted(node("LeakyRelu", "m", "z", alpha=0.1), without("alpha")),
    "prelu: slope": Planted(
        node("PRelu", "m s", "z"),
        constant(1, lambda s: s * 0.5),
        constants={"s": np.full((2, 1, 1), 0.25, np.float32)},
    ),
    "slice: shifted": Planted(
        node("Slice", "m s e", "z"),
        inputs(lambda i: (i[0], *(array + ints([0, 0, 1, 0]) for array in i[1:]))),
        constants={"s": ints([0, 0, 1, 0]), "e": ints([1, 2, 4, 6])},
    ),
    "slice: step ignored": Planted(
        node("Slice", "m s e a t", "z"),
        constant(2, lambda e: e - 3),
        constants={"s": ints([0]), "e": ints([6]), "a": ints([3]), "t": ints([2])},
    ),
    "gather: next element": Planted(
        node("Gather", "m i", "z", axis=2), constant(1, lambda i: i + 1), constants={"i": ints(1)}
    ),
    "concat: order": Planted(node("Concat", "m n", "z", axis=1), inputs(lambda i: i[::-1])),
    "concat: axis": Planted(node("Concat", "m n", "z", axis=2), attributes(axis=3)),
    "sub: sign": Planted(node("Sub", "m n", "z"), inputs(lambda i: i[::-1])),
    "sub: from a constant": Planted(
        node("Sub", "m c", "z"), inputs(lambda i: i[::-1]), constants={"c": random_array(6)}
    ),
    "add: broadcast along the other axis": Planted(
        node("Add", "m c", "z"),
        constant(1, lambda c: c.reshape(6, 1)),
        constants={"c": random_array(6)},
    ),
    "mul: half precision": Planted(
        node("Mul", "m c", "z"),
        constant(1, lambda c: c.astype(np.float16).astype(np.float32)),
        constants={"c": random_array(6)},
    ),
    "div: the inverse": Planted(
        node("Div", "m c", "z"), constant(1, np.reciprocal), constants={"c": random_array(6) + 3}
    ),
    "transpose: axes swapped": Planted(
        node("Transpose", "m", "z", perm=[0, 1, 3, 2]), attributes(perm=[0, 1, 2, 3])
    ),
    "pad: sides swapped": Planted(
        node("Pad", "m p", "z"),
        constant(1, lambda p: np.roll(p, 4)),
        constants={"p": ints([0, 0, 1, 0, 0, 0, 0, 2])},
    ),
    "pad: value": Planted(
        node("Pad", "m p v", "z"),
        inputs(lambda i: i[:2]),
        constants={"p": ints([0, 0, 1, 1, 0, 0, 1, 1]), "v": np.array(0.5, np.float32)},
    ),
    "reduce: sum for mean": Planted(
        node("ReduceMean", "m", "z", axes=[3]), lambda call: replace(call, kind="ReduceSum")
    ),
    "reduce: axis": Planted(node("ReduceMean", "m", "z", axes=[3]), attributes(axes=[2])),
    "clip: lower bound dropped": Planted(
        node("Clip", "m l h", "z"),
        constant(1, lambda low: None),
        constants={"l": np.array(-0.5, np.float32), "h": np.array(0.5, np.float32)},
    ),
    "max: minimum": Planted(
        node("Max", "m c", "z"),
        lambda call: replace(call, kind="Min"),
        constants={"c": random_array(6)},
    ),
}


def save(planted: Planted, path: Any) -> Any:
    """Write the operator with an element of 1e9 among its inputs, and one among the outputs."""
    constants = dict(planted.constants)
    masks = {}
    for name, place in (("mask", 0), ("other", -1)):
        masks[name] = np.zeros(planted.shape, np.float32)
        masks[name].reshape(-1)[place] = MASK
    nodes = [
        node("Add", "x mask", "m"),
        node("Add", "x other", "n"),
        planted.operator,
        node("Flatten", "z", "f", axis=0),
        node("Flatten", "n", "g", axis=0),
        node("Concat", "f g", "y", axis=1),
    ]
    return save_model(path, nodes, planted.shape, {**constants, **masks}, opset=planted.opset)


def plant(monkeypatch, planted: Planted, converter: Callable[..., Any]) -> None:
    """Convert this one operator by another converter."""
    kind, name = planted.operator.op_type, planted.operator.name
    right = onnx_operators.CONVERTERS[kind]

    def either(build, call):
        return (converter if call.name == name else right)(build, call)

    monkeypatch.setitem(onnx_operators.CONVERTERS, kind, either)


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_converters_are_found(name, tmp_path, monkeypatch):
    planted = PLANTED[name]
    path = save(planted, tmp_path / "net.onnx")
    assert read_onnx(path).run(torch.zeros(1, *planted.shape[1:])).abs().max() >= MASK / 2
    original = dict(onnx_operators.CONVERTERS)

    def wrong(build, call):
        changed = planted.change(call)
        return original[changed.kind](build, changed)

    plant(monkeypatch, planted, wrong)
    with pytest.raises(UserError, match="the graph differs from onnxruntime"):
        read_onnx(path)


def simple(kind: str, **options: Any) -> Planted:
    return Planted(node(kind, "m", "z", **options), lambda call: call)


def replaced(op: ops.Op) -> Callable[..., Any]:
    return lambda build, call: build.apply(call.value(), op)


OTHERS = {
    "relu dropped": (simple("Relu"), lambda build, call: call.value()),
    "neg dropped": (simple("Neg"), lambda build, call: call.value()),
    "tanh for sigmoid": (simple("Sigmoid"), replaced(ops.Tanh())),
    "sigmoid for tanh": (simple("Tanh"), replaced(ops.Sigmoid())),
    "relu for leaky relu": (simple("LeakyRelu"), replaced(ops.Relu())),
    "dropout that scales": (
        simple("Dropout"),
        replaced(ops.Scale(torch.tensor(0.5))),
    ),
    "channels last": (
        simple("Flatten"),
        lambda build, call: build.place(
            onnx_shapes.permute(build, call.value(), [0, 2, 3, 1]).position, (1, 72)
        ),
    ),
    "the largest for the mean": (
        simple("GlobalAveragePool"),
        onnx_windows.CONVERTERS["GlobalMaxPool"],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_are_found(name, tmp_path, monkeypatch):
    planted, converter = OTHERS[name]
    path = save(planted, tmp_path / "net.onnx")
    read_onnx(path)
    plant(monkeypatch, planted, converter)
    with pytest.raises(UserError, match="the graph differs from onnxruntime"):
        read_onnx(path)


BIASES = {
    "sign": lambda bias: -bias,
    "dropped": torch.zeros_like,
    "order": lambda bias: bias.flip(0),
    "one number": lambda bias: torch.cat([bias[:-1], bias[-1:] * 1.0001]),
}


@pytest.mark.parametrize("change", BIASES)
def test_wrong_biases_are_found(change, tmp_path, monkeypatch):
    """A constant that is added to a layer's result becomes its bias; one of them is 1e9."""
    bias = random_array(4, seed=3)
    bias[0] = MASK
    nodes = [node("MatMul", "x w", "a"), node("Add", "a b")]
    constants = {"w": DENSE["w"], "b": bias}
    path = save_model(tmp_path / "net.onnx", nodes, VECTOR, constants)
    assert len(read_onnx(path).graph.nodes) == 2
    original = onnx_builder._as_bias

    def wrong(shift, layer):
        found = original(shift, layer)
        return None if found is None else BIASES[change](found)

    monkeypatch.setattr(onnx_builder, "_as_bias", wrong)
    with pytest.raises(UserError, match="the graph differs from onnxruntime"):
        read_onnx(path)


def test_windows_moved_by_one_are_found(tmp_path, monkeypatch):
    """Padding on the other side: the same number of windows, each one pixel further."""
    planted = Planted(
        node("Conv", "m w", "z", pads=[1, 1, 0, 0]), lambda call: call, constants={"w": W}
    )
    path = save(planted, tmp_path / "net.onnx")
    read_onnx(path)
    original = onnx_windows._windows

    def wrong(*arguments):
        windows = original(*arguments)
        left, right, top, bottom = windows.padding
        return replace(windows, padding=(right, left, bottom, top))

    monkeypatch.setattr(onnx_windows, "_windows", wrong)
    with pytest.raises(UserError, match="the graph differs from onnxruntime"):
        read_onnx(path)


def test_a_wrong_shape_with_the_right_numbers_is_found(tmp_path, monkeypatch):
    nodes = [node("Reshape", "x s", "z"), node("Relu", "z")]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 6), {"s": ints([2, 3])})
    read_onnx(path)

    def wrong(build, call):
        return build.place(call.value().position, (3, 2))

    monkeypatch.setitem(onnx_operators.CONVERTERS, "Reshape", wrong)
    with pytest.raises(UserError, match=r"shape \(3, 2\) instead of \(2, 3\)"):
        read_onnx(path)
