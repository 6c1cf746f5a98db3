"""Distance layers: values by hand, gradients, and that nothing moves more than the input."""

import math

import pytest
import torch
from torch import nn

from tightrope import nets
from tightrope.graph import distance
from tightrope.graph.distance import neurons
from tightrope.nets import powers as powers_module
from tightrope.nets.distance import Bias, Distance, FixedScale, MeanShift, Nearest, sort_shares
from tightrope.nets.powers import Kept, nearest_power, powers

pytestmark = pytest.mark.usefixtures("one_thread")

X, ZERO = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)


def numbers(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture(params=["loops", "formulas"])
def way(request, monkeypatch):
    """Both ways to compute the same."""
    if request.param == "formulas":
        monkeypatch.setattr(powers_module, "_can_compile", lambda *_: False)
        monkeypatch.setattr(distance, "_can_compile", lambda *_: False)
        monkeypatch.setattr(powers_module, "NUMBERS", 4000)  # several pieces
        monkeypatch.setattr(distance, "NUMBERS", 4000)
    return request.param


# --- the neuron that is evaluated ---------------------------------------------------------------


def test_values_by_hand(way):
    assert neurons(X, X, ZERO, torch.ones(1)).item() == 2
    # q = 1/2 and two terms: (2 / 2 + 1 / 4) / (1 - 1/4) = 5/3.
    shares = sort_shares(0.5, 2)
    torch.testing.assert_close(shares, torch.tensor([2 / 3, 1 / 3]))
    assert neurons(X, X, ZERO, shares).item() == pytest.approx(5 / 3)
    assert powers(X, ZERO, math.inf).item() == 2
    assert powers(X, ZERO, 1.0).item() == pytest.approx(3)


def test_shares_of_a_sort_neuron():
    shares = sort_shares(0.7, 500)
    assert len(shares) == 10 and shares.sum().item() == pytest.approx(1)
    torch.testing.assert_close(shares[1:] / shares[:-1], torch.full((9,), 0.3))
    assert len(sort_shares(0.7, 3)) == 3 and sort_shares(1.0, 500).tolist() == [1.0]


def test_dropped_inputs_give_the_sort_neuron_on_average():
    # Of (1, 2): both kept or only 2 (1/2), only 1 (1/4), none (1/4): 2/2 + 1/4 = 1.25.
    total = 0.0
    for first in (0, 1):
        for second in (0, 1):
            kept = [i for i, there in enumerate((first, second)) if there]
            if kept:
                part = Kept(torch.tensor([0]), torch.tensor(kept), torch.tensor([0]))
                total += powers(X, ZERO, math.inf, [part]).item() / 4
    assert total == 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 10])
def test_largest_terms_are_those_of_a_sort(dtype, count, way):
    low, width = numbers(7, 300, dtype=dtype), numbers(7, 300, seed=1, dtype=dtype).abs()
    weight, shares = numbers(5, 300, seed=2, dtype=dtype), sort_shares(0.5, 300)[:count].to(dtype)
    for above, below in ((low + width, low), (low, low + width), (low, low)):
        gaps = torch.maximum(above[:, None] - weight, weight - below[:, None]).clamp(min=0)
        expected = gaps.sort(2, descending=True).values[:, :, :count] @ shares
        torch.testing.assert_close(neurons(above, below, weight, shares), expected)


def test_numbers_that_are_none_are_not_lost():
    x = torch.tensor([[1.0, math.nan, 3.0], [0.0, 1.0, math.inf]])
    found = neurons(x, x, torch.zeros(1, 3), torch.ones(1))
    assert found[0].isnan().all() and found[1].isinf().all()


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_gradients_of_the_neurons_are_the_true_ones(keep, way):
    x, weight = numbers(3, 12).requires_grad_(), numbers(4, 12, seed=1).requires_grad_()
    shares = sort_shares(keep, 12).double()
    assert torch.autograd.gradcheck(lambda a, w: neurons(a, a, w, shares), (x, weight))
    low = (numbers(3, 12, seed=2).abs() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: neurons(a + b, a - b, weight, shares), (x, low))


# --- powers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [8.0, 10.0, 24.0, 112.0])
def test_powers_are_norms_with_true_gradients(power, way):
    x, weight = numbers(3, 200).requires_grad_(), numbers(4, 200, seed=1).requires_grad_()
    expected = (x.detach()[:, None] - weight.detach()).norm(power, dim=2)
    found = powers(x, weight, power)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=0)
    assert torch.autograd.gradcheck(lambda a, w: powers(a, w, power), (x[:, :6], weight[:, :6]))
    # The gradient of a norm has length 1 in the dual norm, and no entry above 1.
    (slope,) = torch.autograd.grad(found[1, 2], x)
    dual = power / (power - 1)
    assert slope.norm(dual).item() == pytest.approx(1, abs=1e-9)
    assert slope.abs().max() <= 1


@pytest.mark.parametrize("power", [8.0, 40.0, 1024.0, math.inf])
def test_parts_of_the_inputs_and_rows(power, way):
    x, weight = numbers(40, 150).requires_grad_(), numbers(30, 150, seed=1).requires_grad_()
    chosen = [
        Kept(torch.arange(a, b), numbers(150, seed=a).argsort()[:90], numbers(30).argsort()[:20])
        for a, b in ((0, 32), (32, 40))
    ]
    found = powers(x, weight, power, chosen)
    outer = numbers(40, 30, seed=3)
    gradients = torch.autograd.grad(found, (x, weight), outer)
    expected = torch.zeros_like(found)
    for part in chosen:
        gaps = x[part.samples][:, None, part.inputs] - weight[part.rows][:, part.inputs]
        size = gaps.detach().abs().amax(2)  # without it, powers are beyond all numbers
        norm = (gaps / size[:, :, None]).norm(power, dim=2)
        expected[part.samples[:, None], part.rows] = size * norm
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)
    wanted = torch.autograd.grad(expected, (x, weight), outer)
    torch.testing.assert_close(gradients, wanted, rtol=1e-6, atol=1e-8)


def test_extreme_powers_and_distances_stay_finite(way):
    for size in (1e-30, 1e-10, 1.0, 1e10, 1e30):
        x = (size * numbers(2, 130, dtype=torch.float32)).requires_grad_()
        found = powers(x, torch.zeros(1, 130), 896.0)
        assert torch.allclose(found, x.detach().abs().amax(1, keepdim=True), rtol=2e-3)
        (slope,) = torch.autograd.grad(found.sum(), x)
        assert slope.isfinite().all() and slope.abs().max() <= 1
    nothing = torch.zeros(2, 130, requires_grad=True)
    found = powers(nothing, torch.zeros(3, 130), 8.0)
    (slope,) = torch.autograd.grad(found.sum(), nothing)
    assert not found.any() and not slope.any()


def test_powers_are_rounded_to_products():
    grid = [8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80]
    assert [nearest_power(float(p)) for p in grid] == grid
    assert nearest_power(math.inf) == math.inf and nearest_power(8.3) == 8
    for i in range(100):
        power = 8 * 125 ** (i / 100)
        assert abs(math.log(nearest_power(power) / power)) <= math.log(1.25) / 2 + 1e-9


# --- networks -----------------------------------------------------------------------------------


def distance_net(keep=60):
    torch.manual_seed(3)
    return nets.build("sortnet", (1, 5, 5), 4, width=30, depth=4, keep=keep).double().eval()


def pairs():
    x = numbers(200, 1, 5, 5)
    radius = 10.0 ** torch.linspace(-6, 1, 200, dtype=torch.float64).view(-1, 1, 1, 1)
    return x, x + radius * numbers(200, 1, 5, 5, seed=1).sign()


@pytest.mark.parametrize(("keep", "share"), [(100, 1.0), (60, 1 + 1e-6)])
def test_outputs_move_no_more_than_inputs(keep, share):
    """In float64 by no more than rounding; shares of several terms are floats that add up to 1."""
    net, (x, other) = distance_net(keep), pairs()
    moved = (net(x) - net(other)).abs().amax(1)
    assert (moved <= (x - other).abs().flatten(1).amax(1) * share + 1e-14).all()
    assert moved.max() > 0.1


def test_outputs_of_finite_powers_may_move_more():
    net, (x, other) = distance_net(100), pairs()

    def by_powers(x):
        for layer in net:
            x = powers(x, layer.weight, 8.0) if isinstance(layer, Distance) else layer(x)
        return x

    moved = (by_powers(x) - by_powers(other)).abs().amax(1)
    assert (moved > 1.05 * (x - other).abs().flatten(1).amax(1)).any()


def test_layers_are_modules_like_others():
    net = distance_net()
    kinds = [type(layer) for layer in net]
    hidden = [Distance, MeanShift]
    assert kinds == [nn.Flatten, *hidden * 3, Distance, Bias, Nearest]
    x = numbers(9, 1, 5, 5)
    net[2].mean.fill_(0.5)
    assert not torch.equal(net(x), net.train()(x))
    torch.testing.assert_close(
        net[2].mean, 0.5 + 0.1 * (net[1](net[0](x)).mean(0) - 0.5), rtol=1e-9, atol=0
    )
    loss = net(x).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())
    assert set(net.state_dict()) == {
        *(f"{i}.weight" for i in (1, 3, 5, 7)), *(f"{i}.mean" for i in (2, 4, 6)),
        "8.bias", "9.scale",
    }  # fmt: skip
    assert "30, 4, keep=0.6" in repr(net)


def test_nets_with_a_head_scale_its_inputs():
    net = nets.build("sortnet-mlp", (1, 5, 5), 4, width=30, depth=4, keep=60, hidden=7)
    kinds = [type(layer) for layer in net]
    assert kinds[-5:] == [FixedScale, nn.Linear, nn.Tanh, FixedScale, nn.Linear]
    assert kinds.count(Distance) == 2
    assert net[-5].factor.item() == pytest.approx(30**-0.5)
    assert 0.8 < net[-4].weight.std().item() < 1.2 and not net[-4].bias.any()
