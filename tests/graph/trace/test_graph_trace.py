"""`trace`: the graph computes what the module computes, with the module's own parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import Buffers, Call, assert_same_or_refused, call, norm, rows, two_paths
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import boxes, networks, points_in, rounding_errors
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.graph import ops, trace
from tightrope.nets.distance import Distance

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT, SEQUENCE, IMAGE = (6,), (3, 4), (4, 6, 5)


def concat(self: Call, x: Tensor) -> Tensor:
    return torch.cat((self.a(x), x, self.b(x)), dim=1)


def augmented_add(self: Call, x: Tensor) -> Tensor:
    out = self.layer(x)
    out += x
    return out


def weird_but_fine(self: Call, x: Tensor) -> Tensor:
    unused = self.layer(x)  # noqa: F841 (an unused value is pruned)
    height = x.size(2) * x.shape[3]
    return x.view(x.size(0), x.shape[1], height)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    # layers
    "linear": (lambda: nn.Sequential(nn.Linear(6, 3)), FLAT),
    "linear alone": (lambda: nn.Linear(6, 3), FLAT),
    "linear without bias": (lambda: nn.Sequential(nn.Linear(6, 3, bias=False)), FLAT),
    "distances": (lambda: Distance(6, 3, 0.5), FLAT),
    "linear on a sequence": (lambda: nn.Sequential(nn.Linear(4, 2)), SEQUENCE),
    "conv": (lambda: nn.Sequential(nn.Conv2d(4, 2, 3)), IMAGE),
    "conv alone": (lambda: nn.Conv2d(4, 2, 3, padding=1), IMAGE),
    "conv stride": (lambda: nn.Sequential(nn.Conv2d(4, 2, 3, stride=(2, 1))), IMAGE),
    "conv padding": (lambda: nn.Sequential(nn.Conv2d(4, 2, 3, padding=(2, 1))), IMAGE),
    "conv same": (lambda: nn.Sequential(nn.Conv2d(4, 2, (3, 5), padding="same")), IMAGE),
    "conv same, even": (lambda: nn.Sequential(nn.Conv2d(4, 2, (2, 3), padding="same")), IMAGE),
    "conv same, even, dilated": (
        lambda: nn.Sequential(nn.Conv2d(4, 2, (4, 2), padding="same", dilation=(1, 3))),
        IMAGE,
    ),
    "conv valid": (lambda: nn.Sequential(nn.Conv2d(4, 2, 3, padding="valid")), IMAGE),
    "conv dilation": (lambda: nn.Sequential(nn.Conv2d(4, 2, 2, dilation=(3, 2))), IMAGE),
    "conv groups": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, bias=False)), IMAGE),
    "conv depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1)), IMAGE),
    "batchnorm 1d": (lambda: nn.Sequential(norm(nn.BatchNorm1d, 6)), FLAT),
    "batchnorm 1d on a sequence": (lambda: nn.Sequential(norm(nn.BatchNorm1d, 3)), SEQUENCE),
    "batchnorm 2d": (lambda: nn.Sequential(norm(nn.BatchNorm2d, 4, eps=0.1)), IMAGE),
    "batchnorm not affine": (
        lambda: nn.Sequential(norm(nn.BatchNorm2d, 4, affine=False, momentum=None)),
        IMAGE,
    ),
    "avg pool": (lambda: nn.Sequential(nn.AvgPool2d(2)), IMAGE),
    "avg pool options": (
        lambda: nn.Sequential(nn.AvgPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True)),
        IMAGE,
    ),
    "avg pool without padding in the count": (
        lambda: nn.Sequential(nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        IMAGE,
    ),
    "adaptive avg pool": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1)), IMAGE),
    "adaptive avg pool to a divisor": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d((3, 1))),
        IMAGE,
    ),
    "max pool": (lambda: nn.Sequential(nn.MaxPool2d(2)), IMAGE),
    "max pool options": (
        lambda: nn.Sequential(nn.MaxPool2d((3, 2), (2, 1), 1, (1, 2), ceil_mode=True)),
        IMAGE,
    ),
    "flatten": (lambda: nn.Sequential(nn.Flatten()), IMAGE),
    "flatten some": (lambda: nn.Sequential(nn.Flatten(2, -1)), IMAGE),
    "flatten up to": (lambda: nn.Sequential(nn.Flatten(1, 2)), IMAGE),
    "unflatten": (lambda: nn.Sequential(nn.Unflatten(1, (2, 3))), FLAT),
    "unflatten the last": (lambda: nn.Sequential(nn.Unflatten(-1, (2, 2))), SEQUENCE),
    "zero pad": (lambda: nn.Sequential(nn.ZeroPad2d((1, 2, 0, 3))), IMAGE),
    "constant pad": (lambda: nn.Sequential(nn.ConstantPad2d(1, -2.5)), IMAGE),
    "relu": (lambda: nn.Sequential(nn.ReLU()), FLAT),
    "leaky relu": (lambda: nn.Sequential(nn.LeakyReLU(0.3)), FLAT),
    "sigmoid": (lambda: nn.Sequential(nn.Sigmoid()), FLAT),
    "tanh": (lambda: nn.Sequential(nn.Tanh()), FLAT),
    "smooth": (lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.ELU(), nn.Softplus(2.0)), FLAT),
    "powers": (lambda: Call(lambda s, x: (x**2 + 1).sqrt() ** -3 + torch.exp(x).log()), FLAT),
    "waves": (lambda: Call(lambda s, x: x.sin() * x.cos()), FLAT),
    "product": (lambda: Call(lambda s, x: s.a(x) * x[:, :1], a=nn.Linear(6, 6)), FLAT),
    "quotient": (lambda: Call(lambda s, x: s.a(x) / (3 + x.tanh()), a=nn.Linear(6, 6)), FLAT),
    "constant over": (lambda: Call(lambda s, x: 2 / (3 + x.tanh())), FLAT),
    "matrices": (lambda: Call(lambda s, x: torch.bmm(x, x.transpose(1, 2)) @ x), SEQUENCE),
    "matrix by constant": (
        lambda: Call(lambda s, x: x @ s.c @ x, c=nn.Parameter(torch.ones(4, 3))),
        SEQUENCE,
    ),
    "pairs": (lambda: Call(lambda s, x: x.unsqueeze(-2) - x.unsqueeze(-1)), FLAT),
    "softmax": (lambda: nn.Sequential(nn.Softmax(1), nn.LogSoftmax(-1)), SEQUENCE),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4)), SEQUENCE),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)), IMAGE),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.9), nn.Dropout2d(0.9)), IMAGE),
    "identity": (lambda: nn.Sequential(nn.Identity()), FLAT),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, 2)),
        FLAT,
    ),
    # functions and methods
    "F.linear": (
        lambda: Call(lambda s, x: F.linear(x, s.w, bias=s.b), w=rows(3, 6), b=rows(3)),
        FLAT,
    ),
    "F.conv2d": (
        lambda: Call(
            lambda s, x: F.conv2d(x, s.w, None, stride=2, padding=1, dilation=1, groups=2),
            w=rows(2, 2, 3, 3),
        ),
        IMAGE,
    ),
    "F.conv_transpose2d": (
        lambda: nn.ConvTranspose2d(4, 3, (3, 2), (2, 1), (1, 0), (1, 0)),
        IMAGE,
    ),
    "x.round": (lambda: call(torch.round), FLAT),
    "torch.where": (lambda: call(lambda x: torch.where(x > 0.1, x, 2.0)), FLAT),
    "x.argmax": (lambda: call(lambda x: x + x.argmax(1, keepdim=True).to(x.dtype)), FLAT),
    "x.flip": (lambda: call(lambda x: x.flip((1, 3))), IMAGE),
    "F.avg_pool2d": (lambda: call(lambda x: F.avg_pool2d(x, 2, padding=1)), IMAGE),
    "F.adaptive_avg_pool2d": (lambda: call(lambda x: F.adaptive_avg_pool2d(x, (2, 5))), IMAGE),
    "F.max_pool2d": (lambda: call(lambda x: F.max_pool2d(x, (2, 3), stride=1)), IMAGE),
    "mean": (lambda: call(lambda x: x.mean((2, 3))), IMAGE),
    "mean keepdim": (lambda: call(lambda x: torch.mean(x, dim=[-1, -2], keepdim=True)), IMAGE),
    "view": (lambda: call(lambda x: x.view(x.size(0), -1)), IMAGE),
    "view with shape": (lambda: call(lambda x: x.view(x.shape[0], 4, -1)), IMAGE),
    "view with a tuple": (lambda: call(lambda x: x.view((x.size(0), 2, 60))), IMAGE),
    "view(-1, n)": (lambda: call(lambda x: x.view(-1, 120)), IMAGE),
    "reshape": (lambda: call(lambda x: torch.reshape(x, (x.size(0), 5, -1, 2))), IMAGE),
    "reshape to its own shape": (lambda: call(lambda x: x.reshape(x.shape)), IMAGE),
    "flatten function": (lambda: call(lambda x: torch.flatten(x, 1)), IMAGE),
    "flatten method": (lambda: call(lambda x: x.flatten(start_dim=2)), IMAGE),
    "permute": (lambda: call(lambda x: x.permute(0, 3, 1, -2)), IMAGE),
    "permute function": (lambda: call(lambda x: torch.permute(x, (0, 2, 1, 3))), IMAGE),
    "transpose": (lambda: call(lambda x: x.transpose(1, -1).contiguous()), IMAGE),
    "transpose function": (lambda: call(lambda x: torch.transpose(x, 2, 1)), SEQUENCE),
    "pad": (lambda: call(lambda x: F.pad(x, (1, 0, 2, 1), value=1.5)), IMAGE),
    "pad channels": (lambda: call(lambda x: F.pad(x, (0, 0, 0, 0, 1, 2))), IMAGE),
    "crop": (lambda: call(lambda x: F.pad(x, (-1, 0, 0, -2))), IMAGE),
    "slice": (lambda: call(lambda x: x[:, 1:3, ::2, -1]), IMAGE),
    "ellipsis": (lambda: call(lambda x: x[..., 1:]), IMAGE),
    "slice by size": (lambda: call(lambda x: x[:, : x.size(1) // 2]), IMAGE),
    "empty index": (lambda: call(lambda x: x[()]), FLAT),
    "new dimension": (lambda: call(lambda x: x[:, None]), FLAT),
    "squeeze": (lambda: call(lambda x: x[:, :1].squeeze(1)), IMAGE),
    "squeeze everything": (lambda: call(lambda x: x[:, :1, 2:3].squeeze((1, 2))), IMAGE),
    "concat": (lambda: Call(concat, a=nn.Linear(6, 2), b=nn.Tanh()), FLAT),
    "concat axis": (lambda: call(lambda x: torch.concat([x, -x], axis=-1)), IMAGE),
    "F.relu": (lambda: call(lambda x: F.relu(x)), FLAT),
    "torch.relu": (lambda: call(lambda x: torch.relu(x)), FLAT),
    "x.relu": (lambda: call(lambda x: x.relu()), FLAT),
    "F.leaky_relu": (lambda: call(lambda x: F.leaky_relu(x, 0.7)), FLAT),
    "F.leaky_relu default": (lambda: call(lambda x: F.leaky_relu(x)), FLAT),
    "torch.sigmoid": (lambda: call(lambda x: torch.sigmoid(x)), FLAT),
    "x.sigmoid": (lambda: call(lambda x: x.sigmoid()), FLAT),
    "F.sigmoid": (lambda: call(lambda x: F.sigmoid(x)), FLAT),
    "torch.tanh": (lambda: call(lambda x: torch.tanh(x)), FLAT),
    "x.tanh": (lambda: call(lambda x: x.tanh()), FLAT),
    "F.tanh": (lambda: call(lambda x: F.tanh(x)), FLAT),
    "F.dropout": (lambda: Call(lambda s, x: F.dropout(x, 0.9, training=s.training)), FLAT),
    # arithmetic
    "x + number": (lambda: call(lambda x: x + 0.1), FLAT),
    "number + x": (lambda: call(lambda x: 0.1 + x), FLAT),
    "x - number": (lambda: call(lambda x: x - 0.1), FLAT),
    "number - x": (lambda: call(lambda x: 0.1 - x), FLAT),
    "x * number": (lambda: call(lambda x: x * -0.1), FLAT),
    "number * x": (lambda: call(lambda x: -0.1 * x), FLAT),
    "x / number": (lambda: call(lambda x: x / -0.3), FLAT),
    "-x": (lambda: call(lambda x: -x), FLAT),
    "torch functions": (
        lambda: call(lambda x: torch.neg(torch.div(torch.mul(torch.sub(x, 2), 3), 7))),
        FLAT,
    ),
    "methods": (lambda: call(lambda x: x.add(1).sub(3).mul(2).div(5).neg()), FLAT),
    "tensor + x": (lambda: call(lambda x: torch.arange(6) + x), FLAT),
    "parameter - x": (lambda: Call(lambda s, x: s.c - x, c=rows(6)), FLAT),
    "x - parameter": (lambda: Call(lambda s, x: x - s.c, c=rows(6)), FLAT),
    "x * parameter": (lambda: Call(lambda s, x: s.c * x, c=rows(4, 1, 1)), IMAGE),
    "x / parameter": (lambda: Call(lambda s, x: x / s.c, c=rows(5)), IMAGE),
    "normalisation": (lambda: Buffers((4, 1, 1)), IMAGE),
    "normalisation with a batch dimension": (lambda: Buffers((1, 4, 1, 1)), IMAGE),
    "normalisation, flat": (lambda: Buffers((1, 4)), (4,)),
    # merges
    "residual add": (lambda: Call(lambda s, x: x + s.layer(x), layer=nn.Linear(6, 6)), FLAT),
    "residual sub": (lambda: Call(two_paths, a=nn.Linear(6, 4), b=nn.Linear(4, 4)), FLAT),
    "augmented add": (lambda: Call(augmented_add, layer=nn.Linear(6, 6)), FLAT),
    "x + x": (lambda: call(lambda x: torch.add(x, x)), FLAT),
    "x - x": (lambda: call(lambda x: torch.sub(x, x)), FLAT),
    "a layer used twice": (
        lambda: Call(lambda s, x: s.layer(torch.relu(s.layer(x))), layer=nn.Linear(6, 6)),
        FLAT,
    ),
    "sizes and dead code": (lambda: Call(weird_but_fine, layer=nn.ReLU()), IMAGE),
    "a default argument": (lambda: DefaultArgument(), FLAT),
}


class DefaultArgument(nn.Module):
    """A forward with an option that nobody sets."""

    def forward(self, x: Tensor, factor: float = 3.0) -> Tensor:
        return x * factor


# Relative to 1 + |value|; sums here have up to a hundred terms of size one.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_graph_computes_the_module(case: str, dtype: torch.dtype) -> None:
    build, shape = CASES[case]
    torch.manual_seed(0)
    module = build().to(dtype).eval()
    x = torch.randn(5, *shape, dtype=dtype)
    graph = trace(module, shape, box=Box(x[:1], x[:1]))  # of its type if the module has none
    expected = module(x)
    actual = graph(x)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape == (5, *graph.output_shape)
    assert graph.input_shape == shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_cases_cover_every_operation() -> None:
    seen = set()
    for build, shape in CASES.values():
        seen |= {type(node.op) for node in trace(build(), shape).nodes}
    assert seen == set(ops.ALL_OPS)


@pytest.mark.parametrize("op", [op for op in ops.ALL_OPS if op is not ops.Input])
@settings(max_examples=6)
@given(data=st.data())
def test_graph_computes_random_modules(op: type[ops.Op], data: st.DataObject) -> None:
    module = data.draw(networks(containing=op))
    box = data.draw(boxes(module.input_shape, batch=2))
    graph = trace(module, module.input_shape, box=box[:1])
    assert op in {type(node.op) for node in graph.nodes}
    x = points_in(box, 4)
    # BatchNorm is computed in another way than torch does it; all else is the same.
    error = rounding_errors(graph, box, torch.float64)[len(graph.nodes) - 1].repeat(4, 1)
    assert ((graph(x) - module(x)).abs() <= error).all()


def test_shapes_of_nodes_are_those_of_samples() -> None:
    module = nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 7))
    graph = trace(module, IMAGE)
    assert [node.shape for node in graph.nodes] == [IMAGE, (2, 4, 3), (2, 4, 3), (24,), (7,)]
    assert [node.name for node in graph.nodes] == ["input", "0", "1", "2", "3"]
    assert graph.relus == (2,)
    assert graph.output_shape == (7,)


def test_dead_code_is_pruned() -> None:
    graph = trace(Call(weird_but_fine, layer=nn.ReLU()), IMAGE)
    assert [type(node.op) for node in graph.nodes] == [ops.Input, ops.Reshape]


def test_identity_network_returns_its_input() -> None:
    graph = trace(nn.Identity(), FLAT)
    x = torch.randn(3, 6)
    assert len(graph.nodes) == 1
    assert torch.equal(graph(x), x)


def test_training_mode_does_not_matter() -> None:
    module = nn.Sequential(nn.Linear(6, 4), norm(nn.BatchNorm1d, 4), nn.Dropout(0.5), nn.ReLU())
    module.train()
    graph = trace(module, FLAT)
    assert module.training, "tracing must not change the mode"
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(5, 6)
    actual = graph(x)
    torch.testing.assert_close(actual, module.eval()(x))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} changed"


def test_tracing_leaves_nothing_in_the_module() -> None:
    module = Call(lambda self, x: self.layer(x) + torch.ones(4), layer=nn.Linear(6, 4))
    attributes, state = set(vars(module)), set(module.state_dict())
    trace(module, FLAT)
    assert set(vars(module)) == attributes
    assert set(module.state_dict()) == state


def test_inplace_activation_whose_input_is_read_again() -> None:
    """`relu_` changes what the shortcut reads; a graph that ignores this would be unsound."""

    def forward(self: Call, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(self.relu(hidden)) + hidden

    module = Call(forward, a=nn.Linear(6, 4), b=nn.Linear(4, 4), relu=nn.ReLU(inplace=True))
    assert_same_or_refused(module)


def test_inplace_activation_of_the_input() -> None:
    """The shortcut of a pre-activation block; inputs above zero would not show it."""

    def forward(self: Call, x: Tensor) -> Tensor:
        return self.a(self.relu(x)) + x

    assert_same_or_refused(Call(forward, a=nn.Linear(6, 6), relu=nn.ReLU(inplace=True)))


def test_inplace_activation_that_hurts_nobody() -> None:
    """Most networks have these; nobody else reads the value."""
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).eval()
    x = torch.randn(20, 6)
    torch.testing.assert_close(trace(module, FLAT)(x), module(x))


def test_inplace_sum_of_a_value_that_is_read_again() -> None:
    """`out += ...` on a name that shares its tensor with another one."""

    def forward(self: Call, x: Tensor) -> Tensor:
        hidden = self.a(x)
        out = hidden
        out += 1
        return torch.cat((out, hidden), 1)

    module = Call(forward, a=nn.Linear(6, 4))
    assert_same_or_refused(module)
