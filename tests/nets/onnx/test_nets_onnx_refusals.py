"""ONNX files that cannot be read: refused in one line that says why."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_models import node, random_array, save_model

from tightrope.errors import UserError
from tightrope.nets.onnx import convert as onnx_convert
from tightrope.nets.onnx import importing as onnx_import
from tightrope.nets.onnx.importing import read_onnx

ints = np.array


def refused(path: Path, *fragments: str) -> None:
    with pytest.raises(UserError) as caught:
        read_onnx(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    for fragment in fragments:
        assert fragment in message


def test_every_unsupported_operator_is_named_at_once(tmp_path):
    nodes = [
        node("Det", "x", "a"),
        node("LRN", "a", "b", size=3),
        node("Relu", "b", "c"),
        node("Det", "c", "y"),
        node("NonZero", "x", "unused"),
    ]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5))
    refused(path, "Det (Det_a, Det_y); LRN (LRN_b)")
    with pytest.raises(UserError) as caught:
        read_onnx(path)
    assert "Relu" not in str(caught.value) and "NonZero" not in str(caught.value)


REFUSED = {
    "zero": ([node("Div", "x c")], {"c": np.zeros(5, np.float32)}, "division by zero"),
    "nan": ([node("Add", "x c")], {"c": np.full(5, np.nan, np.float32)}, "infinite or NaN"),
    "slopes": ([node("PRelu", "x c")], {"c": random_array(3, 5)}, "slopes of shape (3, 5)"),
    "infinite slope": ([node("LeakyRelu", "x", alpha=np.inf)], {}, "alpha=inf"),
    "no step": (
        [node("Slice", "x s e a t")],
        {"s": ints([4]), "e": ints([0]), "a": ints([1]), "t": ints([0])},
        "slices without a step",
    ),
    "beyond": ([node("Gather", "x i", axis=1)], {"i": ints([[4, 5]])}, "an index beyond the 5"),
    "repeated twice": (
        [node("Tile", "x r")],
        {"r": ints([1, 0])},
        "repeats=[1, 0]",
    ),
    "odd": (
        [node("Reshape", "x s", "z"), node("ConvTranspose", "z w", output_shape=[1, 10])],
        {"s": ints([1, 1, 1, 5]), "w": random_array(1, 1, 1, 2)},
        "outputs of [1, 10], more than",
    ),
    "cubic": (
        [node("Reshape", "x s", "z"), node("Resize", "z - f", mode="cubic")],
        {"s": ints([1, 1, 1, 5]), "f": np.array([1, 1, 1, 2], np.float32)},
        "mode=cubic",
    ),
    "constant": ([node("Add", "c c")], {"c": random_array(3)}, "does not depend on the input"),
    "conv 1d": (
        [node("Unsqueeze", "x a", "z"), node("Conv", "z w")],
        {"a": ints([1]), "w": random_array(2, 1, 3, 1)},
        "a weight of shape (2, 1, 3, 1) for lines",
    ),
    "reflection": (
        [node("Pad", "x p", mode="reflect")],
        {"p": ints([0, 5, 0, 1])},
        "mode=reflect with [5, 1]",
    ),
    "random": (
        [node("RandomNormal", "", "r", shape=[1, 5]), node("Add", "x r")],
        {},
        "cannot handle these operators of the network: RandomNormal (RandomNormal_r)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed(name, tmp_path):
    nodes, constants, fragment = REFUSED[name]
    refused(save_model(tmp_path / "net.onnx", nodes, (1, 5), constants), fragment)


def test_an_operator_of_somebody_else(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Gelu", "x", domain="com.microsoft")], (1, 5))
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, path)
    refused(path, "com.microsoft.Gelu (Gelu_y)")


@pytest.mark.parametrize("shape", [("n",), (1, "m"), ()])
def test_inputs_without_a_fixed_shape(shape, tmp_path):
    refused(save_model(tmp_path / "net.onnx", [node("Relu", "x")], shape), "no fixed shape")


def test_inputs_of_two_types(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.DOUBLE, [1, 5]))
    onnx.save(model, path)
    refused(path, "its inputs must be of one type")


def test_an_output_that_is_a_constant(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5), {"c": random_array(3)})
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, [3]))
    onnx.save(model, path)
    refused(path, "the output c does not depend on the input")


def test_integer_networks(tmp_path):
    path = save_model(tmp_path / "n.onnx", [node("Relu", "x")], (1, 5), kind=TensorProto.INT32)
    refused(path, "must be of type float32 or float64")


def test_old_opsets(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    model = onnx.load(path)
    model.opset_import[0].version = 6
    onnx.save(model, path)
    refused(path, "opset 6", "opset 7 or later")


def test_damaged_and_missing_files(tmp_path):
    path = tmp_path / "net.onnx"
    refused(path, "cannot read", "No such file")
    refused(tmp_path, "cannot read")
    for content in (b"", b"no network at all", bytes(range(256)) * 20):
        path.write_bytes(content)
        refused(path, "is not an ONNX file")
    packed = tmp_path / "net.onnx.gz"
    packed.write_bytes(gzip.compress(b"x" * 1000)[:20])
    refused(packed, "cannot read")
    packed.write_bytes(b"no gzip")
    refused(packed, "cannot read")


def test_truncated_files(tmp_path):
    constants = {"w": random_array(50, 40)}
    whole = save_model(tmp_path / "w.onnx", [node("MatMul", "x w")], (1, 50), constants)
    content = whole.read_bytes()
    path = tmp_path / "net.onnx"
    for length in range(1, len(content), len(content) // 23):
        path.write_bytes(content[:length])
        refused(path)


@pytest.mark.parametrize("change", [1.0002, 2.0])
def test_a_network_that_differs_is_refused(change, tmp_path, monkeypatch):
    """The check finds a wrong conversion, a small one, too."""
    constants = {"w": random_array(5, 4)}
    path = save_model(tmp_path / "net.onnx", [node("MatMul", "x w")], (1, 5), constants)
    read_onnx(path)
    convert = onnx_convert.convert

    def convert_wrongly(*arguments):
        graph, held = convert(*arguments)
        return graph.map_tensors(lambda t: t * change), held

    monkeypatch.setattr(onnx_import, "convert", convert_wrongly)
    refused(path, "differs from onnxruntime at")


def test_a_difference_at_large_inputs_only_is_refused(tmp_path, monkeypatch):
    low, high = np.array(-40, np.float32), np.array(40, np.float32)
    path = save_model(tmp_path / "n.onnx", [node("Clip", "x l h")], (1, 5), {"l": low, "h": high})
    monkeypatch.setitem(onnx_convert.CONVERTERS, "Clip", lambda build, call: call.value())
    refused(path, "differs from onnxruntime at")


def test_networks_that_are_never_finite(tmp_path):
    nodes = [node("Mul", "x big", "a"), node("Add", "a most", "b"), node("Mul", "b big")]
    constants = {
        "big": np.full(5, 3e38, np.float32),
        "most": np.full(5, 3e38, np.float32),
    }
    refused(save_model(tmp_path / "net.onnx", nodes, (1, 5), constants), "infinite or NaN outputs")


def test_runs_need_fitting_samples(tmp_path):
    network = read_onnx(save_model(tmp_path / "net.onnx", [node("Relu", "x")], ("n", 5)))
    assert network.run(torch.zeros(3, 5)).shape == (3, 5)
    assert network.run(torch.zeros(0, 5)).shape == (0, 5)
    with pytest.raises(UserError, match="cannot run"):
        network.run(torch.zeros(3, 4))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_missing_packages(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=package) as caught:
        read_onnx(tmp_path / "net.onnx")
    assert "pip install 'tightrope[onnx]'" in str(caught.value)


def test_importing_needs_no_onnx():
    code = (
        "import sys, tightrope.nets.onnx.importing;"
        "sys.exit(any(name.split('.')[0] in ('onnx', 'onnxruntime') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
