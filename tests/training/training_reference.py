"""A slow, explicit second implementation of what a training step computes.

Everything here is written from the formulas, for a list of torch layers: BatchNorm statistics
are plain differentiable means and variances, intervals have a lower and an upper end that go
through positive and negative weights separately, margins have one explicit row per wrong class.
Nothing is folded, merged or taken from `tightrope`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightrope.nets import Normalize

Interval = tuple[Tensor, Tensor]
TAU = 0.5


class Skip(nn.Module):
    """`x + body(x)`: a residual block without an activation behind the sum."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def plain_net(seed: int = 2) -> nn.Sequential:
    """A convolutional net without BatchNorm, for inputs of shape (2, 4, 4) and 3 classes."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        Normalize([0.4, 0.5], [0.3, 0.2]),
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    return _shake(net).double()


def norm_net(seed: int = 2) -> nn.Sequential:
    """The usual order: every BatchNorm behind a convolution or linear layer."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        Normalize([0.4, 0.5], [0.3, 0.2]),
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 5, bias=False),
        nn.BatchNorm1d(5, eps=1e-3, momentum=0.3),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    return _shake(net).double()


def odd_net(seed: int = 4) -> nn.Sequential:
    """BatchNorms that cannot be folded: at the input, behind a ReLU, behind a residual sum."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.BatchNorm2d(2, affine=False),
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.BatchNorm2d(3, momentum=None),
        Skip(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    return _shake(net).double()


def _shake(net: nn.Sequential) -> nn.Sequential:
    """Leave the friendly defaults: BatchNorm weights of both signs, larger and biased layers."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data *= 2.5
            if module.bias is not None:
                nn.init.normal_(module.bias, 0.3, 0.5)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return net


SHAPE = (2, 4, 4)
NETS = {"plain": plain_net, "norm": norm_net, "odd": odd_net}


def batch(count: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1], some of them at its ends, and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *SHAPE, generator=generator, dtype=torch.float64) * 1.2 - 0.1
    return x.clamp(0, 1), torch.randint(3, (count,), generator=generator)


class Reference:
    """One step of a network on a clean batch, with statistics as explicit tensors."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.net = net
        self.statistics: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.counts: dict[nn.Module, int] = {}  # numbers per channel behind each statistic
        self.logits = self._clean(net, x)

    def _clean(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, nn.Sequential):
            for inner in layer:
                x = self._clean(inner, x)
            return x
        if isinstance(layer, Skip):
            return x + self._clean(layer.body, x)
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            dims = [0, *range(2, x.dim())]
            mean = x.mean(dims)
            variance = ((x - _channels(mean, x)) ** 2).mean(dims)
            self.statistics[layer] = (mean, variance)
            self.counts[layer] = x.numel() // len(mean)
            return self._norm(layer, x)
        return layer(x)

    def _norm(self, layer: nn.Module, x: Tensor) -> Tensor:
        mean, variance = self.statistics[layer]
        x = (x - _channels(mean, x)) / torch.sqrt(_channels(variance, x) + layer.eps)
        if layer.weight is not None:
            x = x * _channels(layer.weight, x) + _channels(layer.bias, x)
        return x

    def points(self, x: Tensor) -> Tensor:
        """The network on other points, with the statistics of the clean batch."""
        return self._points(self.net, x)

    def _points(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, nn.Sequential):
            for inner in layer:
                x = self._points(inner, x)
            return x
        if isinstance(layer, Skip):
            return x + self._points(layer.body, x)
        if layer in self.statistics:
            return self._norm(layer, x)
        return layer(x)

    def bounds(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Interval, list[Interval]]:
        """Margins `o_y - o_i` of every pair, the normalised input, the ReLUs' inputs."""
        assert isinstance(self.net, nn.Sequential)
        *body, last = self.net
        found: list[Interval] = []
        interval = first = (lower, upper)
        for layer in body:
            interval = self._interval(layer, interval, found)
            if isinstance(layer, Normalize):
                first = interval
        rows = []
        for y in range(len(last.bias)):
            gap, shift = last.weight[y] - last.weight, last.bias[y] - last.bias
            low, up = interval
            rows.append(low @ gap.clamp(min=0).T + up @ gap.clamp(max=0).T + shift)
        return torch.stack(rows, 1), first, found

    def _interval(self, layer: nn.Module, i: Interval, found: list[Interval]) -> Interval:
        low, up = i
        if isinstance(layer, nn.Sequential):
            for inner in layer:
                i = self._interval(inner, i, found)
            return i
        if isinstance(layer, Skip):
            inner_low, inner_up = self._interval(layer.body, i, found)
            return low + inner_low, up + inner_up
        if isinstance(layer, nn.Linear | nn.Conv2d):
            positive, negative = layer.weight.clamp(min=0), layer.weight.clamp(max=0)
            return (
                _apply(layer, low, positive, layer.bias) + _apply(layer, up, negative, None),
                _apply(layer, up, positive, layer.bias) + _apply(layer, low, negative, None),
            )
        if isinstance(layer, nn.ReLU):
            found.append(i)
            return low.clamp(min=0), up.clamp(min=0)
        ends = [self._points(layer, end) for end in i]
        return torch.minimum(*ends), torch.maximum(*ends)

    def ibp_loss(self, x: Tensor, y: Tensor, radius: float) -> Tensor:
        """The paper's Eq. (2): mean over samples of ln(1 + sum_i exp(-(lower margin of i)))."""
        margins, _, _ = self.bounds((x - radius).clamp(min=0), (x + radius).clamp(max=1))
        total = x.new_zeros(())
        for n, label in enumerate(y.tolist()):
            wrong = [margins[n, label, i] for i in range(margins.shape[1]) if i != label]
            total = total + torch.log1p(sum(torch.exp(-m) for m in wrong))
        return total / len(y)


def regularizer(first: Interval, layers: list[Interval]) -> Tensor:
    """Shi et al.'s regularisers as their formulas read, for layers in which every ratio exists."""
    r0 = ((first[1] - first[0]) / 2).mean()
    total = r0.new_zeros(())
    for low, up in layers:
        c, r = (low + up) / 2, ((up - low) / 2).mean()
        active, inactive = (low > 0).to(c), (up < 0).to(c)
        a = (c * active).mean() / -(c * inactive).mean()
        deviation = (c - c.mean()) ** 2
        b = (deviation * active).sum() / (deviation * inactive).sum()
        tight = (TAU - r0 / r).clamp(min=0) / TAU
        balance = sum((TAU - torch.minimum(q, 1 / q)).clamp(min=0) for q in (a, b)) / TAU
        total = total + tight + balance
    return total / len(layers)


def _channels(t: Tensor, like: Tensor) -> Tensor:
    return t.reshape(1, -1, *[1] * (like.dim() - 2))


def _apply(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(x, weight, bias, layer.stride, layer.padding)
    return F.linear(x, weight, bias)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter; zero where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in net.named_parameters()
    }
