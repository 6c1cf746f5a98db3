"""Small networks of smooth functions, products, jumps, copies and what is made of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[int, ...]]


class Parts(nn.Module):
    """A function of an input and of layers, and a linear layer behind it."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        outputs: int,
        shape: tuple[int, ...],
        *layers: nn.Module,
    ) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        with torch.no_grad():
            size = function(torch.zeros(2, *shape), *layers).flatten(1).shape[1]
        self.last = nn.Linear(size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.last(self.function(x, *self.layers).flatten(1))


def _activations(r: random.Random) -> Callable[[Tensor], Tensor]:
    return r.choice(
        [
            *(F.gelu, F.silu, F.mish, F.elu, F.softplus, F.hardswish, F.selu, torch.sin, torch.erf),
            *(torch.atan, torch.square, lambda x: torch.exp(-x * x), F.softsign, F.hardtanh),
            *(F.relu6, torch.abs, F.softshrink, lambda x: 1 / (2 + torch.tanh(x)), F.tanhshrink),
        ]
    )


def smooth(r: random.Random) -> Made:
    """Two layers of functions."""
    first, second, n, w = _activations(r), _activations(r), r.randint(2, 4), r.randint(2, 5)
    layers = nn.Linear(n, w), nn.Linear(w, r.randint(1, 3))
    return Parts(lambda x, a, b: second(b(first(a(x)))), r.randint(2, 3), (n,), *layers), (n,)


def products(r: random.Random) -> Made:
    """Products, quotients and gates of two values."""
    n, w = r.randint(2, 4), r.randint(1, 3)
    join = r.choice(
        [
            lambda x, a, b: a(x) * torch.tanh(b(x)),
            lambda x, a, b: a(x) / (1.5 + torch.sigmoid(b(x))),
            lambda x, a, b: F.glu(torch.cat((a(x), b(x)), 1)),
            lambda x, a, b: torch.einsum("bi,bj->bij", a(x), b(x)),
            lambda x, a, b: torch.relu(a(x)) * torch.relu(b(x)),
            lambda x, a, b: a(x).prod(1, keepdim=True) + b(x).cumsum(1),
        ]
    )
    layers = nn.Linear(n, w), nn.Linear(n, w)
    return Parts(join, r.randint(2, 3), (n,), *layers), (n,)


def attention(r: random.Random) -> Made:
    """Attention of two or three tokens, perhaps with a mask."""
    shape, causal = (r.randint(2, 3), 2), r.random() < 0.5

    def attend(x: Tensor, q: nn.Module, k: nn.Module) -> Tensor:
        return F.scaled_dot_product_attention(q(x), k(x), x, is_causal=causal)

    return Parts(attend, 2, shape, nn.Linear(2, 2), nn.Linear(2, 2)), shape


def normalised(r: random.Random) -> Made:
    """Softmax, norms, variances, and normalisations."""
    n, w = r.randint(2, 4), r.randint(2, 4)
    function = r.choice(
        [
            lambda x, a: a(x).softmax(1),
            lambda x, a: a(x).log_softmax(1),
            lambda x, a: a(x).logsumexp(1, keepdim=True),
            lambda x, a: F.layer_norm(a(x), (w,)),
            lambda x, a: F.normalize(a(x), dim=1),
            lambda x, a: a(x).var(1, keepdim=True),
            lambda x, a: a(x).norm(dim=1, keepdim=True),
            lambda x, a: F.rms_norm(a(x), (w,)),
        ]
    )
    return Parts(function, r.randint(2, 3), (n,), nn.Linear(n, w)), (n,)


def recurrent(r: random.Random) -> Made:
    """A recurrent layer of two steps."""
    kind = r.choice([nn.LSTM, nn.GRU, nn.RNN])
    return Parts(lambda x, f: f(x)[0], 2, (2, 2), kind(2, 2, batch_first=True)), (2, 2)


def jumps(r: random.Random) -> Made:
    """Comparisons, choices, rounding, places of maxima."""
    n, w = r.randint(2, 4), r.randint(2, 4)
    function = r.choice(
        [
            lambda x, a: (a(x) > 0.3).to(x.dtype) + torch.relu(a(x)),
            lambda x, a: torch.where(a(x) > 0, a(x), -0.25),
            lambda x, a: (4 * a(x)).round() / 4 + torch.tanh(a(x)),
            lambda x, a: F.one_hot(a(x).argmax(1), w).to(x.dtype) + a(x),
            lambda x, a: torch.sign(a(x)) * torch.relu(a(x)),
        ]
    )
    return Parts(function, r.randint(2, 3), (n,), nn.Linear(n, w)), (n,)


def copies(r: random.Random) -> Made:
    """Copies, constants beside values, maxima along dimensions, windows."""
    shape = (2, 2, 2)
    function = r.choice(
        [
            lambda x, c: torch.relu(c(torch.cat((x, torch.ones_like(x)), 1)[:, 1:3])),
            lambda x, c: torch.relu(c(x.roll(1, 2))).amax((2, 3)),
            lambda x, c: F.unfold(torch.relu(c(x)), 2, padding=1).cummax(1)[0].amin(2),
            lambda x, c: F.adaptive_max_pool2d(torch.relu(c(x)), (1, 2)),
            lambda x, c: torch.relu(c(x)).triu() - x.flip(3),
            lambda x, c: torch.maximum(c(x), x) - torch.minimum(c(x), x.mT),
            lambda x, c: torch.relu(c(F.pad(x, (1, 0, 0, 0), "replicate")))[..., 1:],
        ]
    )
    return Parts(function, r.randint(2, 3), shape, nn.Conv2d(2, 2, 1)), shape


def enlarged(r: random.Random) -> Made:
    """Transposed convolutions and interpolation."""
    shape = (1, 2, 2)
    function = r.choice(
        [
            lambda x, c: torch.relu(c(x)).mean((2, 3)),
            lambda x, c: torch.relu(F.interpolate(c(x), scale_factor=2, mode="bilinear")).sum(3),
            lambda x, c: F.max_pool2d(F.interpolate(x, scale_factor=2), 2) + c(x)[..., :2, :2],
        ]
    )
    return Parts(function, 2, shape, nn.ConvTranspose2d(1, 1, 2)), shape


COMPOSED = {
    made.__name__: made
    for made in (*(smooth, products, attention, normalised, recurrent, jumps, copies, enlarged),)
}
