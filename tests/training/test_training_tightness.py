"""Propagation tightness against products of matrices written out."""

import pytest
import torch
import training_reference as reference
from torch import nn

from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, training_model
from tightrope.training.objectives import IBP
from tightrope.training.step import Step
from tightrope.training.tightness import (
    check_tightness,
    lost_tightness,
    propagated_reach,
    slopes,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def two_layers(first, second):
    """Two linear layers without biases, with a ReLU between them."""
    matrices = [torch.tensor(w, dtype=torch.float64) for w in (first, second)]
    layers = [nn.Linear(w.shape[1], w.shape[0], bias=False).double() for w in matrices]
    for layer, weight in zip(layers, matrices, strict=True):
        layer.weight.data.copy_(weight)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def ratio(net, x, y, radius):
    """The propagation tightness of each margin."""
    model = FixedModel(trace(net, tuple(x.shape[1:])), x)
    own = (slopes(model, y) * radius.unsqueeze(1)).flatten(2).sum(2)
    product = propagated_reach(model, y, radius)
    wrong = torch.ones_like(product).scatter(1, y[:, None], 0) > 0
    return own / product[wrong].view_as(own)


def test_one_layer_loses_nothing():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    x, y = torch.rand(5, 1, 2, 2).double(), torch.tensor([0, 1, 2, 1, 0])
    found = ratio(net, x, y, torch.rand(5, 1, 2, 2).double())
    assert found.shape == (5, 2)
    torch.testing.assert_close(found, torch.ones_like(found))


def test_products_that_are_not_negative_lose_nothing():
    net = two_layers([[1.0, 2.0], [0.5, 3.0], [1.0, 0.0]], [[3.0, 2.0, 4.0], [1.0, 0.5, 2.0]])
    x, y = torch.rand(4, 2).double() + 0.1, torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(ratio(net, x, y, x), torch.ones(4, 1).double())


def test_what_cancels_is_lost():
    """W1 = (1; 1), W2 = (1, -1): the product is zero, intervals see 2."""
    net = two_layers([[1.0], [1.0]], [[1.0, -1.0], [0.0, 0.0]])
    x, y = torch.tensor([[0.5]]).double(), torch.tensor([0])
    assert ratio(net, x, y, torch.tensor([[0.1]]).double()).tolist() == [[0.0]]
    model = FixedModel(trace(net, (1,)), x)
    assert lost_tightness(model, y).tolist() == [pytest.approx(2.0)]


def test_inactive_neurons_carry_nothing():
    net = two_layers([[1.0], [-1.0]], [[1.0, -1.0], [0.0, 0.0]])
    x, y = torch.tensor([[0.5]]).double(), torch.tensor([0])
    torch.testing.assert_close(ratio(net, x, y, x), torch.ones(1, 1).double())


def matrices(net, x):
    """`A` and `M` of each sample, by Jacobians of each layer on its own."""
    found = []
    for sample in x:
        value, own, product = sample[None], None, None
        for layer in net:
            shape = value.shape
            flat = value.detach().flatten()
            jacobian = torch.autograd.functional.jacobian(
                lambda t, shape=shape, layer=layer: layer(t.view(shape)).flatten(), flat
            )
            own = jacobian if own is None else jacobian @ own
            last = layer is net[-1]
            if not last:
                product = jacobian.abs() if product is None else jacobian.abs() @ product
            value = layer(value)
        found.append((own, jacobian, product))
    return found


@pytest.mark.parametrize("name", ["plain", "norm"])
def test_networks_by_matrices(name):
    net = reference.NETS[name]().eval()
    x, y = reference.batch()
    model = FixedModel(trace(net, reference.SHAPE).fold_batchnorm(), x)
    radius = torch.rand_like(x)
    exact, reach, lost = (
        slopes(model, y),
        propagated_reach(model, y, radius),
        lost_tightness(model, y),
    )
    layers = [module for module in net if not isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d)]
    assert len(layers) < len(net) or name == "plain"
    merged, i = [], 0
    modules = list(net)
    while i < len(modules):  # a BatchNorm is one layer with the one before it
        pair = i + 1 < len(modules) and isinstance(modules[i + 1], nn.BatchNorm2d | nn.BatchNorm1d)
        merged.append(nn.Sequential(*modules[i : i + 1 + pair]))
        i += 1 + pair
    for n, (own, last, product) in enumerate(matrices(merged, x)):
        wrong = [k for k in range(3) if k != y[n]]
        rows = torch.eye(3).double()[y[n]] - torch.eye(3).double()[wrong]
        a, m = (rows @ own).abs(), (rows @ last).abs() @ product
        torch.testing.assert_close(exact[n].flatten(1), a)
        torch.testing.assert_close(reach[n, wrong], m @ radius[n].flatten())
        assert reach[n, y[n]] == 0
        torch.testing.assert_close(lost[n], (m - a).sum())
        assert (m >= a - 1e-12).all()


@pytest.mark.parametrize("name", reference.NETS)
def test_gradients_by_finite_differences(name):
    net, data = reference.NETS[name](), reference.batch()
    step = Step(trace(net, reference.SHAPE), IBP(), 0.2, tightness_weight=0.1)
    step(*data, 0.05, annealing=False)
    for key, gradient in reference.gradients(net).items():
        place, ends = gradient.abs().argmax(), []
        parameter = net.get_parameter(key).data.view(-1)
        before = parameter[place].item()
        for sign in (1, -1):
            parameter[place] = before + sign * 1e-6
            with torch.no_grad():
                ends.append(step(*data, 0.05, annealing=False).loss / len(data[0]))
        parameter[place] = before
        measured = (ends[0] - ends[1]) / 2e-6
        assert measured == pytest.approx(gradient.view(-1)[place].item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", reference.NETS)
def test_parts_are_the_whole(name):
    found = []
    for parts in (1, 3):
        net = reference.NETS[name]()
        step = Step(trace(net, reference.SHAPE), IBP(), 0.2, tightness_weight=0.1, accumulate=parts)
        result = step(*reference.batch(), 0.05, annealing=False)
        found.append((result.loss, reference.gradients(net)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    for key, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], value, rtol=1e-9, atol=1e-9, msg=key)


def test_without_gradients_none_are_kept():
    net, (x, y) = reference.norm_net(), reference.batch()
    with torch.no_grad():
        lost = lost_tightness(training_model(trace(net, reference.SHAPE), x), y)
    assert not lost.requires_grad and (lost > 0).all()


def test_networks_that_are_not_piecewise_linear_are_refused():
    net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 2))
    with pytest.raises(UserError, match="linear layers and ReLUs, but this one has Sigmoid"):
        check_tightness(trace(net, (2,)))
    check_tightness(trace(reference.odd_net(), reference.SHAPE))
