"""Operators of ONNX that are made of others: the same as onnxruntime, bounded and verified."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx_agreement import IMAGE, agrees, kinds
from onnx_models import node, random_array, save_model

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.errors import UserError
from tightrope.nets.onnx.importing import OnnxNetwork, read_onnx

EPS = 1e-3
AXES = {"a": np.array([2])}
ROWS = (1, 3, 4)
STEPS = (4, 1, 3)  # a sequence of four
INF = np.float32(np.inf)
CAUSAL = np.tril(np.ones((3, 3), bool))
SCORES = [node("Transpose", "x", "t", perm=[0, 2, 1]), node("MatMul", "x t", "s")]


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def cell(gates: int, size: int = 2, ways: int = 1, bias: bool = True) -> dict[str, np.ndarray]:
    found = {
        "W": random_array(ways, gates * size, 3),
        "R": random_array(ways, gates * size, size, seed=1),
    }
    return {**found, "B": random_array(ways, 2 * gates * size, seed=2)} if bias else found


# Opset, shape of the input, nodes, constants.
CASES = {
    "einsum": (13, ROWS, [node("Einsum", "x x", equation="bij,bkj->bik")], {}),
    "einsum with a constant": (
        13, ROWS, [node("Einsum", "x w", equation="bij,kj->bki")], {"w": random_array(5, 4)},
    ),
    "einsum, a matrix for each": (
        13, ROWS, [node("Einsum", "w x", equation="ijk,bij->bik")], {"w": random_array(3, 4, 2)},
    ),
    "einsum, dots": (
        13, ROWS, [node("Einsum", "x w", equation="...j,j->...j")], {"w": random_array(4)},
    ),
    "L1": (13, IMAGE, [node("ReduceL1", "x", axes=[1])], {}),
    "L2": (18, IMAGE, [node("ReduceL2", "x a")], AXES),
    "sum of squares": (13, IMAGE, [node("ReduceSumSquare", "x", axes=[2, 3], keepdims=0)], {}),
    "logsumexp": (13, IMAGE, [node("ReduceLogSumExp", "x", axes=[3])], {}),
    "logarithm of a sum": (
        13, IMAGE, [node("Exp", "x", "e"), node("ReduceLogSum", "e", axes=[1])], {},
    ),
    "product": (13, ROWS, [node("ReduceProd", "x", axes=[2])], {}),
    "cumsum": (14, ROWS, [node("CumSum", "x a")], {"a": np.array(2)}),
    "cumsum, exclusive": (14, ROWS, [node("CumSum", "x a", exclusive=1)], {"a": np.array(1)}),
    "cumsum, reverse": (14, ROWS, [node("CumSum", "x a", reverse=1)], {"a": np.array(-1)}),
    "lower triangle": (14, ROWS, [node("Trilu", "x", upper=0)], {}),
    "upper triangle": (14, ROWS, [node("Trilu", "x k")], {"k": np.array(1)}),
    "scatter nd": (
        18, (3, 4), [node("ScatterND", "x i u")],
        {"i": np.array([[2], [0]]), "u": random_array(2, 4)},
    ),
    "scatter nd into a constant": (
        18, (1, 4), [node("ScatterND", "c i x")], {"i": np.array([[2]]), "c": random_array(3, 4)},
    ),
    "scatter elements": (
        18, (1, 4), [node("Relu", "x", "r"), node("ScatterElements", "c i r", axis=1)],
        {"i": np.array([[3, 1, 0, 4]]), "c": random_array(1, 5)},
    ),
    "concat with constants": (
        13, IMAGE, [node("Concat", "c x c", axis=1)], {"c": random_array(1, 1, 6, 5)},
    ),
    "concat of the batch": (13, (1, 4), [node("Concat", "x c", axis=0)], {"c": random_array(2, 4)}),
    "where, known": (
        13, ROWS, [node("Where", "m x c")],
        {"m": np.array([True, False, True, True]), "c": np.array(0.5, np.float32)},
    ),
    "where, known, of two": (
        13, ROWS, [node("Neg", "x", "n"), node("Where", "m x n")],
        {"m": np.array([[True], [False], [True]])},
    ),
    "where, wider": (
        13, (1, 1, 4), [node("Where", "m c x")],
        {"m": np.array([[True], [False], [True]]), "c": random_array(3, 1)},
    ),
    "masked softmax": (
        13, ROWS, [*SCORES, node("Where", "m s c", "w"), node("Softmax", "w")],
        {"m": CAUSAL, "c": -INF},
    ),
    "minus infinity added": (
        13, ROWS, [*SCORES, node("Add", "c s", "w"), node("Softmax", "w", axis=2)],
        {"c": np.where(CAUSAL, np.float32(0), -INF)},
    ),
    "sum": (13, ROWS, [node("Relu", "x", "r"), node("Sum", "c x r x")], {"c": random_array(4)}),
    "mean": (13, ROWS, [node("Relu", "x", "r"), node("Mean", "x r x")], {}),
    "softsign": (13, ROWS, [node("Softsign", "x")], {}),
    "atan": (13, ROWS, [node("Atan", "x")], {}),
    "lp normalization": (
        13, ROWS, [node("Add", "x c", "p"), node("LpNormalization", "p", axis=1)],
        {"c": np.array(2, np.float32)},
    ),
    "l1 normalization": (
        13, ROWS, [node("Add", "x c", "p"), node("LpNormalization", "p", p=1)],
        {"c": np.array(2, np.float32)},
    ),
    "shrink with a jump": (13, ROWS, [node("Shrink", "x", lambd=0.3, bias=0.1)], {}),
    "thresholded": (13, ROWS, [node("ThresholdedRelu", "x", alpha=0.4)], {}),
    "quantized": (
        13, ROWS, [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z")],
        {"s": np.array(0.25, np.float32), "z": np.array(3, np.int8)},
    ),
    "quantized weights": (
        13, (1, 4), [node("DequantizeLinear", "w s", "d", axis=1), node("MatMul", "x d")],
        {"w": (100 * random_array(4, 3)).astype(np.int8), "s": np.float32([0.01, 0.02, 0.03])},
    ),
    "lstm": (14, STEPS, [node("LSTM", "x W R B", "y", hidden_size=2)], cell(4)),
    "lstm, reverse": (
        14, STEPS, [node("LSTM", "x W R", "y h", hidden_size=2, direction="reverse")],
        cell(4, bias=False),
    ),
    "lstm, both ways": (
        14, STEPS, [node("LSTM", "x W R B", "z h c", hidden_size=2, direction="bidirectional"),
                    node("Add", "h c")], cell(4, ways=2),
    ),
    "lstm that starts somewhere": (
        14, STEPS, [node("LSTM", "x W R B - h c", "y", hidden_size=2)],
        {**cell(4), "h": random_array(1, 1, 2, seed=8), "c": random_array(1, 1, 2, seed=9)},
    ),
    "gru": (
        14, STEPS, [node("GRU", "x W R B", "y", hidden_size=2, linear_before_reset=1)], cell(3),
    ),
    "max pool, uneven": (
        13, IMAGE,
        [node("MaxPool", "x", kernel_shape=[3, 2], strides=[2, 2], pads=[0, 1, 2, 0])], {},
    ),
    "max pool, upper": (
        11, IMAGE,
        [node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 1], auto_pad="SAME_UPPER")], {},
    ),
    "max pool of what a ReLU gave": (
        11, IMAGE, [node("Relu", "x", "r"), node("Transpose", "r", "t", perm=[0, 1, 3, 2]),
                    node("MaxPool", "t", kernel_shape=[2, 2], pads=[0, 0, 1, 1])], {},
    ),
    "average pool, uneven": (
        11, IMAGE,
        [node("AveragePool", "x", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 2])], {},
    ),
    "matrices, each for one": (13, ROWS, [node("MatMul", "x w")], {"w": random_array(2, 4, 5)}),
    "matrices from the left": (
        13, (2, 3, 4), [node("MatMul", "w x")], {"w": random_array(2, 5, 3)},
    ),
    "matrices for heads": (
        13, (2, 3, 4), [node("Reshape", "x s", "h"), node("MatMul", "h w")],
        {"s": i64(2, 1, 3, 4), "w": random_array(5, 4, 3)},
    ),
    "gemm of constants": (
        13, (1, 4), [node("Gemm", "z w b", "c", transB=1), node("Sub", "x c")],
        {"z": random_array(1, 3), "w": random_array(4, 3), "b": random_array(4)},
    ),
    "places of constants": (
        13, (1, 4), [node("NonZero", "m", "n"), node("Squeeze", "n a", "p"),
                     node("Gather", "x p", axis=1)],
        {"m": np.array([True, False, True, True]), "a": i64(0)},
    ),
    "scatter": (
        10, (1, 4), [node("Scatter", "x i u", axis=1)],
        {"i": np.array([[3, 1]]), "u": random_array(1, 2)},
    ),
    "clip between values": (
        13, ROWS, [node("Neg", "x", "n"), node("ReduceMax", "x", "h", keepdims=0),
                   node("Clip", "n - h")], {},
    ),
    "power of a constant": (
        13, ROWS, [node("Tanh", "x", "t"), node("Pow", "c t")], {"c": np.array(3, np.float32)},
    ),
    "hyperbolic": (
        13, ROWS, [node("Tanh", "x", "t"), node("Sinh", "t", "s"), node("Cosh", "t", "c"),
                   node("Sub", "s c")], {},
    ),
    "hardmax": (13, ROWS, [node("Hardmax", "x", axis=1)], {}),
    "cast like": (
        15, ROWS, [node("Less", "x c", "b"), node("CastLike", "b x")], {"c": random_array(4)},
    ),
    "tangent": (13, ROWS, [node("Tanh", "x", "t"), node("Tan", "t")], {}),
    "swish": (24, ROWS, [node("Swish", "x", alpha=1.5)], {}),
    "root mean square": (
        23, ROWS, [node("RMSNormalization", "x g")], {"g": random_array(4, low=0.5)},
    ),
    "rnn": (14, STEPS, [node("RNN", "x W R B", "y", hidden_size=2)], cell(1)),
}  # fmt: skip


def made(name: str, folder) -> OnnxNetwork:
    opset, shape, nodes, constants = CASES[name]
    path = folder / "net.onnx"
    return read_onnx(save_model(path, nodes, shape, constants, opset=opset))


@pytest.mark.parametrize("name", CASES)
def test_operators_agree_and_are_bounded_and_verified(name, tmp_path):
    network = made(name, tmp_path)
    agrees(network)
    shape = tuple(network.input_shape)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    lower, upper = x - EPS, x + EPS
    noise = torch.rand(50, *shape, generator=torch.Generator().manual_seed(1))
    noise[::2] = noise[::2].round()
    outputs = network.run(lower + noise * (upper - lower)).double()
    slack = 1e-5 * (1 + outputs.abs())
    box = tr.Box(lower[None], upper[None])
    for method in ("ibp", "crown-ibp"):
        found = tr.bounds(network.graph, box, method=method)
        assert bool(torch.isfinite(found.lower).all() & torch.isfinite(found.upper).all())
        assert bool(((outputs >= found.lower - slack) & (outputs <= found.upper + slack)).all())
    middle = outputs.mean(0)
    for low, verdict in ((-1.5, Verdict.VERIFIED), (1.5, Verdict.FALSIFIED)):
        asked = tr.within(middle + low, middle + 2.5)
        answer = tr.verify(tmp_path / "net.onnx", box=(lower, upper), spec=asked)
        assert answer.verdict == verdict


def test_products_with_constants_are_layers(tmp_path):
    assert "Linear" in kinds(made("einsum with a constant", tmp_path))
    assert "Conv2d" in kinds(made("einsum, a matrix for each", tmp_path))
    assert "MatMul" in kinds(made("einsum", tmp_path))


REFUSED = {
    "diagonal": ((1, 3, 3), [node("Einsum", "x", equation="bii->b")], {}, "a diagonal"),
    "sizes": (
        (1, 3), [node("Einsum", "x w", equation="bi,ij->bj")], {"w": random_array(1, 2)}, "differ",
    ),
    "twice": (
        (3, 4), [node("ScatterND", "x i u")],
        {"i": np.array([[2], [2]]), "u": random_array(2, 4)}, "twice",
    ),
    "minus infinity": (
        (1, 3), [node("Where", "m x c", "w"), node("Relu", "w")],
        {"m": np.array([True, False, True]), "c": -INF}, "minus infinity",
    ),
    "minus infinity at the end": (
        (1, 3), [node("Where", "m x c")],
        {"m": np.array([True, False, True]), "c": -INF}, "is minus infinity at some places",
    ),
    "nothing left": (
        (1, 3), [node("Where", "m x c", "w"), node("Softmax", "w")],
        {"m": np.array([False] * 3), "c": -INF}, "nothing but minus infinity",
    ),
    "windows of nothing": (
        IMAGE, [node("MaxPool", "x", kernel_shape=[2, 2], pads=[0, 0, 0, 3])], {}, "as wide as",
    ),
    "power": ((1, 3), [node("Exp", "x", "e"), node("Pow", "e x")], {}, "a base and an exponent"),
    "gru": (STEPS, [node("GRU", "x W R B", "y", hidden_size=2)], cell(3), "linear_before_reset"),
    "activations": (
        STEPS, [node("RNN", "x W R B", "y", hidden_size=2, activations=["Relu"])], cell(1),
        "activations",
    ),
    "scale": (
        (1, 3), [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z")],
        {"s": np.array(0, np.float32), "z": np.array(3, np.int8)}, "not positive",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name, tmp_path):
    shape, nodes, constants, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        read_onnx(save_model(tmp_path / "net.onnx", nodes, shape, constants, opset=17))
