"""Products with numbers that do not vary: what needs bounds, and what forms say."""

from __future__ import annotations

import pytest
import torch
from linear_helpers import wired
from torch import Tensor, nn

from tightrope.box import Box
from tightrope.domains.boxes.bounding import GraphBounder
from tightrope.domains.boxes.choosing import FEWEST, ChoosingBounder
from tightrope.domains.linear import crown
from tightrope.domains.linear.crown import CROWN, CROWN_FORMS, CROWN_IBP, relax
from tightrope.domains.linear.factors import Factors, varies
from tightrope.graph import Graph, ops, trace
from tightrope.precision import ROUNDING

pytestmark = pytest.mark.usefixtures("one_thread")


class Masked(nn.Module):
    """A mean of hidden values over the rows whose mask, the last number of each, is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.last = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        values, mask = x[:, :, :3], x[:, :, 3:]
        total = (self.hidden(values) * mask).sum(1)
        return self.last(total / mask.sum(1))


def masked() -> tuple[Graph, Box]:
    """Return the network and two boxes, in which other numbers vary."""
    graph = trace(Masked().double(), (3, 4)).detach()
    lower = torch.zeros(2, 3, 4, dtype=torch.float64)
    lower[:, :, :3] = 0.1 * torch.arange(9.0).view(3, 3)
    lower[:, :2, 3] = 1.0
    upper = lower.clone()
    upper[0, 0, 1] += 0.5
    upper[1, 1, :2] += 0.25
    return graph, Box(lower, upper)


def test_what_varies() -> None:
    lower = torch.tensor([0.0, 1.0, 1.0, -1.0, float("nan")], dtype=torch.float64)
    upper = torch.tensor([0.0, 1.0 + 1e-14, 1.1, 1.0, 1.0], dtype=torch.float64)
    assert varies(Box(lower, upper)).tolist() == [False, False, True, True, True]


def test_products_with_fixed_factors_bend_nowhere() -> None:
    graph, box = masked()
    factors = Factors(graph, box, ROUNDING)
    products = [i for i, node in enumerate(graph.nodes) if isinstance(node.op, ops.Mul)]
    assert len(products) == 2
    for product in products:
        mine = graph.nodes[product].inputs
        bends = [bool(factors.bend(j, product).any()) for j in mine]
        # Masks meet values that vary; these meet masks, which do not.
        assert sorted(bends) == [False, True]


def test_a_square_bends() -> None:
    graph = wired((2,), (ops.Mul(), (0, 0), (2,)))
    corners = (torch.tensor([c], dtype=torch.float64) for c in ([0.0, 1.0], [1.0, 1.0]))
    assert Factors(graph, Box(*corners), ROUNDING).bend(0, 1).tolist() == [[True, False]]


def test_values_behind_masks_get_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neurons that masks multiply need a sign at most."""
    graph, box = masked()
    places: list[int] = []
    plain = crown._Tightening._lower_bounds

    def counted(
        self: crown._Tightening, sign: float, owner: Tensor, place: Tensor, stop: int
    ) -> Tensor:
        places.append(self.target)
        return plain(self, sign, owner, place, stop)

    monkeypatch.setattr(crown._Tightening, "_lower_bounds", counted)
    found = relax(graph, box, effort=CROWN, rounding=ROUNDING)
    read = {j for node in graph.nodes if isinstance(node.op, ops.Mul) for j in node.inputs}
    assert not read & set(places)
    assert found.boxes[found.output].radius.max() < 0.2


@pytest.mark.parametrize("effort", [CROWN, CROWN_FORMS])
def test_boxes_that_vary_in_other_inputs(effort: crown.Effort) -> None:
    graph, box = masked()
    together = relax(graph, box, effort=effort, rounding=ROUNDING)
    plain = relax(graph, box, effort=CROWN_IBP, rounding=ROUNDING)
    for k in range(2):
        part = Box(*(t[k : k + 1] for t in box.corners))
        alone = relax(graph, part, effort=effort, rounding=ROUNDING)
        output = alone.boxes[alone.output]
        assert torch.allclose(output.lower, together.boxes[together.output].lower[k])
        assert output.radius.item() < 0.7 * plain.boxes[plain.output].radius[k].item()
        values = graph(part.sample(200)[0])
        assert (values >= output.lower).all() and (values <= output.upper).all()


def test_the_cheaper_bounds_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, box = masked()
    whole = Box(box.lower.amin(0, keepdim=True), box.upper.amax(0, keepdim=True))
    matrix, offset = torch.ones(1, 1).double(), torch.zeros(1).double()
    bounder = ChoosingBounder(GraphBounder(graph, whole, matrix, offset))
    lower, upper = (t.flatten(1)[:, bounder.varying].repeat(FEWEST, 1) for t in whole.corners)
    clock = {"now": 0.0}
    monkeypatch.setattr("time.process_time", lambda: clock["now"])
    plain = GraphBounder.__call__

    def costly(self: GraphBounder, *given: Tensor) -> object:
        clock["now"] += price[self.effort is CROWN]
        return plain(self, *given)

    monkeypatch.setattr(GraphBounder, "__call__", costly)
    price = {True: 1.0, False: 1e-9}
    bounder(lower, upper)
    assert bounder.chosen is bounder.quick
    price = {True: 1e-9, False: 1.0}
    bounder(lower, upper)
    assert bounder.chosen is bounder.quick  # not looked at again yet
    bounder.seen = bounder.due
    bounder(lower, upper)
    assert bounder.chosen is bounder.tight


def test_bounds_that_lose_much_more_on_many_inputs_are_not_chosen() -> None:
    """How many more boxes they would need is more than a float can say."""
    torch.manual_seed(42)
    layers = (nn.Linear(784, 20), nn.GELU(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 20))
    graph = trace(nn.Sequential(*layers, nn.GELU(), nn.Linear(20, 1)).double(), (784,)).detach()
    x = torch.rand(1, 784, dtype=torch.float64)
    matrix, offset = torch.ones(1, 1).double(), torch.zeros(1).double()
    bounder = ChoosingBounder(GraphBounder(graph, Box(x - 5e-4, x + 5e-4), matrix, offset))
    bounder((x - 5e-4).repeat(FEWEST, 1), (x + 5e-4).repeat(FEWEST, 1))
    assert bounder.chosen is bounder.tight


def test_what_a_form_leaves_open_is_multiplied() -> None:
    """A ReLU between parallel lines, times about 5.5: up to 6."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 1:] * x[:, :1].relu()

    graph = trace(Product(), (2,)).detach().to(torch.float64)
    corners = (torch.tensor([c], dtype=torch.float64) for c in ([-1.0, 5.0], [1.0, 6.0]))
    found = relax(graph, Box(*corners), effort=CROWN_FORMS, rounding=ROUNDING)
    assert float(found.boxes[found.output].upper) >= 6
