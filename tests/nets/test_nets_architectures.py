"""The networks are those of the literature: layers, shapes, parameter counts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import fx, nn

from tightrope import nets
from tightrope.errors import UserError
from tightrope.nets.architectures import BUILDERS
from tightrope.nets.distance import Distance

DISTANCE_NETS = {"linf-dist", "sortnet", "sortnet-mlp"}
MNIST, CIFAR, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64)


def layer_line(layer: nn.Module) -> str:
    """One layer in the notation of the tables below."""
    if isinstance(layer, nn.Conv2d):
        kernel, stride, padding = layer.kernel_size[0], layer.stride[0], layer.padding[0]
        assert layer.bias is not None
        return f"conv {layer.in_channels}->{layer.out_channels} k{kernel} s{stride} p{padding}"
    if isinstance(layer, nn.Linear):
        assert layer.bias is not None
        return f"linear {layer.in_features}->{layer.out_features}"
    if isinstance(layer, Distance):
        outputs, inputs = layer.weight.shape
        return f"distance {inputs}->{outputs} q{layer.keep}"
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        assert layer.affine and layer.momentum == 0.1
        return f"bn{'1d' if isinstance(layer, nn.BatchNorm1d) else '2d'} {layer.num_features}"
    return type(layer).__name__.lower()


def weights_only(net: nn.Module) -> list[str]:
    lines = [layer_line(layer) for layer in net.modules()]
    return [line for line in lines if line.startswith(("conv", "linear", "distance"))]


def meta(*arguments, **settings) -> nn.Sequential:
    with torch.device("meta"):
        return nets.build(*arguments, **settings)


def parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


TABLE = {
    ("cnn3", CIFAR): ["conv 3->16 k5 s2 p2", "conv 16->32 k4 s2 p1", "linear 2048->10"],
    ("cnn4", CIFAR): [
        "conv 3->16 k5 s2 p2",
        "conv 16->32 k4 s2 p1",
        "linear 2048->512",
        "linear 512->10",
    ],
    ("cnn5", MNIST): [
        "conv 1->16 k3 s1 p1",
        "conv 16->16 k4 s2 p1",
        "conv 16->32 k4 s2 p1",
        "linear 1568->512",
        "linear 512->10",
    ],
    ("cnn7", CIFAR): [
        "conv 3->64 k3 s1 p1",
        "conv 64->64 k3 s1 p1",
        "conv 64->128 k3 s2 p1",
        "conv 128->128 k3 s1 p1",
        "conv 128->128 k3 s1 p1",
        "linear 32768->512",
        "linear 512->10",
    ],
    ("cnn7-tin", TINY): [
        "conv 3->64 k3 s1 p1",
        "conv 64->64 k3 s1 p1",
        "conv 64->128 k3 s2 p1",
        "conv 128->128 k3 s1 p1",
        "conv 128->128 k3 s2 p1",
        "linear 32768->512",
        "linear 512->10",
    ],
    ("convsmall", MNIST): [
        "conv 1->16 k4 s2 p0",
        "conv 16->32 k4 s2 p0",
        "linear 800->100",
        "linear 100->10",
    ],
    ("convmed", CIFAR): [
        "conv 3->32 k5 s2 p2",
        "conv 32->128 k4 s2 p1",
        "linear 8192->250",
        "linear 250->10",
    ],
    ("convmedbig", CIFAR): [
        "conv 3->32 k3 s1 p1",
        "conv 32->32 k4 s2 p1",
        "conv 32->128 k4 s2 p1",
        "linear 8192->250",
        "linear 250->10",
    ],
    ("linf-dist", MNIST): [
        "distance 784->1024 q1.0",
        *["distance 1024->1024 q1.0"] * 3,
        "distance 1024->10 q1.0",
    ],
    ("sortnet", CIFAR): [
        "distance 3072->1024 q1.0",
        *["distance 1024->1024 q0.7"] * 3,
        "distance 1024->10 q0.7",
    ],
    ("sortnet-mlp", MNIST): [
        "distance 784->1024 q1.0",
        *["distance 1024->1024 q0.7"] * 2,
        *["linear 1024->512", "linear 512->10"],
    ],
    ("mlp", MNIST): ["linear 784->256", "linear 256->256", "linear 256->10"],
    ("resnet", CIFAR): [
        "conv 3->16 k3 s1 p1",
        *["conv 16->32 k3 s2 p1", "conv 32->32 k3 s1 p1", "conv 16->32 k1 s2 p0"],
        *["conv 32->64 k3 s2 p1", "conv 64->64 k3 s1 p1", "conv 32->64 k1 s2 p0"],
        *["conv 64->128 k3 s2 p1", "conv 128->128 k3 s1 p1", "conv 64->128 k1 s2 p0"],
        "linear 128->10",
    ],
}


@pytest.mark.parametrize(("name", "shape"), TABLE)
def test_weight_layers(name, shape):
    assert weights_only(meta(name, shape, 10)) == TABLE[name, shape]


def test_table_covers_every_net():
    assert {name for name, _ in TABLE} == set(nets.net_names())


def test_cnn7_with_batchnorm_and_normalisation_has_the_21_entries():
    net = nets.build("cnn7", MNIST, 10, width=2, hidden=8, normalize=(0.1307, 0.3081))
    assert [layer_line(layer) for layer in net] == [
        "normalize",
        *["conv 1->2 k3 s1 p1", "bn2d 2", "relu"],
        *["conv 2->2 k3 s1 p1", "bn2d 2", "relu"],
        *["conv 2->4 k3 s2 p1", "bn2d 4", "relu"],
        *["conv 4->4 k3 s1 p1", "bn2d 4", "relu"],
        *["conv 4->4 k3 s1 p1", "bn2d 4", "relu"],
        "flatten",
        *["linear 784->8", "bn1d 8", "relu"],
        "linear 8->10",
    ]
    assert len(net) == 21


def test_tiny_cnn3_is_exactly_the_one_of_the_precision_figure():
    net = nets.build("cnn3", MNIST, 10, width=1, batch_norm=False)
    lines = ["conv 1->1 k5 s2 p2", "relu", "conv 1->2 k4 s2 p1", "relu", "flatten", "linear 98->10"]
    assert [layer_line(layer) for layer in net] == lines


@pytest.mark.parametrize(
    ("shape", "classes", "millions"), [(CIFAR, 10, 17.2), (MNIST, 10, 13.3), ((3, 64, 64), 200, 0)]
)
def test_cnn7_parameter_counts(shape, classes, millions):
    # By hand: weights and biases of the convolutions, then BatchNorm's two numbers per channel.
    channels, side = shape[0], shape[1] // 2
    convs = 9 * (channels * 64 + 64 * 64 + 64 * 128 + 2 * 128 * 128) + (2 * 64 + 3 * 128)
    linears = 128 * side * side * 512 + 512 + 512 * classes + classes
    norms = 2 * (2 * 64 + 3 * 128 + 512)
    count = parameters(meta("cnn7", shape, classes))
    assert count == convs + linears + norms
    if millions:
        assert round(count / 1e6, 1) == millions


def test_tinyimagenet_form_at_both_crops():
    for side in (56, 64):
        lines = weights_only(meta("cnn7-tin", (3, side, side), 200))
        assert lines[-2:] == [f"linear {128 * (side // 4) ** 2}->512", "linear 512->200"]


@pytest.mark.parametrize("name", [n for n in nets.net_names() if n not in DISTANCE_NETS])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_batchnorm_follows_every_layer_but_the_last(name, batch_norm):
    net = nets.build(name, MNIST, 10, width=2, batch_norm=batch_norm)
    kinds = [type(layer) for layer in net.modules()]
    norms = [kind for kind in kinds if kind in (nn.BatchNorm1d, nn.BatchNorm2d)]
    expected = len(weights_only(net)) - 1 if batch_norm else 0
    assert len(norms) == expected
    for first, second in itertools.pairwise(kinds):
        if first in (nn.Conv2d, nn.Linear) and batch_norm:
            assert second in (nn.BatchNorm1d, nn.BatchNorm2d)
    assert kinds[-1] is nn.Linear


def test_default_of_batchnorm():
    without = {
        name
        for name in nets.net_names()
        if not any("bn" in layer_line(m) for m in meta(name, MNIST, 10).modules())
    }
    assert without == {"convsmall", "convmed", "convmedbig", *DISTANCE_NETS}


@pytest.mark.parametrize("name", nets.net_names())
def test_forward_of_odd_shapes_and_tracing(name):
    net = nets.build(name, (2, 27, 18), 7, width=2, normalize=([0.1, 0.2], [0.5, 0.4])).eval()
    x = torch.rand(3, 2, 27, 18)
    output = net(x)
    assert output.shape == (3, 7)
    traced = fx.symbolic_trace(net)
    assert torch.equal(traced(x), output)
    # One call per ReLU module, or the layers after tracing could not be told apart.
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    relus = [name for name, layer in net.named_modules() if isinstance(layer, nn.ReLU)]
    assert sorted(target for target in targets if target in relus) == sorted(relus)
    assert len(set(targets)) == len(targets)
    functions = {node.op for node in traced.graph.nodes}
    assert "call_method" not in functions


def test_residual_block_adds_the_shortcut():
    net = nets.build("resnet", (1, 8, 8), 3, width=2, blocks=1).eval()
    x = torch.rand(2, 1, 8, 8)
    stem = net[:3](x)
    block = net[3]
    expected = (block.body(stem) + block.shortcut(stem)).clamp(min=0)
    assert torch.equal(block(stem), expected)
    assert torch.allclose(net(x), net[-1](expected.mean(dim=(2, 3))), atol=1e-6)


def test_mlp_takes_flat_inputs_and_depth():
    net = nets.build("mlp", (5,), 3, width=4, depth=3, normalize=(0.5, 2.0))
    assert weights_only(net) == ["linear 5->4", "linear 4->4", "linear 4->4", "linear 4->3"]
    assert net(torch.rand(2, 5)).shape == (2, 3)


def test_width_and_hidden_scale_cnn7():
    assert weights_only(meta("cnn7", MNIST, 10, width=8, hidden=100)) == [
        "conv 1->8 k3 s1 p1",
        "conv 8->8 k3 s1 p1",
        "conv 8->16 k3 s2 p1",
        "conv 16->16 k3 s1 p1",
        "conv 16->16 k3 s1 p1",
        f"linear {16 * 14 * 14}->100",
        "linear 100->10",
    ]


def test_normalize_layer():
    layer = nets.Normalize([0.5, 0.25], [0.5, 0.125])
    x = torch.ones(1, 2, 2, 2)
    assert layer.mean.shape == layer.std.shape == (2, 1, 1)
    assert torch.equal(layer(x)[0, :, 0, 0], torch.tensor([1.0, 6.0]))
    assert not list(layer.parameters()) and not layer.state_dict()
    assert layer.to(torch.float64).mean.dtype is torch.float64
    assert nets.Normalize([1.0, 2.0], 1.0, dimensions=1).mean.shape == (2,)
    assert "0.125" in repr(layer)


def test_normalisation_comes_first():
    plain = nets.build("cnn3", CIFAR, 10, width=2)
    statistics = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    normalised = nets.build("cnn3", CIFAR, 10, width=2, normalize=statistics)
    for source, target in zip(plain, list(normalised)[1:], strict=True):
        target.load_state_dict(source.state_dict())
    x = torch.rand(4, *CIFAR)
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in statistics)
    assert torch.equal(normalised.eval()(x), plain.eval()((x - mean) / std))


@pytest.mark.parametrize("summary", nets.describe(), ids=lambda summary: summary.name)
def test_what_is_listed_of_a_network_is_true(summary):
    net = meta(summary.name, MNIST, 10)
    kinds = [(nn.Conv2d, "conv"), (Distance, "distance"), (nn.Linear, "linear")]
    counts = [(sum(isinstance(m, kind) for m in net.modules()), label) for kind, label in kinds]
    assert summary.layers == " + ".join(f"{count} {label}" for count, label in counts if count)
    assert summary.parameters == parameters(net)
    assert summary.description and "\n" not in summary.description


def test_every_network_is_listed():
    assert nets.net_names() == list(nets.NETS) and "cnn7" in nets.net_names()
    assert set(nets.net_names()) == set(BUILDERS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nets.build("cnn8", MNIST, 10), "unknown network 'cnn8'; did you mean"),
        (lambda: nets.build("cnn3", MNIST, 10, hidden=9), "takes no 'hidden'; it takes: width"),
        (lambda: nets.build("cnn3", MNIST, 10, width=0), "width of 'cnn3' must be a whole number"),
        (lambda: nets.build("cnn3", MNIST, 10, width=True), "must be a whole number"),
        (lambda: nets.build("cnn3", MNIST, 10, width=1.5), "must be a whole number"),
        (lambda: nets.build("cnn3", MNIST, 10, batch_norm=1), "must be true or false"),
        (lambda: nets.build("cnn3", MNIST, 0), "number of classes must be"),
        (lambda: nets.build("cnn3", (784,), 10), "needs inputs of shape (channels, height, width)"),
        (lambda: nets.build("cnn3", (1, -1, 28), 10), "input shape must be"),
        (lambda: nets.build("cnn3", 28, 10), "input shape must be"),
        (lambda: nets.build("mlp", (), 10), "input shape must be"),
        (lambda: nets.build("cnn3", (1, 2, 28), 10), "images of 2x28 are too small"),
        (lambda: nets.build("cnn5", (1, 28, 3), 10), "images of 28x3 are too small"),
        (lambda: nets.build("resnet", (1, 4, 4), 10), "images of 4x4 are too small for 3 blocks"),
        (lambda: nets.build("cnn3", CIFAR, 10, normalize=([1, 2], 1)), "mean has 2 values"),
        (lambda: nets.build("cnn3", CIFAR, 10, normalize=(1, [1, 0, 1])), "std must be positive"),
        (lambda: nets.build("cnn3", CIFAR, 10, normalize=(math.nan, 1)), "must be finite numbers"),
        (lambda: nets.build("cnn3", CIFAR, 10, normalize=("0.5", 1)), "must be finite numbers"),
        (lambda: nets.build("cnn3", CIFAR, 10, normalize=([], 1)), "must be finite numbers"),
        (lambda: nets.build("cnn3", CIFAR, 10, normalize=(1,)), "a mean and a standard deviation"),
    ],
)
def test_mistakes_are_explained_in_one_line(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_smallest_image_of_cnn3_still_works():
    assert nets.build("cnn3", (1, 3, 3), 2, width=1).eval()(torch.rand(1, 1, 3, 3)).shape == (1, 2)
