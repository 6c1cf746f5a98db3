"""Layers that are made of others: traced they compute the same, are bounded and verified.

Norms and variances, running sums, products by letters, constants beside values, masks, windows as
numbers of their own, recurrent layers of one length, and weights computed from parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import call
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.errors import UserError
from tightrope.graph import Graph, ops, trace

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT, ROWS, IMAGE = (6,), (3, 4), (2, 5, 6)
CAUSAL = torch.ones(3, 3).tril().bool()
INF = math.inf
M6 = torch.randn(6, 6, generator=torch.Generator().manual_seed(5))
M3 = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(6))
SIX = torch.arange(6)
EPS = 1e-3
aten = torch.ops.aten


class With(nn.Module):
    """A function of an input and of layers."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.function(x, *self.layers)


def plus(x: Tensor, number: float) -> Tensor:
    """Add where a mask hides nothing: minus infinity above the diagonal."""
    return x + torch.zeros(3, 3).masked_fill(~CAUSAL, number)


def overwritten(x: Tensor) -> Tensor:
    """Change parts of a copy."""
    y = x.clone()
    y[:, 2] = 0
    y[:, 3:5] *= 2
    y[:, 0] = y[:, 1]
    return y


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    # along dimensions
    "norm": (lambda x: x.norm(dim=2), ROWS),
    "norm of order one": (lambda x: torch.linalg.vector_norm(x, 1, 1), ROWS),
    "norm of order infinity": (lambda x: torch.linalg.vector_norm(x, INF, (1, 2), True), ROWS),
    "normalize": (lambda x: F.normalize(x + 2, dim=1), FLAT),
    "cosine similarity": (lambda x: F.cosine_similarity(x + 2, x.flip(1), 1).view(-1, 1), FLAT),
    "distance": (lambda x: F.pairwise_distance(x, 2 - x).view(-1, 1), FLAT),
    "variance": (lambda x: x.var(2), ROWS),
    "variance, uncorrected": (lambda x: x.var((1, 2), unbiased=False, keepdim=True), ROWS),
    "deviation": (lambda x: x.std(1), ROWS),
    "variance and mean": (lambda x: torch.stack(torch.var_mean(x, 1), 1), ROWS),
    "deviation and mean": (lambda x: torch.cat(torch.std_mean(x, 1), 1), ROWS),
    "logsumexp": (lambda x: x.logsumexp(1), ROWS),
    "logsumexp of large numbers": (lambda x: (200 * x).logsumexp(2, keepdim=True), ROWS),
    "product": (lambda x: x.prod(2), (3, 5)),
    "cumsum": (lambda x: x.cumsum(1), ROWS),
    "cumprod": (lambda x: x.cumprod(2), ROWS),
    "cummax": (lambda x: x.cummax(1)[0], ROWS),
    "cummin": (lambda x: x.cummin(2)[0], ROWS),
    # products
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x.sin()), ROWS),
    "einsum of heads": (
        lambda x: torch.einsum("bihd,bjhd->bhij", x.view(-1, 3, 2, 2), x.cos().view(-1, 3, 2, 2)),
        ROWS,
    ),
    "einsum of three": (lambda x: torch.einsum("bi,bj,ij->b", x, x.sin(), M6).view(-1, 1), FLAT),
    "einsum, elementwise": (lambda x: torch.einsum("...ij,j->...ij", x, M6[0, :4]), ROWS),
    "einsum, a matrix for each row": (lambda x: torch.einsum("bij,ijk->bik", x, M3), ROWS),
    "einsum, implicit": (lambda x: torch.einsum("bij,jk", x, M6[:4, :3]), ROWS),
    "einsum with a sum": (lambda x: torch.einsum("bij,kl->bk", x, M6[:2]), ROWS),
    "tensordot": (lambda x: torch.tensordot(x, M6[:4, :3], dims=([1], [1])), ROWS),
    "constant that is many matrices": (lambda x: x[:, :, None] @ M3, ROWS),
    "addmm": (lambda x: torch.addmm(M6[0, :3], x, M6[:, :3], alpha=0.5), FLAT),
    "baddbmm": (lambda x: torch.baddbmm(x[:, :, :3], x, x.mT, beta=0.5), ROWS),
    "addcmul": (lambda x: torch.addcmul(x, x, x.sin(), value=0.5), FLAT),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x + 3), FLAT),
    "lerp": (lambda x: torch.lerp(x, x.sin(), 0.25), FLAT),
    "alpha": (lambda x: torch.add(x, x.sin(), alpha=2) + torch.sub(x, x.cos(), alpha=3), FLAT),
    # constants beside values
    "cat with a constant": (lambda x: torch.cat((x, torch.ones(len(x), 2)), 1), FLAT),
    "cat with a channel": (
        lambda x: torch.cat((torch.arange(30.0).view(1, 1, 5, 6).expand(len(x), 1, 5, 6), x), 1),
        IMAGE,
    ),
    "stack with a constant": (lambda x: torch.stack((x, torch.zeros_like(x)), 1), FLAT),
    "zeros_like": (lambda x: torch.maximum(x, torch.zeros_like(x)), FLAT),
    "new_full": (lambda x: x * x.new_full((len(x), 1), 0.5), FLAT),
    "overwritten": (overwritten, FLAT),
    "scatter": (lambda x: torch.zeros(len(x), 7).scatter(1, SIX.expand(len(x), -1), x), FLAT),
    "index_put": (lambda x: aten.index_put(x, [None, SIX[:2]], SIX[1:3] / 2), FLAT),
    "where, known": (lambda x: torch.where(SIX > 2, x, 0.5), FLAT),
    "where, known, of two": (lambda x: torch.where(SIX > 2, x, 1 - x), FLAT),
    "masked_fill": (lambda x: x.masked_fill(CAUSAL[:, :1] & CAUSAL[0, 0], 0.25), ROWS),
    "tril": (lambda x: (x @ x.mT).tril(), ROWS),
    "triu": (lambda x: x.triu(1), ROWS),
    # masks
    "masked softmax": (
        lambda x: (x @ x.mT).masked_fill(~CAUSAL, -INF).softmax(-1) @ x,
        ROWS,
    ),
    "softmax of minus infinity": (lambda x: plus(x @ x.mT, -INF).softmax(-1) @ x, ROWS),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True), ROWS,
    ),
    "attention with a mask": (
        lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=CAUSAL), ROWS,
    ),
    "attention with numbers added": (
        lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=M6[:3, :3]), ROWS,
    ),
    "a few values before the batch": (
        lambda x: torch.matmul(*x[:, :, :4].unflatten(2, (2, 2)).permute(2, 0, 3, 1).unbind(0)[:1],
                               x[:, :, :4].unflatten(2, (2, 2)).permute(2, 0, 1, 3)[1]), ROWS,
    ),
    "rows before the batch": (lambda x: x.transpose(0, 1)[2] - x.mT.permute(2, 0, 1)[0], ROWS),
    # others
    "one_hot": (lambda x: F.one_hot(x.argmax(1), 6).to(x.dtype) + 0 * x, FLAT),
    "atan": (torch.atan, FLAT),
    "hyperbolic": (lambda x: torch.sinh(x / 4) - torch.cosh(x / 4), FLAT),
    "exp2": (lambda x: torch.exp2(x / 4), FLAT),
    "logit": (lambda x: torch.logit(x.sigmoid(), 1e-3), FLAT),
    "rrelu": (F.rrelu, FLAT),
    "glu": (lambda x: F.glu(x, 1), FLAT),
    "windows": (lambda x: F.unfold(x, (3, 2), stride=2, padding=1), IMAGE),
    "windows added": (lambda x: F.fold(F.unfold(x, 2), (5, 6), 2), IMAGE),
    "windows added, with room": (
        lambda x: F.fold(F.unfold(x, (3, 2), 1, 1, 2), (5, 6), (3, 2), 1, 1, 2), IMAGE,
    ),
}  # fmt: skip


def last_state(x: Tensor, layer: nn.LSTM) -> Tensor:
    """Return the last state of the last layer, as many classifiers do."""
    _, (h, _) = layer(x)
    return h[-1]


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), ROWS),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d((2, 4)), IMAGE),
    "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(2), (1, 3, 2, 3)),
    "Bilinear": (lambda: With(lambda x, f: f(x, x.sin()), nn.Bilinear(6, 6, 3)), FLAT),
    "Embedding": (lambda: With(lambda x, e: x + e(torch.arange(3)), nn.Embedding(5, 4)), ROWS),
    "LSTM": (lambda: With(lambda x, f: f(x)[0], nn.LSTM(4, 3, batch_first=True)), ROWS),
    "LSTM of two layers": (
        lambda: With(
            lambda x, f: f(x)[0], nn.LSTM(4, 2, 2, batch_first=True, bidirectional=True)
        ),
        ROWS,
    ),
    "LSTM, last state": (lambda: With(last_state, nn.LSTM(4, 3, batch_first=True)), ROWS),
    "GRU": (lambda: With(lambda x, f: f(x)[0], nn.GRU(4, 3, bias=False, batch_first=True)), ROWS),
    "GRU, last state": (
        lambda: With(lambda x, f: f(x)[1].squeeze(0), nn.GRU(4, 3, batch_first=True)), ROWS,
    ),
    "RNN": (
        lambda: With(lambda x, f: f(x)[0], nn.RNN(4, 3, nonlinearity="relu", batch_first=True)),
        ROWS,
    ),
    "LSTMCell": (lambda: With(lambda x, f: f(x[:, 0], f(x[:, 1]))[0], nn.LSTMCell(4, 3)), ROWS),
    "GRUCell": (lambda: With(lambda x, f: f(x[:, 0], f(x[:, 1])), nn.GRUCell(4, 3)), ROWS),
    "RNNCell": (lambda: With(lambda x, f: f(x[:, 0], f(x[:, 1])), nn.RNNCell(4, 3)), ROWS),
    "MultiheadAttention with a mask": (
        lambda: With(
            lambda x, f: f(x, x, x, attn_mask=~CAUSAL)[0],
            nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        ROWS,
    ),
    "token": (
        lambda: With(
            lambda x, t: torch.cat((t.weight[None].expand(len(x), -1, -1), x), 1), nn.Linear(4, 1)
        ),
        ROWS,
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), FLAT),
    "weight norm by a hook": (lambda: nn.utils.weight_norm(nn.Conv2d(2, 3, 3)), IMAGE),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), IMAGE),
    "spectral norm by a hook": (lambda: nn.utils.spectral_norm(nn.Linear(6, 4)), FLAT),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 6)), FLAT),
    "cosine classifier": (
        lambda: With(lambda x, f: F.linear(x, F.normalize(f.weight)), nn.Linear(6, 3)), FLAT,
    ),
}  # fmt: skip

CASES = {
    **{name: (lambda f=f: call(f), shape) for name, (f, shape) in FUNCTIONS.items()},
    **{name: (lambda m=m: nn.Sequential(m()), shape) for name, (m, shape) in LAYERS.items()},
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_layers_are_traced_bounded_and_verified(name: str) -> None:
    build, shape = CASES[name]
    torch.manual_seed(0)
    module = nn.Sequential(build(), nn.Flatten()).eval()
    x = torch.rand(2, *shape)
    with torch.no_grad():
        graph, expected = trace(module, shape, frozen=True), module(x)
        torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)
        assert_bounds_hold(graph, module, x)
    lower, upper = ((x[0] + sign * EPS).clamp(0, 1) for sign in (-1, 1))
    for low, verdict in ((-1.5, Verdict.VERIFIED), (1.5, Verdict.FALSIFIED)):
        asked = tr.within(expected[0] + low, expected[0] + 2.5)
        assert tr.verify(graph, box=(lower, upper), spec=asked).verdict == verdict


CONSTANT: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "cumsum": (lambda x: x.cumsum(1), ROWS),
    "windows": (lambda x: F.unfold(x, 2, padding=1), IMAGE),
    "windows added": (lambda x: F.fold(F.unfold(x, 2), (5, 6), 2), IMAGE),
    "scatter": (lambda x: x.scatter(1, SIX[None, ::2].expand(len(x), -1), 0.1), FLAT),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONSTANT)
def test_constants_have_the_precision_of_the_network(name: str, dtype: torch.dtype) -> None:
    function, shape = CONSTANT[name]
    module = With(lambda x, first: function(first(x)), nn.Linear(shape[-1], shape[-1])).to(dtype)
    x = torch.rand(2, *shape, dtype=dtype)
    close = 8 * torch.finfo(dtype).eps
    with torch.no_grad():
        torch.testing.assert_close(trace(module, shape)(x), module(x), rtol=close, atol=close)


def assert_bounds_hold(graph: Graph, module: nn.Module, x: Tensor) -> None:
    """Bounds are finite and hold the outputs at points of a ball, corners among them."""
    generator = torch.Generator().manual_seed(1)
    noise = 2 * torch.rand(60, *x.shape, generator=generator) - 1
    noise[::2] = noise[::2].sign()
    points = (x + EPS * noise).clamp(0, 1)
    outputs = module(points.flatten(0, 1)).unflatten(0, points.shape[:2]).double()
    slack = 1e-5 * (1 + outputs.abs())  # of a float32 module
    for method in ("ibp", "crown-ibp"):
        found = tr.bounds(graph, x, eps=EPS, method=method)
        assert bool(found.lower.isfinite().all()) and bool(found.upper.isfinite().all())
        inside = (outputs >= found.lower - slack) & (outputs <= found.upper + slack)
        assert bool(inside.all())


def test_a_row_that_is_hidden_altogether_is_refused() -> None:
    module = call(lambda x: x.masked_fill(torch.tensor([[True], [False]]), -INF).softmax(-1))
    with pytest.raises(UserError, match=r"differs from|nothing but minus infinity"):
        trace(module, (2, 3))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.masked_fill(CAUSAL, -INF).amax(2), "minus infinity"),
        (lambda x: x.masked_fill(CAUSAL, -INF).log_softmax(2), "minus infinity"),
        (lambda x: torch.einsum("bii->b", x).view(-1, 1), "a diagonal"),
        (lambda x: torch.einsum("bij,cij->b", x, x).view(-1, 1), "mixes the samples"),
        (lambda x: torch.linalg.vector_norm(x, 3, 2), "a norm of order 3"),
        (lambda x: x.var(0, keepdim=True) + x, "a reduction of the batch"),
        (lambda x: x.cumsum(0), "over the batch"),
    ],
)
def test_what_is_not_known_is_refused(function: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        trace(call(function), (3, 3))


LIVE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tied": (
        lambda: With(lambda x, f: F.linear(torch.tanh(f(x)), f.weight.t()), nn.Linear(6, 3)), FLAT,
    ),
    "token": LAYERS["token"],
    "Bilinear": LAYERS["Bilinear"],
    "einsum": (
        lambda: With(lambda x, f: torch.einsum("bij,kj->bki", x, f.weight), nn.Linear(4, 3)), ROWS,
    ),
    "LSTM": LAYERS["LSTM"],
}  # fmt: skip


@pytest.mark.parametrize("name", LIVE)
def test_views_of_parameters_stay_live(name: str) -> None:
    build, shape = LIVE[name]
    torch.manual_seed(0)
    layer = build().double()
    with torch.no_grad():
        graph = trace(layer, shape)
    x = torch.randn(3, *shape, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        graph(x).square().sum().backward()
        ours = [None if p.grad is None else p.grad.clone() for p in layer.parameters()]
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        for mine, parameter in zip(ours, layer.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(graph(x), layer(x))


def test_weights_computed_from_parameters_are_not_live() -> None:
    layer = parametrizations.weight_norm(nn.Linear(6, 4))
    with pytest.raises(UserError, match="frozen=True"):
        trace(layer, FLAT)
    graph = trace(layer, FLAT, frozen=True)
    x = torch.rand(2, 6)
    torch.testing.assert_close(graph(x), layer(x))
    assert not any(t.requires_grad for n in graph.nodes for t in vars(n.op).values()
                   if isinstance(t, Tensor))  # fmt: skip


def test_einsum_becomes_layers() -> None:
    kinds = {name: {type(n.op) for n in trace(CASES[name][0](), CASES[name][1]).nodes}
             for name in ("einsum", "einsum, implicit", "einsum, a matrix for each row",
                          "einsum, elementwise")}  # fmt: skip
    assert ops.MatMul in kinds["einsum"] and ops.Linear in kinds["einsum, implicit"]
    assert ops.Conv2d in kinds["einsum, a matrix for each row"]
    assert ops.Scale in kinds["einsum, elementwise"]


def test_a_refusal_names_few_parts() -> None:
    module = call(lambda x: sum(getattr(torch, f)(x) for f in UNKNOWN))
    with pytest.raises(UserError) as caught:
        trace(module, FLAT)
    message = str(caught.value)
    assert "and 2 more" in message and "\n" not in message and len(message) < 400


UNKNOWN = ("lgamma", "digamma", "erfc", "erfinv", "asinh", "acosh", "tan")
