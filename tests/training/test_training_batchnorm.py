"""BatchNorm in training: the clean pass sets the statistics."""

import copy
import itertools

import pytest
import torch
import training_reference as reference
from torch import nn

from tightrope.errors import UserError
from tightrope.graph import ops, trace
from tightrope.training.batchnorm import (
    clean_pass,
    evaluation_model,
    precise_batchnorm,
    training_model,
)
from tightrope.training.objectives import IBP, PGD, Standard
from tightrope.training.step import Step
from tightrope.training.trainer import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"rtol": 1e-11, "atol": 1e-11}
OBJECTIVES = {"standard": Standard(), "pgd": PGD(steps=3), "pgd2": PGD(2, 2), "ibp": IBP()}

LAYERS = {
    "1d": (nn.BatchNorm1d(4), (4,)),
    "1d-sequence": (nn.BatchNorm1d(4, momentum=0.3), (4, 3)),
    "2d": (nn.BatchNorm2d(4), (4, 3, 2)),
    "2d-plain": (nn.BatchNorm2d(4, affine=False, eps=1e-2), (4, 3, 2)),
    "1d-plain": (nn.BatchNorm1d(4, affine=False, momentum=None), (4,)),
    "2d-cumulative": (nn.BatchNorm2d(4, momentum=None), (4, 2, 2)),
    "2d-frozen": (nn.BatchNorm2d(4, momentum=0.0), (4, 2, 2)),
}


def make(name, dtype=torch.float64):
    """A BatchNorm with generic weights, its input shape, and a batch away from mean 0."""
    torch.manual_seed(5)
    layer, shape = copy.deepcopy(LAYERS[name][0]).to(dtype), LAYERS[name][1]
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    layer = nn.Sequential(layer)
    # `trace` takes the dtype from a parameter, which a plain BatchNorm does not have.
    anchor = nn.Parameter(torch.zeros((), dtype=dtype), requires_grad=False)
    layer.register_parameter("anchor", anchor)
    x = torch.randn(6, *shape, dtype=dtype)
    scale = torch.tensor([1.0, 3.0, 0.1, 10.0], dtype=dtype).view(-1, *[1] * (len(shape) - 1))
    return layer, shape, x * scale + 2 * scale


def buffers(module):
    return {k: v.clone() for k, v in module.state_dict().items() if "running" in k or "num" in k}


def assert_same_buffers(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value, **tolerance)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", LAYERS)
def test_clean_pass_is_training_mode(name):
    layer, shape, x = make(name)
    twin = copy.deepcopy(layer).train()
    a, b = (x.clone().requires_grad_() for _ in range(2))
    statistics, output = clean_pass(trace(layer, shape), a)
    expected = twin(b)
    torch.testing.assert_close(output, expected, **EXACT)
    weights = torch.randn_like(expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, **EXACT)
    for mine, theirs in zip(layer[0].parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
    dims = [d for d in range(x.dim()) if d != 1]
    ((mean, variance),) = statistics.values()
    torch.testing.assert_close(mean, x.mean(dims), **EXACT)
    torch.testing.assert_close(variance, x.var(dims, correction=0), **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_running_statistics_follow_torch_over_several_batches(name):
    layer, shape, x = make(name)
    twin = copy.deepcopy(layer).train()
    graph = trace(layer, shape)
    for factor in (1.0, -2.0, 0.5):
        training_model(graph, x * factor)
        twin(x * factor)
        assert_same_buffers(buffers(layer), buffers(twin), **EXACT)
    assert int(layer[0].num_batches_tracked) == 3


@pytest.mark.parametrize("name", ["1d", "2d"])
def test_single_precision_agrees_with_torch(name):
    layer, shape, x = make(name, torch.float32)
    twin = copy.deepcopy(layer).train()
    model = training_model(trace(layer, shape), x)
    torch.testing.assert_close(model.logits, twin(x), rtol=1e-5, atol=1e-5)
    assert_same_buffers(buffers(layer), buffers(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("used", ["m", "v", "o", "mv", "mo", "vo", "mvo"])
def test_gradients_flow_through_the_statistics(name, used):
    layer, shape, x = make(name)
    dims = [d for d in range(x.dim()) if d != 1]
    a, b = (x.clone().requires_grad_() for _ in range(2))
    statistics, output = clean_pass(trace(layer, shape), a)
    mean, variance = b.mean(dims), b.var(dims, correction=0)
    explicit = reference.Reference(layer, b).logits
    ((own_mean, own_variance),) = statistics.values()
    torch.manual_seed(1)
    pairs = {"m": (own_mean, mean), "v": (own_variance, variance), "o": (output, explicit)}
    mine = theirs = 0
    for letter in used:
        weights = torch.randn_like(pairs[letter][1])
        mine = mine + (pairs[letter][0] * weights).sum()
        theirs = theirs + (pairs[letter][1] * weights).sum()
    mine.backward()
    theirs.backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["1d", "2d", "2d-plain"])
def test_gradcheck(name):
    layer, shape, x = make(name)
    graph = trace(layer, shape)

    def function(x):
        statistics, output = clean_pass(graph, x)
        return (*statistics[1], output)

    assert torch.autograd.gradcheck(function, (x[:3].requires_grad_(),))


@pytest.mark.parametrize("name", ["norm", "odd"])
def test_the_fixed_model_is_the_network_with_statistics_of_the_clean_batch(name):
    net = reference.NETS[name]()
    (x, _), (other, _) = reference.batch(), reference.batch(5, seed=9)
    expected = reference.Reference(net, x)
    model = training_model(trace(net, reference.SHAPE), x)
    torch.testing.assert_close(model.logits, expected.logits, **EXACT)
    torch.testing.assert_close(model.graph(x), expected.logits, **EXACT)
    torch.testing.assert_close(model.graph(other), expected.points(other), **EXACT)
    torch.testing.assert_close(model.frozen(other), expected.points(other), **EXACT)
    assert not model.frozen(other).requires_grad


@pytest.mark.parametrize("radius", [0.0, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["norm", "odd"])
def test_only_the_clean_pass_moves_running_statistics(name, objective, accumulate, radius):
    net = reference.NETS[name]()
    twin = copy.deepcopy(net).train()
    graph = trace(net, reference.SHAPE)
    step = Step(graph, OBJECTIVES[objective], 0.2, 0.5, 1e-3, accumulate)
    for seed in (1, 2):
        x, y = reference.batch(seed=seed)
        step(x, y, radius, annealing=True)
        twin(x)
    assert_same_buffers(buffers(net), buffers(twin), **EXACT)
    assert all(v == 2 for k, v in buffers(net).items() if k.endswith("num_batches_tracked"))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_evaluation_uses_and_keeps_the_running_statistics(objective):
    net = reference.norm_net()
    x, y = reference.batch()
    net(x)
    before = copy.deepcopy(net.state_dict())
    graph = trace(net, reference.SHAPE)
    natural, _ = evaluate(graph, OBJECTIVES[objective], [(x, y), (x[:1], y[:1])], 0.1)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    net.eval()
    torch.testing.assert_close(evaluation_model(graph, x).logits, net(x), **EXACT)
    right = (net(x).argmax(1) == y).tolist()
    assert natural == (sum(right) + right[0]) / 8


@pytest.mark.parametrize("name", reference.NETS)
@pytest.mark.parametrize("radius", [0.003, 0.1])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_of_an_ibp_step_equals_the_slow_reference(name, radius, seed):
    net = reference.NETS[name](seed)
    x, y = reference.batch(seed=seed)
    expected = reference.Reference(net, x).ibp_loss(x, y, radius)
    expected.backward()
    slow = reference.gradients(net)
    net.zero_grad()
    result = Step(trace(net, reference.SHAPE), IBP(), radius)(x, y, radius, annealing=False)
    assert result.loss / len(x) == pytest.approx(expected.item(), rel=1e-11)
    for parameter, gradient in reference.gradients(net).items():
        torch.testing.assert_close(gradient, slow[parameter], rtol=1e-9, atol=1e-9)


def test_statistics_are_not_detached():
    # The check above could pass by chance if statistics carried little of the gradient.
    net = reference.norm_net()
    x, y = reference.batch()
    full = reference.Reference(net, x)
    full.ibp_loss(x, y, 0.1).backward()
    with_statistics = reference.gradients(net)
    net.zero_grad()
    cut = reference.Reference(net, x)
    cut.statistics = {k: (m.detach(), v.detach()) for k, (m, v) in cut.statistics.items()}
    cut.ibp_loss(x, y, 0.1).backward()
    difference = with_statistics["1.weight"] - net[1].weight.grad
    assert difference.norm() > 0.1 * net[1].weight.grad.norm()


def average_statistics(net, batches):
    """Plain average over batches of the batch mean and the unbiased batch variance."""
    found = {}
    for x in batches:
        model = reference.Reference(net, x)
        for layer, (mean, variance) in model.statistics.items():
            count = model.counts[layer]
            found.setdefault(layer, []).append((mean, variance * count / (count - 1)))
    return {
        layer: tuple(torch.stack(values).mean(0) for values in zip(*pairs, strict=True))
        for layer, pairs in found.items()
    }


@pytest.mark.parametrize("name", ["norm", "odd"])
@pytest.mark.parametrize("sizes", [(7,), (7, 7, 4), (2, 9, 5, 3), (6, 6, 1)])
def test_precise_statistics_are_the_plain_average_over_batches(name, sizes):
    net = reference.NETS[name]()
    net(reference.batch(seed=50)[0])  # statistics to be forgotten
    before = copy.deepcopy(net.state_dict())
    batches = [reference.batch(size, seed) for seed, size in enumerate(sizes)]
    precise_batchnorm(trace(net, reference.SHAPE), batches)
    expected = average_statistics(net, [x for x, _ in batches if len(x) > 1])
    assert expected
    for layer, (mean, variance) in expected.items():
        torch.testing.assert_close(layer.running_mean, mean, **EXACT)
        torch.testing.assert_close(layer.running_var, variance, **EXACT)
    changed = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert all("running" in key for key in changed)  # no weight, no batch count


@pytest.mark.parametrize("sizes", list(itertools.permutations((5, 1, 4))))
def test_precise_statistics_do_not_depend_on_where_a_single_sample_comes(sizes):
    net = reference.norm_net()
    net(reference.batch(seed=50)[0] * 0.3)
    batches = [reference.batch(size, seed=size) for size in sizes]
    precise_batchnorm(trace(net, reference.SHAPE), batches)
    expected = average_statistics(net, [x for x, _ in batches if len(x) > 1])
    for layer, (mean, variance) in expected.items():
        torch.testing.assert_close(layer.running_mean, mean, **EXACT)
        torch.testing.assert_close(layer.running_var, variance, **EXACT)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_sample_has_no_statistics(objective):
    net = reference.norm_net()
    before = copy.deepcopy(net.state_dict())
    x, y = reference.batch(1)
    step = Step(trace(net, reference.SHAPE), OBJECTIVES[objective], 0.1)
    with pytest.raises(ValueError, match=r"BatchNorm needs at least two samples") as caught:
        step(x, y, 0.1, annealing=False)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_one_sample_is_the_users_mistake_not_a_crash():
    # `train_samples = 2` with `validation = 1` gets here; only a UserError is shown in one line.
    x, _ = reference.batch(1)
    with pytest.raises(UserError):
        training_model(trace(reference.norm_net(), reference.SHAPE), x)


def test_one_sample_is_enough_without_batchnorm():
    net = reference.plain_net()
    x, y = reference.batch(1)
    result = Step(trace(net, reference.SHAPE), IBP(), 0.1)(x, y, 0.1, annealing=False)
    assert result.samples == 1 and result.loss > 0


def test_a_batchnorm_used_twice_is_updated_twice_as_in_torch():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.norm(self.layer(self.norm(x))))

    torch.manual_seed(0)
    net = Twice().double()
    twin = copy.deepcopy(net).train()
    x = torch.rand(6, 4, dtype=torch.float64)
    model = training_model(trace(net, (4,)), x)
    torch.testing.assert_close(model.logits, twin(x), **EXACT)
    torch.testing.assert_close(model.graph(x), model.logits, **EXACT)
    assert_same_buffers(buffers(net), buffers(twin), **EXACT)


def test_constant_channels_stay_finite():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    graph = trace(net, (4,))
    x = torch.rand(8, 4)
    x[:, 1], x[:, 2] = 0.0, 0.7
    y = torch.arange(8) % 2
    Step(graph, IBP(), 0.1)(x, y, 0.1, annealing=False)
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    norms = [n.op for n in graph.nodes if isinstance(n.op, ops.BatchNorm)]
    assert all((op.variance + op.epsilon > 0).all() for op in norms)
    assert float(net[1].running_var[1]) == pytest.approx(0.9, abs=1e-6)
