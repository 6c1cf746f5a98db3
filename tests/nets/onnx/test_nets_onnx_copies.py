"""ONNX operators that copy, enlarge, bend, reduce and jump: read, they compute the same.

Reading compares each node with onnxruntime; here the outputs are compared once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from onnx_models import node, random_array, save_model

from tightrope.errors import UserError
from tightrope.graph import ops
from tightrope.nets.onnx import operators
from tightrope.nets.onnx.importing import read_onnx

IMAGE, LINE, BLOCK = (1, 4, 5, 6), (1, 4, 9), (1, 2, 5, 4, 6)
ints = np.array
floats = lambda *values: np.array(values, np.float32)  # noqa: E731
Case = tuple[list[Any], tuple[int, ...], dict[str, Any]]


def one(kind: str, shape: tuple[int, ...], output: str = "y", **given: Any) -> Case:
    """A network of one operator; arrays are its inputs, everything else attributes."""
    arrays = {k: v for k, v in given.items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in given.items() if k not in arrays}
    return [node(kind, " ".join(("x", *arrays)), output, **rest)], shape, arrays


def as_floats(kind: str, shape: tuple[int, ...], **attributes: Any) -> Case:
    """A network of an operator that gives integers."""
    return [node(kind, "x", "i", **attributes), node("Cast", "i", to=1)], shape, {}


def resized(mode: str, transform: str, sizes: tuple[int, int], **options: str) -> Case:
    attributes = {"mode": mode, "coordinate_transformation_mode": transform, **options}
    return [node("Resize", "x - - z", **attributes)], IMAGE, {"z": ints([1, 4, *sizes])}


CASES: dict[str, Case] = {
    "gather": one("Gather", IMAGE, i=ints([2, 0, 1, 1]), axis=1),
    "gather pairs": one("Gather", IMAGE, i=ints([[2, -1], [0, 0]]), axis=2),
    "gather elements": one("GatherElements", (1, 6), i=ints([[3, 1, -1]]), axis=1),
    "gather nd": one("GatherND", (1, 4, 5), i=ints([[0, 1], [0, 3]])),
    "split": one("Split", IMAGE, "a y", s=ints([1, 3]), axis=1),
    "split evenly": one("Split", IMAGE, "y b", axis=1),
    "expand": one("Expand", (1, 1, 5, 1), s=ints([1, 3, 5, 2])),
    "expand by a dimension": one("Expand", (1, 3), s=ints([2, 1, 1])),
    "tile": one("Tile", IMAGE, r=ints([1, 2, 1, 3])),
    "backwards": one(
        "Slice", IMAGE, s=ints([-1, 4]), e=ints([-(2**63) + 1, 0]), a=ints([1, 2]), t=ints([-1, -2])
    ),
    "depth to space": one("DepthToSpace", IMAGE, blocksize=2),
    "depth to space, columns": one("DepthToSpace", IMAGE, blocksize=2, mode="CRD"),
    "space to depth": one("SpaceToDepth", (1, 2, 4, 6), blocksize=2),
    "reflection": one("Pad", IMAGE, p=ints([0, 0, 1, 2, 0, 0, 2, 1]), mode="reflect"),
    "edge": one("Pad", IMAGE, p=ints([0, 0, 1, 2, 0, 0, 2, 1]), mode="edge"),
    "larger constant": one("Add", (1, 1, 5, 6), c=random_array(4, 1, 1)),
    "larger factor": one("Mul", (1, 1, 5, 6), c=random_array(1, 4, 1, 1)),
    "shapes": (
        [node("ReduceMean", "x", "m", axes=[1], keepdims=1), node("Sub", "m x")], IMAGE, {},
    ),
    "clip": one("Clip", IMAGE, l=floats(-0.3).reshape(()), h=floats(0.7).reshape(())),
    "slopes": one("PRelu", IMAGE, s=random_array(4, 1, 1)),
    "negative slope": one("LeakyRelu", IMAGE, alpha=-0.5),
    "abs": one("Abs", IMAGE),
    "max": ([node("Neg", "x", "n"), node("Max", "x n c")], IMAGE, {"c": random_array(6)}),
    "min": ([node("Neg", "x", "n"), node("Min", "x n c")], IMAGE, {"c": random_array(6)}),
    "hard sigmoid": one("HardSigmoid", IMAGE),
    "shrink": one("Shrink", IMAGE, lambd=0.5, bias=0.5),
    "sum": one("ReduceSum", IMAGE, a=ints([1, 3]), keepdims=0),
    "sum of all": one("ReduceSum", IMAGE, keepdims=0),
    "maximum": one("ReduceMax", IMAGE, axes=[1, 2], keepdims=0),
    "minimum": one("ReduceMin", IMAGE, axes=[-1]),
    "lines": one(
        "Conv", LINE, w=random_array(3, 4, 3), b=random_array(3), pads=[1, 2], strides=[2]
    ),
    "lines, same": one("Conv", LINE, w=random_array(3, 4, 4), auto_pad="SAME_UPPER"),
    "volumes": one(
        "Conv", BLOCK, w=random_array(3, 2, 2, 3, 2), b=random_array(3),
        pads=[0, 1, 1, 1, 0, 1], strides=[2, 1, 2], dilations=[1, 1, 2],
    ),
    "maxima of lines": one("MaxPool", LINE, kernel_shape=[3], strides=[2]),
    "means of lines": one("AveragePool", LINE, kernel_shape=[3], strides=[2], pads=[1, 1]),
    "mean of lines": one("GlobalAveragePool", LINE),
    "transposed": one(
        "ConvTranspose", IMAGE, w=random_array(4, 3, 3, 2), b=random_array(3),
        strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 2],
    ),
    "transposed, groups": one(
        "ConvTranspose", IMAGE, w=random_array(4, 3, 3, 2), strides=[2, 1], group=2,
        dilations=[1, 2],
    ),
    "transposed, same": one(
        "ConvTranspose", IMAGE, w=random_array(4, 3, 4, 4), strides=[2, 2], auto_pad="SAME_UPPER"
    ),
    "transposed to a shape": one(
        "ConvTranspose", IMAGE, w=random_array(4, 3, 4, 4), strides=[2, 2], output_shape=[10, 12]
    ),
    "transposed lines": one("ConvTranspose", (1, 4, 5), w=random_array(4, 3, 3), strides=[2]),
    **{
        f"nearest, {rounding}, {transform}": resized(
            "nearest", transform, (7, 11), nearest_mode=rounding
        )
        for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
        for transform in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    },
    **{
        f"linear, {transform}": resized("linear", transform, (7, 11))
        for transform in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    },
    # jumps
    "sign": one("Sign", IMAGE),
    "floor": one("Floor", IMAGE),
    "ceil": one("Ceil", IMAGE),
    "round": one("Round", IMAGE),
    "greater": (
        [node("Greater", "x c", "g"), node("Cast", "g", to=1)], IMAGE, {"c": random_array(6)},
    ),
    "less": (
        [node("Less", "c x", "g"), node("Cast", "g", to=1)], IMAGE, {"c": random_array(6)},
    ),
    "less or equal": (
        [node("LessOrEqual", "x c", "g"), node("Cast", "g", to=1)], IMAGE, {"c": random_array(6)},
    ),
    "equal": (
        [node("Cast", "x", "i", to=7), node("Equal", "i c", "e"), node("Cast", "e", to=1)],
        IMAGE, {"c": ints([1])},
    ),
    "logic": (
        [
            node("Greater", "x c", "a"), node("Less", "x d", "b"), node("And", "a b", "e"),
            node("Or", "e b", "f"), node("Xor", "f a", "g"), node("Not", "g", "h"),
            node("Cast", "h", to=1),
        ],
        IMAGE, {"c": random_array(6), "d": random_array(6)},
    ),
    "where": ([node("Greater", "x c", "g"), node("Where", "g x d")], IMAGE,
              {"c": random_array(6), "d": random_array(5, 1)}),
    "bool": ([node("Cast", "x", "b", to=9), node("Cast", "b", to=1)], IMAGE, {}),
    "places": as_floats("ArgMax", IMAGE, axis=2),
    "places of the smallest": as_floats("ArgMin", IMAGE, axis=1, keepdims=0),
    "last of two": as_floats("ArgMax", (1, 2, 5), axis=1, select_last_index=1),
    "count": (
        [
            node("Softmax", "x", "p", axis=1), node("ArgMax", "p", "a", axis=1, keepdims=0),
            node("OneHot", "a d v", "h"), node("ReduceSum", "h", "s", keepdims=0),
            node("Cast", "s", to=1),
        ],
        (1, 2, 5, 6), {"d": ints([2]), "v": ints([0, 1])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operators_are_read(name: str, tmp_path: Any) -> None:
    nodes, shape, constants = CASES[name]
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, shape, constants))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, *network.input_shape, generator=generator)
    torch.testing.assert_close(network.graph(x), network.run(x), rtol=1e-5, atol=1e-5)


def test_a_softmax_before_places_is_left_out(tmp_path: Any) -> None:
    nodes, shape, constants = CASES["count"]
    graph = read_onnx(save_model(tmp_path / "net.onnx", nodes, shape, constants)).graph
    assert ops.Softmax not in {type(n.op) for n in graph.nodes}
    # Along another axis it changes the order.
    nodes = [node("Softmax", "x", "p", axis=2), *nodes[1:]]
    graph = read_onnx(save_model(tmp_path / "other.onnx", nodes, shape, constants)).graph
    assert ops.Softmax in {type(n.op) for n in graph.nodes}


def wrapped(change: Callable[[Any], Any], kind: type[ops.Op]) -> Callable[[Any], Any]:
    """A converter whose builder changes operations of one kind."""

    def wrap(convert: Any) -> Any:
        def wrong(build: Any, call: Any) -> Any:
            append = build.append
            build.append = lambda op, *inputs: append(
                change(op) if isinstance(op, kind) else op, *inputs
            )
            try:
                return convert(build, call)
            finally:
                del build.append

        return wrong

    return wrap


BUGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tile": ("Tile", wrapped(lambda op: ops.Take(op.index.flip(-1)), ops.Take)),
    "gather": ("Gather", wrapped(lambda op: ops.Take((op.index + 1) % 100), ops.Take)),
    "nearest, floor, half_pixel": (
        "Resize", wrapped(lambda op: ops.Take((op.index + 1) % 100), ops.Take),
    ),
    "linear, half_pixel": (
        "Resize", wrapped(lambda op: ops.Linear(op.weight.flip(0), None), ops.Linear),
    ),
    "greater": ("Greater", wrapped(lambda op: ops.Step("zero"), ops.Step)),
    "places": ("ArgMax", wrapped(lambda op: ops.Step("floor"), ops.ArgMax)),
    "round": ("Round", wrapped(lambda op: ops.Step("floor"), ops.Step)),
    "slopes": ("PRelu", wrapped(lambda op: ops.Scale(op.factor.abs()), ops.Scale)),
    "sum": ("ReduceSum", wrapped(lambda op: ops.Linear(op.weight * 1.001, None), ops.Linear)),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, shape, constants = CASES[name]
    path = save_model(tmp_path / "net.onnx", nodes, shape, constants)
    kind, wrong = BUGS[name]
    monkeypatch.setitem(operators.CONVERTERS, kind, wrong(operators.CONVERTERS[kind]))
    with pytest.raises(UserError):
        read_onnx(path)
