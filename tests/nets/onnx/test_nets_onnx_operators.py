"""Operators of ONNX, one by one: each computes what the reference computes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto
from onnx_agreement import IMAGE, W, agrees, ints, kinds
from onnx_models import node, random_array, save_model

from tightrope.errors import UserError
from tightrope.nets.onnx.importing import read_onnx

FLOATS = {"image": random_array(*IMAGE), "channels": random_array(2, 1, 1), "one": random_array(1)}

SINGLE = {
    "conv": (node("Conv", "x w b", pads=[1, 1, 1, 1]), {"w": W, "b": random_array(3)}),
    "conv no bias": (node("Conv", "x w", strides=[2, 1], dilations=[1, 2]), {"w": W}),
    "conv uneven pads": (node("Conv", "x w", pads=[0, 1, 2, 0]), {"w": W}),
    "conv upper": (node("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2]), {"w": W}),
    "conv lower": (node("Conv", "x w", auto_pad="SAME_LOWER", strides=[2, 2]), {"w": W}),
    "conv valid": (node("Conv", "x w", auto_pad="VALID"), {"w": W}),
    "conv groups": (node("Conv", "x w", group=2), {"w": random_array(4, 1, 2, 3)}),
    "add": (node("Add", "x c"), {"c": FLOATS["image"]}),
    "add channels": (node("Add", "c x"), {"c": FLOATS["channels"]}),
    "add number": (node("Add", "x c"), {"c": np.array(0.5, np.float32)}),
    "add last": (node("Add", "x c"), {"c": random_array(5)}),
    "sub": (node("Sub", "x c"), {"c": FLOATS["channels"]}),
    "sub from": (node("Sub", "c x"), {"c": FLOATS["channels"]}),
    "mul": (node("Mul", "c x"), {"c": FLOATS["image"][0]}),
    "div": (node("Div", "x c"), {"c": FLOATS["channels"] + 3}),
    "neg": (node("Neg", "x"), {}),
    "relu": (node("Relu", "x"), {}),
    "leaky": (node("LeakyRelu", "x", alpha=0.3), {}),
    "leaky default": (node("LeakyRelu", "x"), {}),
    "prelu": (node("PRelu", "x c"), {"c": np.full((2, 1, 1), 0.25, np.float32)}),
    "sigmoid": (node("Sigmoid", "x"), {}),
    "tanh": (node("Tanh", "x"), {}),
    "flatten": (node("Flatten", "x"), {}),
    "flatten 2": (node("Flatten", "x", axis=2), {}),
    "flatten last": (node("Flatten", "x", axis=-1), {}),
    "reshape": (node("Reshape", "x s"), {"s": ints([0, -1, 3, 5])}),
    "reshape no batch": (node("Reshape", "x s"), {"s": ints([-1])}),
    "transpose": (node("Transpose", "x", perm=[0, 3, 1, 2]), {}),
    "transpose all": (node("Transpose", "x"), {}),
    "transpose batch": (node("Transpose", "x", perm=[1, 0, 2, 3]), {}),
    "pool": (node("AveragePool", "x", kernel_shape=[2, 2], strides=[2, 1]), {}),
    "pool pads": (node("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1]), {}),
    "pool counts": (
        node("AveragePool", "x", kernel_shape=[3, 2], pads=[1, 0, 0, 1], count_include_pad=1),
        {},
    ),
    "pool ceil": (
        node("AveragePool", "x", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        {},
    ),
    "global average": (node("GlobalAveragePool", "x"), {}),
    "global max": (node("GlobalMaxPool", "x"), {}),
    "max pool": (node("MaxPool", "x", kernel_shape=[2, 3], pads=[1, 1, 1, 1]), {}),
    "max pool ceil": (
        node("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1, dilations=[1, 2]),
        {},
    ),
    "batch norm": (
        node("BatchNormalization", "x s b m v", epsilon=0.01),
        {
            **{name: random_array(2, seed=i) for i, name in enumerate("sbm")},
            "v": random_array(2, low=0.1),
        },
    ),
    "identity": (node("Identity", "x"), {}),
    "cast": (node("Cast", "x", to=TensorProto.FLOAT), {}),
    "max": (node("Max", "x c"), {"c": FLOATS["channels"]}),
    "min": (node("Min", "c x"), {"c": FLOATS["channels"]}),
    "gather": (node("Gather", "x i", axis=3), {"i": ints(2)}),
    "gather batch": (node("Gather", "x i"), {"i": ints(0)}),
    "gather range": (node("Gather", "x i", axis=2), {"i": ints([1, 3, 5])}),
    "matmul": (node("MatMul", "x w"), {"w": random_array(5, 4)}),
    "matmul vector": (node("MatMul", "x w"), {"w": random_array(5)}),
    "matmul from left": (node("MatMul", "w x"), {"w": random_array(4, 6)}),
    "vector from left": (node("MatMul", "w x"), {"w": random_array(6)}),
    "mean": (node("ReduceMean", "x", axes=[2, 3]), {}),
    "mean channels": (node("ReduceMean", "x", axes=[1], keepdims=0), {}),
    "mean of all": (node("ReduceMean", "x", keepdims=0), {}),
    "sum": (node("ReduceSum", "x a"), {"a": ints([1, -1])}),
}


@pytest.mark.parametrize("shape", [IMAGE, ("batch", *IMAGE[1:])], ids=["fixed", "free"])
@pytest.mark.parametrize("name", SINGLE)
def test_one_operator(name, shape, tmp_path):
    operator, constants = SINGLE[name]
    network = read_onnx(save_model(tmp_path / "net.onnx", [operator], shape, constants))
    assert network.input_shape == network.graph.input_shape == IMAGE[1:]
    assert network.graph.output_shape == (network.output_size,)
    agrees(network)


BY_OPSET = {
    "pad attributes": (10, node("Pad", "x", pads=[0, 0, 1, 0, 0, 0, 0, 2], value=0.5), {}),
    "pad inputs": (
        11,
        node("Pad", "x p v"),
        {"p": ints([0, 0, 1, 0, 0, 1, 0, 2]), "v": np.array(-1, np.float32)},
    ),
    "pad zero": (13, node("Pad", "x p"), {"p": ints([0, 0, 1, 1, 0, 0, 1, 1])}),
    "pad axes": (18, node("Pad", "x p - a"), {"p": ints([1, 0, 0, 1]), "a": ints([-2, 3])}),
    "slice attributes": (9, node("Slice", "x", axes=[2, 3], starts=[1, -3], ends=[9999, -1]), {}),
    "slice inputs": (
        10,
        node("Slice", "x s e a t"),
        {"s": ints([1, 0]), "e": ints([5, 2**62]), "a": ints([-2, 3]), "t": ints([2, 3])},
    ),
    "slice no axes": (13, node("Slice", "x s e"), {"s": ints([0, 1]), "e": ints([1, 2])}),
    "clip attributes": (9, node("Clip", "x", min=-0.5, max=6.0), {}),
    "clip low": (10, node("Clip", "x", min=-0.25), {}),
    "clip zero": (10, node("Clip", "x", min=0.0), {}),
    "clip inputs": (
        12,
        node("Clip", "x a b"),
        {"a": np.array(-0.5, np.float32), "b": np.array(0.75, np.float32)},
    ),
    "clip high": (13, node("Clip", "x - b"), {"b": np.array(0.75, np.float32)}),
    "dropout attribute": (10, node("Dropout", "x", ratio=0.3), {}),
    "dropout inputs": (13, node("Dropout", "x r"), {"r": np.array(0.3, np.float32)}),
    "unsqueeze attribute": (11, node("Unsqueeze", "x", axes=[0, 2]), {}),
    "unsqueeze input": (13, node("Unsqueeze", "x a"), {"a": ints([-1])}),
    "squeeze attribute": (11, node("Squeeze", "x", axes=[0]), {}),
    "squeeze input": (13, node("Squeeze", "x a"), {"a": ints([0])}),
    "squeeze all": (13, node("Squeeze", "x"), {}),
    "mean attribute": (17, node("ReduceMean", "x", axes=[3], keepdims=0), {}),
    "mean input": (18, node("ReduceMean", "x a"), {"a": ints([1, 2])}),
    "sum attribute": (11, node("ReduceSum", "x", axes=[0, 2]), {}),
    "relu 8": (8, node("Relu", "x"), {}),
    "relu 21": (21, node("Relu", "x"), {}),
    "reshape 21": (21, node("Reshape", "x s", allowzero=1), {"s": ints([1, -1])}),
}


@pytest.mark.parametrize("name", BY_OPSET)
def test_operators_whose_form_depends_on_the_opset(name, tmp_path):
    opset, operator, constants = BY_OPSET[name]
    path = save_model(tmp_path / "net.onnx", [operator], IMAGE, constants, opset=opset)
    agrees(read_onnx(path))


GEMM = {
    "plain": ({}, (5, 4), (4,)),
    "transB": ({"transB": 1}, (4, 5), (4,)),
    "alpha": ({"alpha": 0.5, "beta": 2.0, "transB": 1}, (4, 5), (1, 4)),
    "no bias": ({}, (5, 4), None),
    "beta 0": ({"beta": 0.0}, (5, 4), (4,)),
    "number": ({}, (5, 4), (1,)),
}


@pytest.mark.parametrize("name", GEMM)
def test_gemm(name, tmp_path):
    attributes, weight, bias = GEMM[name]
    constants = {"w": random_array(*weight)}
    if bias:
        constants["b"] = random_array(*bias, seed=1)
    operator = node("Gemm", "x w b" if bias else "x w", **attributes)
    network = read_onnx(save_model(tmp_path / "net.onnx", [operator], ("n", 5), constants))
    agrees(network)
    if name in ("plain", "transB"):
        assert kinds(network) == ["Input", "Linear"]
        layer = network.graph.nodes[1].op
        stored = constants["w"] if name == "transB" else constants["w"].T
        assert np.array_equal(layer.weight.numpy(), stored)
        assert np.array_equal(layer.bias.numpy(), constants["b"])


def test_gemm_with_the_constant_on_the_left(tmp_path):
    nodes = [node("Gemm", "w x b", transB=1)]
    constants = {"w": random_array(4, 5), "b": random_array(4, 1)}
    agrees(read_onnx(save_model(tmp_path / "net.onnx", nodes, (1, 5), constants)))


def test_beta_that_would_round_the_bias_is_refused(tmp_path):
    nodes = [node("Gemm", "x w b", beta=0.3)]
    constants = {"w": random_array(5, 4), "b": random_array(4)}
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), constants)
    with pytest.raises(UserError, match=r"Gemm \(Gemm_y: beta=0\.3"):
        read_onnx(path)
