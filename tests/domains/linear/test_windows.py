"""Window coefficients are the dense ones, kept small."""

from __future__ import annotations

import pytest
import torch
from linear_helpers import EPS, Residual, small_box, small_network
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients, Windows, unit_rows
from tightrope.domains.linear.crown import Effort, relax
from tightrope.domains.linear.rules import backward
from tightrope.graph import Graph, trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Normalized(nn.Module):
    """Shifts each channel, and divides it: what coefficients do not have is not divided by."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor([0.3, 2.0], dtype=x.dtype).view(2, 1, 1)
        return (x - 0.1307) / scale


class Cut(nn.Module):
    """A part of the channels, and of the map."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:, 1:-1, 2:]


class Apart(nn.Module):
    """A U-Net in small: what was halved and doubled again meets what was not, side by side."""

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 2, 3, 1, 1), nn.Conv2d(4, 2, 3, 1, 1)
        self.inner, self.down, self.up = nn.Conv2d(2, 3, 3, 1, 1), down, up

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = self.up(self.inner(self.down(x)).relu())
        edge = (x.shape[2] - y.shape[2], x.shape[3] - y.shape[3])
        y = nn.functional.pad(y, (edge[1] // 2, edge[1] - edge[1] // 2, 0, edge[0]), value=0.3)
        return self.last(torch.cat([x, y], dim=1).relu())


CHAINS = {
    "transposed": [nn.Conv2d(2, 2, 3), nn.ReLU(), nn.ConvTranspose2d(2, 3, 2, 2), nn.ReLU()],
    "wide transposed": [nn.ConvTranspose2d(2, 2, 3, 2, 1, 1), nn.ReLU(), nn.Conv2d(2, 2, 3)],
    "dilated transposed": [nn.ConvTranspose2d(2, 2, (2, 3), (2, 1), dilation=2), nn.ReLU()],
    "gaps": [nn.ConvTranspose2d(2, 2, 1, 2), nn.ReLU(), nn.Conv2d(2, 2, 3)],
    "group transposed": [nn.ConvTranspose2d(2, 4, 2, 1, 1, groups=2), nn.Conv2d(4, 2, 3, 2)],
    "cut": [nn.Conv2d(2, 3, 3, 1, 1), nn.ReLU(), Cut(), nn.Conv2d(2, 2, 3, 1, 1)],
    "pad": [nn.Conv2d(2, 2, 3), nn.ConstantPad2d((1, 2, 0, 1), 0.7), nn.Conv2d(2, 2, 3, 2)],
    "crop": [nn.Conv2d(2, 2, 3), nn.ConstantPad2d((-1, 2, 0, -1), 0.7), nn.Conv2d(2, 2, 3)],
    "padded avg": [nn.Conv2d(2, 2, 3), nn.AvgPool2d(3, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 2)],
    "uneven avg": [nn.AvgPool2d((2, 1), (1, 2)), nn.ReLU(), nn.Conv2d(2, 2, 2, 1, 1)],
    "inner avg": [nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.Conv2d(2, 2, 2)],
    "u-net": [Apart(nn.AvgPool2d(2), nn.ConvTranspose2d(3, 2, 2, 2))],
    "wide u-net": [Apart(nn.Conv2d(2, 2, 3, 2), nn.ConvTranspose2d(3, 2, 3, 2))],
    "division": [Normalized(), nn.Conv2d(2, 3, 3, 1, 1), nn.ReLU(), nn.Conv2d(3, 2, 3, 2, 1)],
    "stride": [nn.Conv2d(2, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 2, 2, 2)],
    "dilation": [nn.Conv2d(2, 3, 3, 1, 2, dilation=2), nn.ReLU(), nn.Conv2d(3, 2, 3)],
    "groups": [nn.Conv2d(2, 4, 3, 1, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1, groups=4)],
    "uneven": [nn.Conv2d(2, 2, (1, 3), (2, 1), (0, 2)), nn.ReLU(), nn.Conv2d(2, 2, (3, 1))],
    "wide padding": [nn.Conv2d(2, 2, 3, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3, 3, 2)],
    "norm": [nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.LeakyReLU(0.1), nn.Conv2d(2, 2, 3, 1, 1)],
    "tanh": [nn.Conv2d(2, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 3, 1, 1)],
    "avg": [nn.Conv2d(2, 2, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(2, 2, 2, 1, 1)],
    "one pixel": [nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1)],
}


def chain(name: str) -> Graph:
    torch.manual_seed(0)
    module = nn.Sequential(*CHAINS[name]).double().eval()
    return trace(module, (2, 7, 8)).detach()


def residual() -> Graph:
    """The part of the residual network up to its join."""
    graph = trace(Residual(nn.ReLU()).double(), (2, 6, 6)).detach()
    last = max(i for i, node in enumerate(graph.nodes) if len(node.shape) == 3)
    return Graph(graph.nodes[: last + 1])


def graphs() -> list[tuple[str, Graph]]:
    torch.manual_seed(1)
    return [*((name, chain(name)) for name in CHAINS), ("residual", residual())]


NETWORKS = pytest.mark.parametrize("graph", [g for _, g in graphs()], ids=[n for n, _ in graphs()])


def units(found: Relaxation, *, windows: bool, batch: int, target: int) -> Coefficients:
    """Every neuron of a node for every batch element, in mixed order and with mixed signs."""
    shape = found.graph.nodes[target].shape
    count = torch.Size(shape).numel()
    order = torch.randperm(count * batch, generator=torch.Generator().manual_seed(0))
    owner = None if batch == 1 else order // count
    like = found.boxes[0].lower
    rows = unit_rows(shape, order % count, owner, like, windows=windows)
    sign = 1.0 - 2.0 * (order % 2).view(-1, 1, 1, 1)
    return rows.like(rows.values * sign.to(like))


@pytest.mark.parametrize("rounding", [0.0, EPS])
@pytest.mark.parametrize("batch", [1, 3])
@NETWORKS
def test_windows_give_the_bounds_of_dense_rows(graph: Graph, batch: int, rounding: float) -> None:
    found = relax(graph, small_box(graph, 0.5, batch=batch), effort=Effort(None), rounding=rounding)
    for target in range(1, len(graph.nodes)):
        if len(graph.nodes[target].shape) != 3:
            continue
        small = units(found, windows=True, batch=batch, target=target)
        dense = units(found, windows=False, batch=batch, target=target)
        assert isinstance(small, Windows) and not isinstance(dense, Windows)
        assert torch.equal(small.dense().values, dense.values)
        bounds = [found.lower(target, rows) for rows in (small, dense)]
        assert torch.allclose(*bounds, rtol=1e-10, atol=1e-10)


@NETWORKS
def test_forms_are_the_same(graph: Graph) -> None:
    found = relax(graph, small_box(graph, 0.5, batch=2), effort=Effort(None))
    target = len(graph.nodes) - 1
    forms = [
        backward(
            graph,
            target,
            units(found, windows=windows, batch=2, target=target),
            found.lines,
            boxes=found.boxes,
        )
        for windows in (True, False)
    ]
    assert torch.allclose(forms[0].constant, forms[1].constant, atol=1e-12)
    inputs = [form.coefficients.dense().values for form in forms]
    assert torch.allclose(*inputs, atol=1e-12)
    assert forms[0].passed.keys() == forms[1].passed.keys()
    for i, passed in forms[0].passed.items():
        assert torch.allclose(passed.dense().values, forms[1].passed[i].dense().values, atol=1e-12)


def test_windows_stay_windows_in_a_u_net() -> None:
    torch.manual_seed(0)
    module = Apart(nn.AvgPool2d(2), nn.ConvTranspose2d(3, 2, 2, 2)).double()
    graph = trace(nn.Sequential(Cut(), module), (3, 25, 27)).detach()
    found = relax(graph, small_box(graph, 0.5), effort=Effort(None))
    target = len(graph.nodes) - 1
    form = backward(
        graph,
        target,
        units(found, windows=True, batch=1, target=target),
        found.lines,
        boxes=found.boxes,
    )
    assert isinstance(form.coefficients, Windows)
    assert form.coefficients.values.shape[2:] == (10, 10)
    assert form.largest == 3 * 10 * 10


def test_windows_stay_smaller_than_the_map() -> None:
    graph = trace(nn.Sequential(*CHAINS["groups"]).double(), (2, 7, 8)).detach()
    found = relax(graph, small_box(graph, 0.5), effort=Effort(None))
    rows = units(found, windows=True, batch=1, target=3)
    form = backward(graph, 3, rows, found.lines, boxes=found.boxes)
    assert isinstance(form.coefficients, Windows)
    assert form.coefficients.values.shape[2:] == (5, 5)


# --- the operations of windows ----------------------------------------------------------------


def window(
    rows: int, size: tuple[int, int], origin: list[list[int]], owner: Tensor | None, seed: int
) -> Windows:
    """Random coefficients that are zero outside a map of 5 x 6."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, 2, *size, generator=generator, dtype=torch.float64)
    return Windows(values, owner, torch.tensor(origin), (5, 6)).cleared()


ORIGINS = {
    "alike": ([[0, 0], [1, 2], [2, 1]], [[1, -1], [2, 1], [3, 0]]),
    "inside": ([[0, 0], [1, 1], [2, 3]], [[0, 1], [1, 2], [2, 4]]),
    "unlike": ([[0, 0], [1, 2], [2, 1]], [[1, 1], [0, 3], [2, 2]]),
    "outside": ([[-2, -1], [3, 4], [4, 5]], [[-3, -1], [2, 4], [3, 5]]),
}


@pytest.mark.parametrize("name", sorted(ORIGINS))
@pytest.mark.parametrize("owner", [None, [2, 0, 0]])
def test_sums(name: str, owner: list[int] | None) -> None:
    mine = None if owner is None else torch.tensor(owner)
    first, second = ORIGINS[name]
    for sizes in (((2, 3), (3, 2)), ((3, 3), (1, 1)), ((1, 2), (3, 4))):
        a = window(3, sizes[0], first, mine, 0)
        b = window(3, sizes[1], second, mine, 1)
        expected = a.dense().values + b.dense().values
        for total in (a.plus(b), b.plus(a), a.plus(b.dense()), b.dense().plus(a)):
            assert torch.allclose(total.dense().values, expected, atol=1e-14)
            assert total.owner is mine
        assert isinstance(a.plus(b), Windows)


@pytest.mark.parametrize("name", sorted(ORIGINS))
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("owner", [None, [2, 0, 0]])
def test_dot_and_take(name: str, batch: int, owner: list[int] | None) -> None:
    mine = None if owner is None else torch.tensor(owner)
    a = window(3, (3, 2), ORIGINS[name][0], mine, 0)
    field = torch.randn(batch, 2, 5, 6, dtype=torch.float64)
    assert torch.allclose(a.dot(field), a.dense().dot(field), atol=1e-13)
    seen = a.like(a.values * a.take(field)).dense().values
    whole = a.dense()
    assert torch.allclose(seen, whole.values * whole.take(field), atol=1e-13)
    chosen = field[[0, 0, 0] if batch == 1 else owner or [0, 1, 2]]
    assert torch.allclose(seen, whole.values * chosen, atol=1e-13)


def test_what_rounding_is_measured_by_is_of_the_rows_own_box() -> None:
    rows = window(3, (3, 2), ORIGINS["inside"][0], torch.tensor([1, 0, 1]), 0)
    field = torch.tensor([1e-3, 1.0], dtype=torch.float64).view(2, 1, 1, 1).expand(2, 2, 5, 6)
    total = rows.values.abs().flatten(1).sum(1)
    for form in (rows, rows.dense()):
        assert torch.allclose(form.reach(field), total * field[[1, 0, 1], 0, 0, 0])


def test_a_field_per_channel_is_seen_everywhere() -> None:
    a = window(3, (2, 2), ORIGINS["outside"][0], None, 0)
    field = torch.tensor([2.0, -1.0], dtype=torch.float64).view(1, 2, 1, 1)
    assert torch.allclose(a.dot(field), a.dense().dot(field.expand(1, 2, 5, 6)), atol=1e-14)


def test_everything_lives_on_the_device_of_the_values() -> None:
    """Tensors on the meta device refuse to mix with others."""
    values = torch.zeros(3, 2, 2, 2, device="meta")
    origin = torch.zeros(3, 2, dtype=torch.long, device="meta")
    a = Windows(values, None, origin, (5, 6))
    assert a._owners().device == values.device
    assert all(place.device == values.device for place in a._places())
    rows = unit_rows((2, 5, 6), origin[:, 0], None, values, windows=False)
    assert rows.values.device == values.device


def test_unit_rows_pick_neurons() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    value = torch.randn(1, 3, 4, 5, dtype=torch.float64)
    positions = torch.randperm(60)
    for windows in (True, False):
        rows = unit_rows((3, 4, 5), positions, None, like, windows=windows)
        assert torch.equal(rows.dot(value), value.flatten()[positions])
    flat = unit_rows((7,), torch.tensor([3, 3, 0]), None, like, windows=True)
    assert torch.equal(flat.values, torch.eye(7, dtype=torch.float64)[[3, 3, 0]])


def test_bounds_of_a_batch_with_other_unstable_neurons() -> None:
    """CROWN's rows have owners: each box alone gives the same."""
    graph = small_network("residual", nn.ReLU())
    wide, thin = small_box(graph, 1.0, seed=1), small_box(graph, 0.01, seed=2)
    both = Box(torch.cat((wide.lower, thin.lower)), torch.cat((wide.upper, thin.upper)))
    together = relax(graph, both, effort=Effort(0))
    for k, box in enumerate((wide, thin)):
        alone = relax(graph, box, effort=Effort(0))
        for i in alone.boxes:
            for a, b in zip(alone.boxes[i].corners, together.boxes[i].corners, strict=True):
                assert torch.allclose(a[0], b[k], atol=1e-11)
