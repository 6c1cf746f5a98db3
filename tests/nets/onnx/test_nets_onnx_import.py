"""Networks from ONNX files compute what onnxruntime computes, or are refused."""

from __future__ import annotations

import csv
import gzip
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx_agreement import IMAGE, W, agrees, ints, kinds
from onnx_models import RandomChain, export_module, node, random_array, save_model, scattered
from torch import nn

from tightrope import nets
from tightrope.graph import ops
from tightrope.nets.onnx.importing import read_onnx

VNNCOMP = Path(__file__).parents[4] / "shared" / "data" / "vnncomp"


# --- whole networks ---------------------------------------------------------------------------


def test_a_residual_network_of_values(tmp_path):
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Add", "b x", "c"),
        node("Sub", "c a", "d"),
        node("Concat", "d x c", "e", axis=1),
        node("Flatten", "e", "f"),
        node("MatMul", "f m", "g"),
        node("Add", "g n", "y"),
    ]
    constants = {"w": random_array(2, 2, 3, 3), "m": random_array(180, 3), "n": random_array(3)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, ("n", 2, 6, 5), constants))
    assert kinds(network) == [
        *("Input", "Conv2d", "Relu", "Add", "Sub", "Concat", "Reshape", "Linear")
    ]
    agrees(network)


@pytest.mark.parametrize("subtract", [False, True])
def test_added_constants_become_biases_without_rounding(subtract, tmp_path):
    kind = "Sub" if subtract else "Add"
    nodes = [
        node("Conv", "x w", "a"),
        node(kind, "a c", "b"),
        node("Flatten", "b", "d"),
        node("MatMul", "d m", "e"),
        node(kind, "e n", "y"),
    ]
    constants = {"w": W, "c": random_array(1, 3, 1, 1), "m": random_array(36, 4)}
    constants["n"] = random_array(1, 4)
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, IMAGE, constants))
    assert kinds(network) == ["Input", "Conv2d", "Reshape", "Linear"]
    sign = -1 if subtract else 1
    for position, name in ((1, "c"), (3, "n")):
        bias = network.graph.nodes[position].op.bias.numpy()
        assert np.array_equal(bias, sign * constants[name].reshape(-1))
    agrees(network)


def test_a_layer_that_is_read_twice_keeps_its_addition_apart(tmp_path):
    nodes = [node("MatMul", "x m", "a"), node("Add", "a n", "b"), node("Sub", "b a", "y")]
    constants = {"m": random_array(5, 4), "n": random_array(4)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, (1, 5), constants))
    assert kinds(network) == ["Input", "Linear", "Shift", "Sub"]
    agrees(network)


ACAS = [
    node("Sub", "x mean", "a"),
    node("Flatten", "a", "b"),
    node("MatMul", "b w", "c"),
    node("Add", "c v", "d"),
    node("Relu", "d", "y"),
]


def test_old_files_list_their_constants_as_inputs(tmp_path):
    constants = {"mean": random_array(1, 1, 1, 5), "w": random_array(5, 6), "v": random_array(6)}
    path = save_model(tmp_path / "net.onnx", ACAS, (1, 1, 1, 5), constants, opset=8, listed=True)
    network = read_onnx(path)
    assert network.input_shape == (1, 1, 5) and network.output_size == 6
    assert kinds(network) == ["Input", "Shift", "Reshape", "Linear", "Relu"]
    agrees(network)


@pytest.mark.parametrize("left", [False, True])
def test_files_without_a_batch_dimension(left, tmp_path):
    constants = {"w": random_array(4, 3) if left else random_array(3, 4), "v": random_array(4)}
    nodes = [
        node("MatMul", "w x" if left else "x w", "a"),
        node("Add", "a v", "b"),
        node("Relu", "b"),
    ]
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, (3,), constants))
    assert network.input_shape == (3,)
    assert kinds(network) == ["Input", "Linear", "Relu"]
    agrees(network)


def test_rows_of_a_matrix_and_a_constant_from_the_left(tmp_path):
    nodes = [
        node("Gemm", "x w v", "a"),  # x has four rows and no batch
        node("Relu", "a", "b"),
        node("MatMul", "m b", "c"),
        node("Transpose", "c", "y"),
    ]
    constants = {"w": random_array(3, 5), "v": random_array(5), "m": random_array(2, 4)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, (4, 3), constants))
    assert network.input_shape == (4, 3) and network.output_size == 10
    agrees(network)


def test_shapes_computed_as_torch_exports_them(tmp_path):
    nodes = [
        node("Relu", "x", "a"),
        node("Shape", "a", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Constant", "", "minus", value_ints=[-1]),
        node("Unsqueeze", "n axes", "u"),
        node("Concat", "u minus", "target", axis=0),
        node("Reshape", "a target", "b"),
        node("Gemm", "b w", "y"),
    ]
    constants = {"zero": ints(0), "axes": ints([0]), "w": random_array(60, 3)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, ("n", 2, 6, 5), constants))
    assert network.batched
    assert kinds(network) == ["Input", "Relu", "Reshape", "Linear"]
    agrees(network)


def test_a_free_batch_that_the_network_does_not_support(tmp_path):
    """A reshape to one row mixes the samples of a batch; each sample is run on its own then."""
    nodes = [node("Reshape", "x s", "a"), node("MatMul", "a w", "y")]
    constants = {"s": ints([1, 4]), "w": random_array(4, 2)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, ("n", 2, 2), constants))
    assert not network.batched
    agrees(network)


def test_float64(tmp_path):
    constants = {"w": np.random.default_rng(0).normal(size=(5, 4))}
    nodes = [node("MatMul", "x w", "a"), node("Tanh", "a", "b"), node("Clip", "b - h", "y")]
    constants["h"] = np.array(0.1)
    path = save_model(tmp_path / "n.onnx", nodes, (1, 5), constants, kind=TensorProto.DOUBLE)
    network = read_onnx(path)
    assert network.dtype == torch.float64
    assert network.graph.nodes[1].op.weight.dtype == torch.float64
    assert agrees(network).dtype == torch.float64


@pytest.mark.parametrize("seed", range(25))
def test_random_chains_of_operators(seed, tmp_path):
    chain = RandomChain(seed)
    while len(chain.nodes) < 8:
        chain.step()
    network = read_onnx(chain.save(tmp_path / "net.onnx"))
    assert network.output_size == np.prod(chain.shape)
    x = scattered(network.input_shape)
    found, expected = network.graph(x), network.run(x)
    assert torch.allclose(found, expected, rtol=1e-3, atol=float(1e-4 * expected.abs().max()))


@pytest.mark.parametrize(
    ("operator", "field", "value"),
    [("LeakyRelu", "slope", 0.01), ("BatchNormalization", "epsilon", 1e-5)],
)
def test_defaults_are_numbers_of_single_precision(operator, field, value, tmp_path):
    """Bounds in float64 must be those of the number that onnxruntime uses."""
    constants = {name: np.ones(5, np.float32) for name in "abcd"} if field == "epsilon" else {}
    path = tmp_path / "net.onnx"
    save_model(path, [node(operator, " ".join(["x", *constants]))], (1, 5), constants)
    assert getattr(read_onnx(path).graph.nodes[1].op, field) == float(np.float32(value))


class Mixed(nn.Module):
    """Most of what torch exports, with shapes computed from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)
        )
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.LeakyReLU(0.1))
        self.skip = nn.Conv2d(4, 4, 1, stride=2)
        self.pool = nn.Sequential(nn.MaxPool2d(2), nn.ZeroPad2d((1, 0, 0, 1)), nn.AvgPool2d(2))
        self.end = nn.Sequential(nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 5), nn.Tanh())

    def forward(self, x):
        x = self.first((x - 0.5) / 0.25)
        x = self.pool(torch.cat([self.second(x) + self.skip(x), self.skip(x)[:, 1:3]], 1)[:, :4])
        x = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1)
        return self.end(x[:, :16].clamp(-0.75, 2.0)) * 3


@pytest.mark.parametrize(("opset", "free"), [(9, False), (11, True), (13, False), (17, True)])
def test_what_torch_exports(opset, free, tmp_path):
    torch.manual_seed(0)
    module = Mixed()
    module(torch.rand(16, 3, 16, 16))  # for statistics of BatchNorm
    options = {"opset_version": opset, "input_names": ["x"], "do_constant_folding": free}
    if free:
        options["dynamic_axes"] = {"x": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = export_module(module, (3, 16, 16), tmp_path / "net.onnx", **options)
    network = read_onnx(path)
    x = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(network.graph(x), module(x), atol=1e-5)
    assert network.batched is free
    agrees(network)


def test_what_we_export(tmp_path):
    torch.manual_seed(0)
    module = nets.build("mlp", (1, 4, 4), 10, width=4, normalize=(0.1, 0.3))
    nets.export_onnx(module, (1, 4, 4), tmp_path / "net.onnx")
    network = read_onnx(tmp_path / "net.onnx")
    x = torch.rand(2, 1, 4, 4)
    with torch.no_grad():
        assert torch.allclose(network.graph(x), module.eval()(x), atol=1e-5)


def test_compressed_files(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    packed = tmp_path / "net.onnx.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert kinds(read_onnx(packed)) == ["Input", "Relu"]


def test_random_state_and_threads(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    state = torch.get_rng_state()
    network = read_onnx(path)
    assert torch.equal(torch.get_rng_state(), state)
    options = network.reference.session.get_session_options()
    assert options.intra_op_num_threads == torch.get_num_threads()


def vnncomp_networks() -> list[str]:
    if not VNNCOMP.exists():
        return []
    with (VNNCOMP / "instances.csv").open() as file:
        return sorted({row["onnx"] for row in csv.DictReader(file)})


@pytest.mark.skipif(not VNNCOMP.exists(), reason="no competition files here")
@pytest.mark.parametrize("name", vnncomp_networks())
def test_networks_of_the_competition(name):
    network = read_onnx(VNNCOMP / name)
    agrees(network)
    assert {"Linear", "Relu"} <= set(kinds(network))
    stored = {
        numpy_helper.to_array(t).astype(np.float32).tobytes()
        for t in onnx.load(VNNCOMP / name).graph.initializer
    }
    biases = [n.op.bias for n in network.graph.nodes if isinstance(n.op, ops.Linear)]
    assert all(b is None or b.numpy().tobytes() in stored for b in biases)
