"""ONNX files compute what PyTorch computes, or are not written."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from tightrope import nets
from tightrope.errors import UserError
from tightrope.nets.onnx import exporting as export


def trained_looking(name: str, shape: tuple[int, ...], **settings) -> nn.Module:
    """A network whose BatchNorm statistics and affine maps are not the initial ones."""
    torch.manual_seed(0)
    net = nets.build(name, shape, 10, **settings)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    for _ in range(3):
        net(torch.rand(8, *shape))
    return net


@pytest.mark.parametrize(
    ("name", "shape", "settings"),
    [
        ("cnn3", (1, 28, 28), {"normalize": (0.1307, 0.3081)}),
        ("resnet", (3, 16, 16), {"width": 4, "normalize": ((0.5, 0.4, 0.3), (0.2, 0.2, 0.3))}),
    ],
)
def test_export_agrees_with_onnxruntime(name, shape, settings, tmp_path, capfd):
    net = trained_looking(name, shape, **settings)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    path = tmp_path / "sub" / "net.onnx"
    difference = nets.export_onnx(net, shape, path)
    assert capfd.readouterr() == ("", "")
    assert 0 <= difference <= 1e-4
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training and all(p.requires_grad for p in net.parameters())
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())

    assert [file.name for file in path.parent.iterdir()] == ["net.onnx"]
    model = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(model)
    assert not any(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer)
    content = path.read_bytes()
    assert b".py" not in content and str(Path.cwd()).encode() not in content
    operators = {node.op_type for node in model.graph.node}
    wanted = {"Sub", "Div", "Conv", "Relu", "Add", "AveragePool", "Reshape", "Gemm"}
    assert operators <= wanted  # BatchNorm is folded, and every verifier knows the rest

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    net.eval()
    for batch in (1, 5):
        x = torch.rand(batch, *shape)
        (found,) = session.run(["logits"], {"input": x.numpy()})
        expected = net(x).detach().numpy()
        assert found.shape == (batch, 10)
        assert np.abs(expected).max() > 0.05
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_difference_leaves_no_file(tmp_path, monkeypatch):
    convert = export._to_onnx

    def convert_wrongly(network, example):
        network = copy.deepcopy(network)
        network[-1].bias += 0.01
        return convert(network, example)

    monkeypatch.setattr(export, "_to_onnx", convert_wrongly)
    net = nets.build("mlp", (4,), 3, width=4)
    with pytest.raises(UserError, match=r"differs from the PyTorch network by 0\.01") as caught:
        nets.export_onnx(net, (4,), tmp_path / "net.onnx")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_networks_that_are_not_finite_are_not_exported(tmp_path):
    net = nets.build("mlp", (4,), 3, width=4)
    nn.init.constant_(net[-1].bias, float("nan"))
    with pytest.raises(UserError, match="differs from the PyTorch network by nan"):
        nets.export_onnx(net, (4,), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


class DataDependent(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (DataDependent(), (4,), "cannot export this network to ONNX: "),
        (TwoOutputs(), (4,), "must give one tensor, got tuple"),
        (nn.Linear(3, 2), (4,), "does not take inputs of shape (4,)"),
        (nn.Linear(3, 2), (0,), "input shape must be"),
    ],
)
def test_what_cannot_be_exported(module, shape, message, tmp_path, capfd):
    with pytest.raises(UserError) as caught:
        nets.export_onnx(module, shape, tmp_path / "net.onnx")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=package) as caught:
        nets.export_onnx(nn.Linear(3, 2), (3,), tmp_path / "net.onnx")
    assert "pip install 'tightrope[onnx]'" in str(caught.value)


def test_path_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="is a folder, not a file"):
        nets.export_onnx(nn.Linear(3, 2), (3,), tmp_path)


def test_importing_nets_needs_no_onnx():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['onnx', 'onnxruntime', 'onnxscript']));"
        "import tightrope.nets as nets; assert 'cnn7' in str(nets.describe())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
