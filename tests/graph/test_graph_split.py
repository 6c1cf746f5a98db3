"""`split`, `cuts` and `fold_batchnorm`: other graphs of the same function."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in, rounding_errors
from torch import Tensor, nn

from tightrope import nets
from tightrope.errors import UserError
from tightrope.graph import Graph, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")


def kinds(graph: Graph) -> list[type[ops.Op]]:
    return [type(node.op) for node in graph.nodes]


def settle(module: nn.Module) -> nn.Module:
    """Return the module in evaluation mode with BatchNorms that have seen data."""
    torch.manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.running_mean = torch.randn(layer.num_features) * 0.3
            layer.running_var = torch.rand(layer.num_features) + 0.2
            if layer.affine:
                nn.init.normal_(layer.weight)
                nn.init.normal_(layer.bias)
    return module.double().eval()


class Normalize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.3, 0.5]).view(1, 2, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.4]).view(1, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def cnn7() -> nn.Module:
    """The layers of CNN7 with few channels: 21 of them, the normalisation being one."""
    layers: list[nn.Module] = [Normalize()]
    channels = [2, 3, 3, 4, 4, 4]
    for i, (a, b) in enumerate(pairwise(channels)):
        layers += [nn.Conv2d(a, b, 3, 2 if i == 2 else 1, 1), nn.BatchNorm2d(b), nn.ReLU()]
    layers += [nn.Flatten(), nn.Linear(4 * 9, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)]
    return settle(nn.Sequential(*layers))


class Block(nn.Module):
    """A residual block; its last ReLU comes after the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.b(torch.relu(self.a(x))))


def compose_all(graph: Graph, x: Tensor) -> None:
    """Check each split: same function, and the classifier holds what it is asked to hold."""
    expected = graph(x)
    for relus, cut in graph.cuts().items():
        extractor, classifier = graph.split(relus)
        assert len(classifier.relus) == relus
        assert len(extractor.relus) + relus == len(graph.relus)
        assert len(extractor.nodes) == cut + 1
        assert extractor.output_shape == classifier.input_shape
        assert extractor.input_shape == graph.input_shape
        assert classifier.output_shape == graph.output_shape
        assert torch.equal(classifier(extractor(x)), expected)


# --- cuts -------------------------------------------------------------------------------------


def test_classifier_sizes_of_cnn7() -> None:
    graph = trace(cnn7(), (2, 6, 6))
    assert sorted(graph.cuts()) == [0, 1, 2, 3, 4, 5, 6]
    sizes = {n: len(graph.split(n)[1].nodes) - 1 for n in graph.cuts()}
    assert sizes == {0: 1, 1: 4, 2: 8, 3: 11, 4: 14, 5: 17, 6: 20}
    compose_all(graph, torch.rand(3, 2, 6, 6, dtype=torch.float64))


def test_cnn7_of_the_package_has_the_same_cuts() -> None:
    module = nets.build("cnn7", (1, 8, 8), 10, width=2, hidden=4).eval()
    graph = trace(module, (1, 8, 8))
    sizes = {n: len(graph.split(n)[1].nodes) - 1 for n in graph.cuts()}
    assert sizes == {0: 1, 1: 4, 2: 8, 3: 11, 4: 14, 5: 17, 6: 20}


def test_boxes_at_the_cut_are_behind_a_relu_or_the_normalisation() -> None:
    graph = trace(cnn7(), (2, 6, 6))
    cuts = graph.cuts()
    assert kinds(graph)[cuts[6]] is ops.Scale  # on the normalised input
    assert kinds(graph)[cuts[1]] is ops.Reshape  # flatten belongs to the extractor
    assert all(kinds(graph)[cuts[n]] is ops.Relu for n in (2, 3, 4, 5))


def test_folding_does_not_change_the_cuts() -> None:
    graph = trace(cnn7(), (2, 6, 6))
    folded = graph.fold_batchnorm()
    sizes = {n: len(folded.split(n)[1].nodes) - 1 for n in folded.cuts()}
    assert sizes == {0: 1, 1: 3, 2: 6, 3: 8, 4: 10, 5: 12, 6: 14}


def test_residual_network_is_cut_between_blocks_only() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Block(6), Block(6), nn.Linear(6, 3))
    graph = trace(module.double(), (4,))
    # Five ReLUs; those within a block have a shortcut around them.
    assert len(graph.relus) == 5
    assert sorted(graph.cuts()) == [0, 2, 4, 5]
    compose_all(graph, torch.randn(4, 4, dtype=torch.float64))


def test_shortcut_from_the_input_leaves_one_cut() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x))) - x

    graph = trace(Net().double(), (4,))
    assert graph.cuts() == {1: 0}
    compose_all(graph, torch.randn(4, 4, dtype=torch.float64))


def test_shortcut_read_behind_the_normalisation() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            shifted = x - 0.5
            return torch.cat((torch.relu(self.a(shifted)), shifted), 1)

    graph = trace(Net().double(), (4,))
    assert graph.cuts() == {1: 1}  # the shift belongs to the extractor
    compose_all(graph, torch.randn(4, 4, dtype=torch.float64))


def test_network_that_ends_in_a_relu() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double(), (4,))
    assert graph.cuts() == {1: 0}  # nothing would be left behind the last ReLU
    compose_all(graph, torch.randn(4, 4, dtype=torch.float64))


def test_network_without_relus() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double(), (4,))
    assert graph.cuts() == {0: 0}
    compose_all(graph, torch.randn(4, 4, dtype=torch.float64))


@pytest.mark.parametrize("wanted", [0, 1, 3, 6, -1])
def test_missing_split_lists_the_possible_ones(wanted: int) -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Block(6), Block(6), nn.ReLU())
    graph = trace(module, (4,))
    assert sorted(graph.cuts()) == [1, 3, 5, 6]
    if wanted in graph.cuts():
        compose_all(graph, torch.randn(2, 4))
        return
    with pytest.raises(UserError) as caught:
        graph.split(wanted)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith("possible numbers: 1, 3, 5, 6")
    assert f"{wanted} ReLUs" in message


@settings(max_examples=40)
@given(st.data())
def test_splits_of_random_networks(data: st.DataObject) -> None:
    module = data.draw(networks(containing=ops.Relu))
    graph = trace(module, module.input_shape)
    x = points_in(data.draw(boxes(module.input_shape)), 4)
    assert len(graph.relus) in graph.cuts()  # the whole network as a classifier
    compose_all(graph, x)


def test_gradients_flow_through_both_parts() -> None:
    module = cnn7()
    graph = trace(module, (2, 6, 6))
    twin = copy.deepcopy(module)
    x = torch.rand(3, 2, 6, 6, dtype=torch.float64)
    extractor, classifier = graph.split(2)
    classifier(extractor(x)).sin().sum().backward()
    twin(x).sin().sum().backward()
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11)


# --- folding ----------------------------------------------------------------------------------


def test_folded_network_is_the_same_function() -> None:
    module = cnn7()
    graph = trace(module, (2, 6, 6))
    folded = graph.fold_batchnorm()
    assert kinds(graph).count(ops.BatchNorm) == 6
    assert kinds(folded) == [kind for kind in kinds(graph) if kind is not ops.BatchNorm]
    x = torch.rand(5, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(folded(x), module(x), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.BatchNorm2d(4)],
        [nn.Conv2d(2, 4, 3, padding="same"), nn.BatchNorm2d(4, affine=False)],
        [nn.Conv2d(2, 4, (2, 1), padding="same"), nn.BatchNorm2d(4)],
        [nn.Flatten(), nn.Linear(72, 3, bias=False), nn.BatchNorm1d(3)],
        [nn.Flatten(), nn.Linear(72, 3), nn.Identity(), nn.BatchNorm1d(3, eps=0.5)],
        [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)],
    ],
)
def test_each_kind_of_layer_is_folded(layers: list[nn.Module]) -> None:
    module = settle(nn.Sequential(*layers))
    graph = trace(module, (2, 6, 6))
    folded = graph.fold_batchnorm()
    # Two in a row: the first one goes into the convolution, the second one follows no layer.
    doubled = sum(isinstance(layer, nn.BatchNorm2d) for layer in layers) == 2
    assert kinds(folded).count(ops.BatchNorm) == (1 if doubled else 0)
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(folded(x), module(x), rtol=1e-11, atol=1e-11)


def test_layer_with_two_readers_is_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.norm(x) + torch.relu(x)

    module = settle(Net())
    folded = trace(module, (2, 6, 6)).fold_batchnorm()
    assert kinds(folded).count(ops.BatchNorm) == 1
    x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(folded(x), module(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.BatchNorm2d(2), nn.ReLU()], (2, 6, 6)),
        ([nn.Conv2d(2, 2, 3), nn.AvgPool2d(2), nn.BatchNorm2d(2)], (2, 6, 6)),
        ([nn.Conv2d(2, 2, 3), nn.ReLU(), nn.BatchNorm2d(2)], (2, 6, 6)),
        # features of a Linear come last, channels of a BatchNorm first
        ([nn.Linear(3, 4), nn.BatchNorm1d(4)], (4, 3)),
    ],
)
def test_batchnorm_without_a_layer_is_left_alone(
    layers: list[nn.Module], shape: tuple[int, ...]
) -> None:
    module = settle(nn.Sequential(*layers))
    folded = trace(module, shape).fold_batchnorm()
    assert kinds(folded).count(ops.BatchNorm) == 1
    x = torch.randn(5, *shape, dtype=torch.float64)
    torch.testing.assert_close(folded(x), module(x), rtol=1e-12, atol=1e-12)


def test_a_shared_layer_is_folded_in_each_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.relu(self.norm(self.linear(x))))

    module = settle(Net())
    folded = trace(module, (4,)).fold_batchnorm()
    assert kinds(folded) == [ops.Input, ops.Linear, ops.Relu, ops.Linear]
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(folded(x), module(x), rtol=1e-12, atol=1e-12)


def test_gradients_of_the_folded_network() -> None:
    module = cnn7()
    twin = copy.deepcopy(module)
    x = torch.rand(4, 2, 6, 6, dtype=torch.float64)
    trace(module, (2, 6, 6)).fold_batchnorm()(x).sin().sum().backward()
    trace(twin, (2, 6, 6))(x).sin().sum().backward()
    for (name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None, name
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-10, msg=name)
    assert module[1].weight.grad.abs().sum() > 0
    assert module[2].weight.grad.abs().sum() > 0


def test_folding_does_not_touch_the_original() -> None:
    module = cnn7()
    graph = trace(module, (2, 6, 6))
    before = copy.deepcopy(module.state_dict())
    x = torch.rand(4, 2, 6, 6, dtype=torch.float64)
    expected = graph(x)
    graph.fold_batchnorm()
    assert torch.equal(graph(x), expected)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


@settings(max_examples=40)
@given(st.data())
def test_folding_random_networks(data: st.DataObject) -> None:
    module = data.draw(networks(containing=ops.BatchNorm))
    graph = trace(module, module.input_shape)
    folded = graph.fold_batchnorm()
    readers = graph.consumers()
    for node in graph.nodes:
        if not isinstance(node.op, ops.BatchNorm):
            continue
        (layer,) = node.inputs
        before = graph.nodes[layer]
        foldable = isinstance(before.op, ops.Conv2d) or (
            isinstance(before.op, ops.Linear) and len(before.shape) == 1
        )
        stays = not foldable or len(readers[layer]) > 1
        assert stays == any(other.op is node.op for other in folded.nodes)
    box = data.draw(boxes(module.input_shape))
    x = points_in(box, 4)
    error = rounding_errors(graph, box, torch.float64)[len(graph.nodes) - 1].repeat(4, 1)
    assert ((folded(x) - module(x)).abs() <= error).all()
