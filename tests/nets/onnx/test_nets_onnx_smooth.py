"""Smooth operators of ONNX, products of two values and normalisations, one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx_agreement import IMAGE, agrees, kinds
from onnx_models import node, random_array, save_model

from tightrope.errors import UserError
from tightrope.graph import ops
from tightrope.nets.onnx import operators as onnx_operators
from tightrope.nets.onnx.importing import read_onnx

SOME = {"c": np.array(0.1, np.float32)}
TWO = {f"{name}": random_array(2, seed=i) for i, name in enumerate("sb")}

SINGLE = {
    "exp": (13, [node("Exp", "x")], {}),
    "log": (13, [node("Softplus", "x", "s"), node("Add", "s c", "a"), node("Log", "a")], SOME),
    "sqrt": (13, [node("Softplus", "x", "s"), node("Add", "s c", "a"), node("Sqrt", "a")], SOME),
    "reciprocal": (13, [node("Exp", "x", "a"), node("Reciprocal", "a")], {}),
    "sin": (13, [node("Sin", "x")], {}),
    "cos": (13, [node("Cos", "x")], {}),
    "erf": (13, [node("Erf", "x")], {}),
    "mish": (18, [node("Mish", "x")], {}),
    "hardswish": (14, [node("HardSwish", "x")], {}),
    "gelu": (20, [node("Gelu", "x")], {}),
    "gelu by tanh": (20, [node("Gelu", "x", approximate="tanh")], {}),
    "elu": (13, [node("Elu", "x", alpha=0.7)], {}),
    "selu": (13, [node("Selu", "x")], {}),
    "celu": (13, [node("Celu", "x", alpha=2.0)], {}),
    "softplus": (13, [node("Softplus", "x")], {}),
    "square": (13, [node("Pow", "x p")], {"p": np.array(2, np.float32)}),
    "cube": (13, [node("Pow", "x p")], {"p": np.array(3, np.int64)}),
    "root by power": (13, [node("Exp", "x", "a"), node("Pow", "a p")], {"p": np.float32([0.5])}),
    "power": (13, [node("Exp", "x", "a"), node("Pow", "a p")], {"p": np.array(1.5, np.float32)}),
    "product": (13, [node("Tanh", "x", "a"), node("Mul", "x a")], {}),
    "product with itself": (13, [node("Mul", "x x")], {}),
    "product by channels": (
        13,
        [node("ReduceMean", "x", "a", axes=[2, 3]), node("Mul", "a x")],
        {},
    ),
    "quotient": (13, [node("Exp", "x", "a"), node("Div", "x a")], {}),
    "quotient of a constant": (
        13,
        [node("Exp", "x", "a"), node("Div", "c a")],
        {"c": random_array(2, 1, 1)},
    ),
    "matrices": (
        13,
        [node("Transpose", "x", "a", perm=[0, 1, 3, 2]), node("MatMul", "x a")],
        {},
    ),
    "softmax": (13, [node("Softmax", "x")], {}),
    "softmax of channels": (13, [node("Softmax", "x", axis=1)], {}),
    "softmax of all": (11, [node("Softmax", "x")], {}),
    "logarithm of softmax": (13, [node("LogSoftmax", "x", axis=2)], {}),
    "layer norm": (
        17,
        [node("LayerNormalization", "x s b", epsilon=0.01)],
        {"s": random_array(5), "b": random_array(5, seed=1)},
    ),
    "layer norm of two": (
        17,
        [node("LayerNormalization", "x s", axis=2)],
        {"s": random_array(6, 5)},
    ),
    "instance norm": (13, [node("InstanceNormalization", "x s b", epsilon=0.1)], TWO),
    "group norm": (21, [node("GroupNormalization", "x s b", num_groups=1)], TWO),
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_operator(name, tmp_path):
    opset, nodes, constants = SINGLE[name]
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, IMAGE, constants, opset=opset))
    assert network.graph.output_shape == (network.output_size,)
    agrees(network)


def test_equal_factors_become_a_square(tmp_path):
    network = read_onnx(save_model(tmp_path / "net.onnx", [node("Mul", "x x")], IMAGE, {}))
    assert "Function" in kinds(network) and "Mul" not in kinds(network)


REFUSED = {
    "exponents": ([node("Pow", "x p")], {"p": random_array(5)}, "exponents of shape"),
    "to the zeroth": ([node("Pow", "x p")], {"p": np.array(0, np.float32)}, "the exponent 0"),
    "base": ([node("Pow", "c x")], {"c": np.array(-2, np.float32)}, "powers of -2"),
    "elu": ([node("Elu", "x", alpha=-1.0)], {}, "alpha -1"),
    "weights": (
        [node("Relu", "x", "a"), node("LayerNormalization", "x a")],
        {},
        "depends on the network",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name, tmp_path):
    nodes, constants, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        read_onnx(save_model(tmp_path / "net.onnx", nodes, IMAGE, constants, opset=17))


def with_op(op):
    return lambda build, call: build.apply(call.value(), op)


def turned(converter, change):
    """Return a converter of a changed call."""

    def convert(build, call):
        return converter(build, type(call)(**{**vars(call), **change(call)}))

    return convert


PLANTED = {
    "sine for cosine": ("Cos", "cos", with_op(ops.Function("sin"))),
    "the other gelu": ("Gelu", "gelu", with_op(ops.Function("gelu_tanh"))),
    "silu for gelu": ("Gelu", "gelu", with_op(ops.Function("silu"))),
    "another alpha": ("Elu", "elu", with_op(ops.Function("elu", (0.7001, 1.0, 1.0)))),
    "a cube for a square": ("Pow", "square", with_op(ops.Function("power", (3.0,)))),
    "softmax of another axis": (
        "Softmax",
        "softmax",
        turned(onnx_operators.CONVERTERS["Softmax"], lambda call: {"attributes": {"axis": 2}}),
    ),
    "no logarithm": (
        "LogSoftmax",
        "logarithm of softmax",
        turned(onnx_operators.CONVERTERS["Softmax"], lambda call: {"kind": "Softmax"}),
    ),
    "another epsilon": (
        "LayerNormalization",
        "layer norm",
        turned(
            onnx_operators.CONVERTERS["LayerNormalization"],
            lambda call: {"attributes": {"epsilon": 0.0101}},
        ),
    ),
    "factors added": (
        "Mul",
        "product",
        lambda build, call: build.place(
            build.append(ops.Add(), *(v.position for v in call.inputs)), call.inputs[0].shape
        ),
    ),
    "the other quotient": (
        "Div",
        "quotient",
        turned(onnx_operators.CONVERTERS["Div"], lambda call: {"inputs": tuple(call.inputs[::-1])}),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_converters_are_found(name, tmp_path, monkeypatch):
    kind, of, converter = PLANTED[name]
    opset, nodes, constants = SINGLE[of]
    path = save_model(tmp_path / "net.onnx", nodes, IMAGE, constants, opset=opset)
    read_onnx(path)
    monkeypatch.setitem(onnx_operators.CONVERTERS, kind, converter)
    with pytest.raises(UserError, match="the graph differs from onnxruntime"):
        read_onnx(path)


def test_large_numbers_under_a_softmax_do_not_overflow(tmp_path):
    nodes = [node("Mul", "x c", "a"), node("Softmax", "a")]
    constants = {"c": np.array(1e4, np.float32)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, IMAGE, constants))
    found = network.graph(torch.rand(3, *IMAGE[1:]))
    assert bool(torch.isfinite(found).all()) and float(found.max()) > 0.99


def test_a_variance_by_its_parts(tmp_path):
    """LayerNorm as older exporters write it: means, a difference, a square, a root, a quotient."""
    nodes = [
        node("Pow", "x p", "square"),
        node("ReduceMean", "square", "mean", axes=[-1]),
        node("Add", "mean e", "more"),
        node("Sqrt", "more", "root"),
        node("Div", "x root"),
    ]
    constants = {"p": np.array(2, np.float32), "e": np.array(1e-3, np.float32)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, IMAGE, constants))
    agrees(network)
    assert {"Function", "Mul"} <= set(kinds(network))
