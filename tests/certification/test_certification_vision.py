"""Modules like those of vision libraries: bounds are sound and finite, and robustness is proved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from convolutional_modules import Line, MobileNet, ResNet18, UNet
from torch import Tensor, nn
from vision_modules import Mixer, VisionTransformer

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.errors import UserError

EPS = 1e-4
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "small transformer": lambda: VisionTransformer(dim=16, depth=1, heads=2, patch=16),
    "small mixer": lambda: Mixer(dim=16, depth=1, patch=16),
    "line": Line,
}
FULL: dict[str, Callable[[], nn.Module]] = {
    "transformer": VisionTransformer,
    "mixer": Mixer,
    "mobile": MobileNet,
    "residual": lambda: ResNet18(width=4),
    "U": UNet,
}


def built(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor, int]:
    torch.manual_seed(0)
    module = make().eval()
    x = torch.rand(1, 3, 32, 32)
    return module, x, int(module(x).argmax())


def check(make: Callable[[], nn.Module]) -> None:
    module, x, label = built(make)
    graph = tr.trace(module, (3, 32, 32))
    found = tr.bounds(graph, x, eps=EPS, method="crown")
    assert bool((torch.isfinite(found.lower) & torch.isfinite(found.upper)).all())
    assert float((found.upper - found.lower).max()) < 0.05
    wide = tr.bounds(graph, x, eps=EPS, method="ibp")
    assert bool((torch.isfinite(wide.lower) & torch.isfinite(wide.upper)).all())
    noise = (torch.rand(64, 3, 32, 32).sign() * (torch.rand(64, 3, 32, 32) * 2 - 1)).sign()
    exact = graph.detach().to(torch.float64)
    points = (x.double() + EPS * noise.double()).clamp(0, 1)
    outputs = exact(points)
    assert bool(((outputs >= found.lower) & (outputs <= found.upper)).all())
    answer = tr.verify(module, x[0], label, eps=EPS, timeout=600)
    assert answer.verdict == Verdict.VERIFIED, answer.reason
    other = (label + 1) % 10
    assert tr.verify(module, x[0], other, eps=EPS, timeout=600).verdict == Verdict.FALSIFIED


@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks(name: str) -> None:
    check(NETWORKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_networks_at_length(name: str) -> None:
    check(FULL[name])


def test_layers_of_attention_are_traced() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3)).eval()
    x = torch.rand(1, 5, 8)
    label = int(module(x).argmax())
    answer = tr.verify(module, x[0], label, eps=1e-3, timeout=600)
    assert answer.verdict == Verdict.VERIFIED, answer.reason


@pytest.mark.parametrize("weights", [True, False])
def test_attention_computes_what_the_layer_does(weights: bool) -> None:
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x.tanh(), need_weights=weights)[0]

    module = Attention().eval()
    original = nn.MultiheadAttention.forward
    graph = tr.trace(module, (5, 8))
    assert nn.MultiheadAttention.forward is original
    x = torch.rand(3, 5, 8)
    torch.testing.assert_close(graph(x), module(x))


def test_attention_that_passes_its_mask_over_is_refused_behind_many_layers() -> None:
    """Rounding on whole paths may explain anything there; PyTorch takes the hint, not the mask."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            given = {"attn_mask": torch.zeros(4, 4), "is_causal": True, "need_weights": False}
            return x + self.layer(x, x, x, **given)[0]

    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.LayerNorm(8), Attention())]
    with pytest.raises(UserError, match="is_causal"):
        tr.trace(nn.Sequential(*layers, nn.Flatten()).eval(), (4, 8))


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1)])
def test_a_softmax_at_the_end_does_not_cost_the_proof(last: nn.Module) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    x = torch.rand(4)
    label = int(body(x[None]).argmax())
    with_it = tr.verify(nn.Sequential(body, last), x, label, eps=0.05)
    without = tr.verify(body, x, label, eps=0.05)
    assert with_it.verdict == without.verdict and with_it.bound == without.bound


def test_values_of_a_softmax_are_bounded_as_they_are() -> None:
    """A question about more than the order keeps the softmax."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Softmax(1)).eval()
    x = torch.rand(2)
    outputs = module(x[None])[0].detach().double()
    least, most = outputs - 0.2, outputs + 0.2
    around = (x - 0.01, x + 0.01)
    assert tr.verify(module, box=around, spec=tr.within(least, most)).verdict == Verdict.VERIFIED
    tight = tr.within(outputs + 1e-3, most)
    assert tr.verify(module, box=around, spec=tight).verdict == Verdict.FALSIFIED


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Softplus, nn.Mish, nn.ELU])
def test_few_inputs_are_decided_by_cutting_them(activation: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(2, 12), activation(), nn.Linear(12, 12), activation())
    module = nn.Sequential(module, nn.Linear(12, 2)).double().eval()
    x = torch.tensor([0.4, 0.6], dtype=torch.float64)
    label = int(module(x[None]).argmax())
    grid = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, 201)] * 2, indexing="ij"), -1)
    margin = module(grid.view(-1, 2).double())
    margin = (margin[:, label] - margin[:, 1 - label]).view(201, 201)
    for eps in (0.1, 0.3, 0.4):
        near = ((grid - x).abs() <= eps + 1e-9).all(-1)
        worst = float(margin[near].min())
        verdict = tr.verify(module, x, label, eps=eps, timeout=600, split="input").verdict
        if worst <= 0:
            assert verdict == Verdict.FALSIFIED
        elif worst > 0.02:
            assert verdict == Verdict.VERIFIED
