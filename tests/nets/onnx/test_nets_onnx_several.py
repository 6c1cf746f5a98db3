"""Networks with several inputs and outputs: parts of one flat input, and of one flat output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from onnx_models import node, random_array, save_model

from tightrope.answer import Verdict
from tightrope.certification.verifying import verify_file
from tightrope.nets.onnx.importing import read_onnx


def two_and_two(path: Path) -> Path:
    """Two inputs, of which one comes in between constants, and two outputs."""
    nodes = [
        node("Gemm", "x w", "a"),
        node("Reshape", "z s", "b"),
        node("Sub", "a b", "c"),
        node("Relu", "c", "y"),
        node("ReduceSum", "z", "v", keepdims=0),
    ]
    constants = {"w": random_array(5, 4), "s": np.array([1, 4])}
    save_model(path, nodes, (1, 5), constants)
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 2, 2]))
    model.graph.output.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, []))
    onnx.save(model, path)
    return path


def test_inputs_and_outputs_in_their_order(tmp_path):
    path = two_and_two(tmp_path / "net.onnx")
    network = read_onnx(path)
    assert network.input_shape == (9,) and network.output_size == 5 and not network.batched
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(str(path))
    for row in x:
        given = {"x": row[:5].view(1, 5).numpy(), "z": row[5:].view(1, 2, 2).numpy()}
        y, v = session.run(["y", "v"], given)
        expected = torch.from_numpy(np.concatenate((y.reshape(-1), v.reshape(-1))))
        torch.testing.assert_close(network.run(row[None])[0], expected)
        torch.testing.assert_close(network.graph(row[None])[0], expected)


def specification(path: Path, constraint: str) -> Path:
    lines = [f"(declare-const X_{i} Real)" for i in range(9)]
    lines += [f"(declare-const Y_{i} Real)" for i in range(5)]
    lines += [
        f"(assert (<= X_{i} 1.0))\n(assert (>= X_{i} {0.5 if i > 4 else 0}))" for i in range(9)
    ]
    path.write_text("\n".join([*lines, f"(assert {constraint})"]))
    return path


def test_properties_of_several_inputs_and_outputs(tmp_path):
    """The last output is the sum of the last four inputs, each at least 0.5."""
    path = two_and_two(tmp_path / "net.onnx")
    impossible = specification(tmp_path / "a.vnnlib", "(<= Y_4 1.99)")
    assert verify_file(path, impossible, timeout=30).verdict == Verdict.VERIFIED
    possible = specification(tmp_path / "b.vnnlib", "(<= Y_4 2.1)")
    answer = verify_file(path, possible, timeout=30)
    assert answer.verdict == Verdict.FALSIFIED


def test_an_input_that_nobody_reads_counts(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 3]))
    onnx.save(model, path)
    network = read_onnx(path)
    assert network.input_shape == (8,)
    x = torch.randn(4, 8)
    torch.testing.assert_close(network.run(x), x[:, :5].relu())


def test_an_output_that_is_an_input(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 5]))
    onnx.save(model, path)
    network = read_onnx(path)
    x = torch.randn(4, 5)
    torch.testing.assert_close(network.run(x), torch.cat((x.relu(), x), 1))
