"""What PyTorch allows in a module: each is traced as it runs, or refused in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import Call, norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tightrope.errors import UserError
from tightrope.graph import trace

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*quantize:UserWarning"
    ),
]

INF = float("inf")
SIGNS = torch.tensor([-1.0, 1.0, 2.0])


def layer(outputs: int = 3, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, outputs)


def module(forward: Callable[[Call, Tensor], Tensor]) -> Call:
    return Call(forward, a=layer(4), b=layer(seed=1)).eval()


# --- traced -----------------------------------------------------------------------------------


class Negated(torch.autograd.Function):
    """Its backward pass says nothing of its forward pass."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class OwnCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * SIGNS


def _scaled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def scaled(self: nn.Module, x: Tensor, *, scale: float = -2.0) -> Tensor:
        return forward(self, x) * scale

    return scaled


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    @_scaled
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Tensor],
        types: object,
        args: tuple = (),
        kwargs: object = None,
    ) -> Tensor:
        result = function(*args, **dict(kwargs or ()))
        return -result if function is F.linear else result


def under_a_mode(self: Call, x: Tensor) -> Tensor:
    with FunctionMode():
        return self.b(x)


def without_gradients(self: Call, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = self.a(x)
    return self.b(hidden.relu())


def forward_of_the_instance() -> nn.Module:
    inner = layer()
    plain = inner.forward
    inner.forward = lambda x: plain(x) * SIGNS
    return nn.Sequential(inner)


def tied_weights() -> nn.Module:
    first, second = layer(4), layer(4, seed=1)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


def strided_weights() -> nn.Module:
    odd = layer(4)
    odd.weight = nn.Parameter(torch.randn(4, 4).T)
    odd.bias = nn.Parameter(torch.randn(8)[::2])
    return nn.Sequential(odd)


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(27, 3)).to(memory_format=torch.channels_last)


def hidden_layers() -> nn.Module:
    layers = [layer(4), nn.ReLU(), layer(seed=1)]
    return Call(lambda self, x: functools.reduce(lambda value, part: part(value), layers, x))


def hooked() -> nn.Module:
    layers = nn.Sequential(layer(4), nn.ReLU(), layer(seed=1))
    layers[0].register_full_backward_hook(lambda *_: None)
    layers[2].register_forward_hook(lambda _, inputs, output: -output, always_call=True)
    layers[2].register_forward_pre_hook(
        lambda _, args, kwargs: ((-2 * args[0],), kwargs), with_kwargs=True
    )
    layers.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    return layers


class AlwaysTraining(nn.Dropout):
    """A layer that does not hear of evaluation mode."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(True)


TRACED: dict[str, Callable[[], nn.Module]] = {
    "condition": lambda: module(
        lambda s, x: torch.where(x.sum(1, keepdim=True) > 2, s.b(x), -s.b(x))
    ),
    "tied weights": tied_weights,
    "strided weights": strided_weights,
    "channels last": channels_last,
    "layers in a plain list": hidden_layers,
    "all kinds of hooks": hooked,
    "a function of its own": lambda: module(lambda s, x: Negated.apply(s.b(x))),
    "__call__": OwnCall,
    "__call__ of a part": lambda: nn.Sequential(OwnCall()),
    "forward of the instance": forward_of_the_instance,
    "keyword-only options": KeywordOnly,
    "a function mode": lambda: module(under_a_mode),
    "no_grad": lambda: module(without_gradients),
    "checkpoint": lambda: module(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=False).relu())),
    "frozen parts": lambda: nn.Sequential(layer(4).requires_grad_(False), layer(seed=1)),
    "dropout of nothing": lambda: nn.Sequential(AlwaysTraining(0.0), layer()),
    "data parallel": lambda: nn.DataParallel(nn.Sequential(layer())),
    "a table of integers": lambda: module(lambda s, x: s.b(x) - torch.arange(3)),
    "small integers that would wrap": lambda: module(
        lambda s, x: torch.tensor([255, 1, 2], dtype=torch.uint8) - s.b(x)
    ),
    "a mask": lambda: module(lambda s, x: s.b(x) * torch.tensor([True, False, True])),
    "statistics of one element": lambda: nn.Sequential(layer(), norm(nn.SyncBatchNorm, 3)),
}


@pytest.mark.parametrize("case", TRACED)
def test_traced(case: str) -> None:
    subject = TRACED[case]().eval()
    graph = trace(subject, (4,))
    with torch.no_grad():
        for x in 3 * torch.randn(20, 1, 4):
            torch.testing.assert_close(graph(x), subject(x.clone()), rtol=1e-5, atol=1e-5)
    assert all(t.is_floating_point() for n in graph.nodes for t in _constants(n.op))


def _constants(op: object) -> list[Tensor]:
    names = ("offset", "factor", "weight", "bias")
    found = [getattr(op, name, None) for name in names]
    return [value for value in found if isinstance(value, Tensor)]


# --- refused ----------------------------------------------------------------------------------


def autocast(self: Call, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = self.a(x)
    return self.b(hidden.float())


def with_gradients(self: Call, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return self.b(self.a(x))


def half_inside(self: Call, x: Tensor) -> Tensor:
    return self.b(x).half().float()


def parameter_changed(self: Call, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.b.bias.add_(0.1)
    return self.b(x)


def gradient_inside(self: Call, x: Tensor) -> Tensor:
    with torch.enable_grad():
        point = x.detach().clone().requires_grad_()
        self.b(point).relu().sum().backward()
    assert point.grad is not None
    return self.b(x - point.grad)


def random_layer(self: Call, x: Tensor) -> Tensor:
    return nn.Linear(4, 3)(x)


def vector_weight() -> nn.Module:
    weight = nn.Parameter(torch.ones(4))
    return Call(lambda s, x: torch.cat((F.linear(x, s.weight)[:, None], x), 1), weight=weight)


def with_norm(train: bool) -> nn.Module:
    def forward(self: Call, x: Tensor) -> Tensor:
        if train:
            self.norm.train()
        return self.b(self.norm(x))

    return Call(forward, b=layer(), norm=norm(nn.BatchNorm1d, 4))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(layer())),
        "computed from others",
    ),
    "old weight_norm": (lambda: nn.Sequential(nn.utils.weight_norm(layer())), "computed"),
    "spectral_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(layer())),
        "computed",
    ),
    "old spectral_norm": (lambda: nn.Sequential(nn.utils.spectral_norm(layer())), "computed"),
    "transposed weight": (lambda: module(lambda s, x: F.linear(x, 2 * s.a.weight)), "computed"),
    "autocast": (lambda: module(autocast), "autocast"),
    "gradients": (lambda: module(with_gradients), "set_grad_enabled"),
    "half precision inside": (lambda: module(half_inside), "float16"),
    "double precision inside": (lambda: module(lambda s, x: s.b(x) + x.double().sum()), "float64"),
    "complex numbers": (lambda: module(lambda s, x: (s.b(x) * (1 + 2j)).real), "complex"),
    "a complex tensor": (lambda: module(lambda s, x: (s.b(x) * torch.tensor(2j)).imag), "complex"),
    "batch norm in training": (lambda: with_norm(True), "state"),
    "dropout in training": (lambda: nn.Sequential(layer(), AlwaysTraining(1e-7)), "random"),
    "parameter changed": (lambda: module(parameter_changed), "'b.bias'"),
    "gradient inside": (lambda: module(gradient_inside), "cannot"),
    "random layer": (lambda: module(random_layer), "random"),
    "unknown function": (lambda: module(lambda s, x: s.b(x).erfc()), "erfc"),
    "vector weight": (vector_weight, "(4,)"),
    "number beyond float32": (lambda: module(lambda s, x: s.b(F.relu(x * -1e300))), "range"),
    "divisor below float32": (lambda: module(lambda s, x: s.b(F.relu(-x / 1e-300))), "range"),
    "padding beyond float32": (lambda: module(lambda s, x: F.pad(x, (0, 1), value=1e300)), "over"),
    "infinite slope": (lambda: module(lambda s, x: F.leaky_relu(s.b(x), INF)), "slope"),
    "slope that is not a number": (
        lambda: module(lambda s, x: F.leaky_relu(s.b(x) + 1e6, float("nan"))),
        "slope",
    ),
    "quantised": (
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(layer()), {nn.Linear}),
        "cannot",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    build, reason = REFUSED[case]
    with pytest.raises(UserError) as caught:
        trace(build().eval(), (4,))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_batch_norm_at_rest_is_traced() -> None:
    assert len(trace(with_norm(False).eval(), (4,)).nodes) == 3
