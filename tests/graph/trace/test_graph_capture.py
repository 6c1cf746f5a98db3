"""`trace` sees what really runs: hooks, in-place changes, views, state; beside a masked output.

Every module here ends in an output of -1e9 beside its others: an error must not hide behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from handmade_modules import Call
from torch import Tensor, nn

import tightrope as tr
from tightrope.errors import UserError
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")

MASK = torch.tensor([0.0, 0.0, 0.0, -1e9])


def masked(forward: Callable[[Call, Tensor], Tensor]) -> Call:
    """A module that computes four numbers in some way and masks the last."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "relu": nn.ReLU(inplace=True)}
    return Call(lambda self, x: forward(self, x) + MASK, **layers).eval()


def assert_same(module: nn.Module) -> None:
    """Check the graph against the module, per element."""
    graph = trace(module, (4,))
    x = 3 * torch.randn(50, 4)
    with torch.no_grad():
        torch.testing.assert_close(graph(x)[:, :3], module(x)[:, :3], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(graph(x)[:, 3], module(x)[:, 3])


def relu_on_a_value_used_again(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    return self.b(self.relu(hidden)) + hidden


def relu_on_the_input(self: Call, x: Tensor) -> Tensor:
    return self.a(self.relu(x)) + x


def sum_in_place(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    out = hidden
    out += self.b(x)
    return out - self.b(hidden)


def change_through_a_view(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    flat = hidden.view(-1, 2, 2)
    flat.relu_()
    return self.b(hidden)


def change_through_a_transposition(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    hidden.view(-1, 2, 2).transpose(1, 2).mul_(2.0)
    return self.b(hidden) + hidden


def clone_keeps_the_old_value(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    before = hidden.clone()
    hidden.relu_()
    return self.b(hidden) - before


@pytest.mark.parametrize(
    "forward",
    [
        relu_on_a_value_used_again,
        relu_on_the_input,
        sum_in_place,
        change_through_a_view,
        change_through_a_transposition,
        clone_keeps_the_old_value,
    ],
)
def test_in_place_changes_are_what_runs(forward: Callable[[Call, Tensor], Tensor]) -> None:
    assert_same(masked(forward))


def test_no_verdict_of_another_network() -> None:
    """An in-place ReLU beside a masked output: the network misclassifies the input itself."""
    first, second = nn.Linear(1, 3), nn.Linear(3, 3)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[0.0], [-1.0], [0.0]]))
        first.bias.copy_(torch.tensor([0.05, -0.1, 0.0]))
        second.weight.zero_()
        second.bias.copy_(torch.tensor([0.0, 0.1, -1e9]))

    def forward(self: Call, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(self.relu(hidden)) + hidden

    module = Call(forward, a=first, b=second, relu=nn.ReLU(inplace=True)).eval()
    x = torch.tensor([0.5])
    assert int(module(x[None]).argmax()) == 1
    assert tr.verify(module, x, 0, eps=0.01).verdict == "falsified"
    assert tr.verify(module, x, 1, eps=0.01).verdict == "verified"


# --- hooks ------------------------------------------------------------------------------------


def _shift(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output - 10 * torch.tensor([1.0, 0.0, 0.0, 0.0])


def _double(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (2 * args[0],)


@pytest.fixture
def plain() -> Call:
    return masked(lambda self, x: self.b(F.relu(self.a(x))))


def test_forward_hook(plain: Call) -> None:
    plain.register_forward_hook(_shift)
    assert_same(plain)


def test_forward_hook_of_a_layer(plain: Call) -> None:
    plain.a.register_forward_hook(_shift)
    assert_same(plain)


def test_forward_pre_hook(plain: Call) -> None:
    plain.b.register_forward_pre_hook(_double)
    assert_same(plain)


@pytest.fixture
def global_hook() -> Iterator[None]:
    def shift_linear(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        return output + 3 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(shift_linear)
    yield
    handle.remove()


@pytest.mark.usefixtures("global_hook")
def test_global_hook(plain: Call) -> None:
    assert_same(plain)


def test_hook_on_a_margin_beside_a_masked_output() -> None:
    """It was called verified at a margin of 0.1; the hook takes ten from the class."""
    layer = nn.Linear(2, 3)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([0.1, 0.0, -1e9]))
    module = nn.Sequential(layer).eval()
    x = torch.tensor([0.5, 0.5])
    assert tr.verify(module, x, 0, eps=0.01).verdict == "verified"
    layer.register_forward_hook(lambda m, i, o: o - torch.tensor([10.0, 0.0, 0.0]))
    assert tr.verify(module, x, 0, eps=0.01).verdict == "falsified"


# --- what capture cannot see, and what it must refuse -----------------------------------------


def random_constant(self: Call, x: Tensor) -> Tensor:
    return self.a(x) + torch.rand(4)


def dropout_in_evaluation(self: Call, x: Tensor) -> Tensor:
    return self.a(F.dropout(x, 0.5))


def random_input(self: Call, x: Tensor) -> Tensor:
    return self.a(x + torch.randn_like(x))


def counter(self: Call, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.a(x) * self.calls


def batch_size_as_a_number(self: Call, x: Tensor) -> Tensor:
    return self.a(x) * len(x)


def branch_on_the_batch_size(self: Call, x: Tensor) -> Tensor:
    return self.a(x) if len(x) > 1 else self.b(x)


def branch_on_a_value(self: Call, x: Tensor) -> Tensor:
    return self.a(x) if x.sum() > 0 else self.b(x)


def branch_on_a_number_of_the_input(self: Call, x: Tensor) -> Tensor:
    return self.a(x) * x.sum().item()


def dropout_after_a_change_in_place(self: Call, x: Tensor) -> Tensor:
    return F.dropout(self.relu(self.a(x)), 0.5, training=True)


def other_samples(self: Call, x: Tensor) -> Tensor:
    return self.a(x) - x.mean(0)


def sorted_batch(self: Call, x: Tensor) -> Tensor:
    return self.a(x.sort(0)[0])


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (random_constant, "random"),
        (dropout_in_evaluation, "random"),
        (random_input, "randn_like"),
        (counter, "differs"),
        (batch_size_as_a_number, "differs"),
        (branch_on_the_batch_size, "differs"),
        (branch_on_a_value, "branch"),
        (branch_on_a_number_of_the_input, "item"),
        (dropout_after_a_change_in_place, "dropout"),
        (other_samples, "mean"),
        (sorted_batch, "sort"),
    ],
)
def test_refused(forward: Callable[[Call, Tensor], Tensor], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        trace(masked(forward), (4,))
    assert "\n" not in str(caught.value)


def test_state_that_changes_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x * self.seen

    with pytest.raises(UserError, match="changes its own state in evaluation"):
        trace(Counts(), (4,))


def test_capture_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError):
        trace(masked(branch_on_a_value), (4,))
    trace(masked(relu_on_a_value_used_again), (4,))
    assert capfd.readouterr() == ("", "")


def test_capture_does_not_touch_the_module() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True))
    module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trace(module, (4,))
    assert all(part.training for part in module.modules())
    assert all(p.requires_grad for p in module.parameters())
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_layer_in_two_places() -> None:
    layer = nn.Linear(4, 4)
    graph = trace(nn.Sequential(layer, nn.ReLU(), layer), (4,))
    assert [node.name for node in graph.nodes] == ["input", "0", "1", "2"]
    assert graph.nodes[1].op.weight is graph.nodes[3].op.weight is layer.weight


# --- idle dropouts ----------------------------------------------------------------------------


def changed_after_dropout(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    self.relu(F.dropout(hidden, 0.5, self.training))
    return self.b(x) - hidden


def changed_before_dropout(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    kept = F.dropout(hidden, 0.5, self.training)
    hidden.mul_(-2)
    return kept


def dropout_of_nothing(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    F.dropout(hidden, 0.0, True).neg_()
    return self.b(hidden)


def dropout_in_place(self: Call, x: Tensor) -> Tensor:
    hidden = self.a(x)
    F.dropout1d(hidden[:, None], 0.5, self.training, inplace=True).relu_()
    return self.b(hidden)


@pytest.mark.parametrize(
    "forward",
    [changed_after_dropout, changed_before_dropout, dropout_of_nothing, dropout_in_place],
)
def test_an_idle_dropout_is_another_name_of_its_input(
    forward: Callable[[Call, Tensor], Tensor],
) -> None:
    """Rewriting takes it for a copy."""
    assert_same(masked(forward))


# --- inputs that a module overwrites ----------------------------------------------------------


@pytest.mark.parametrize("label", [0, 1])
def test_a_counterexample_is_the_point_and_not_what_the_module_made_of_it(label: int) -> None:
    """It was multiplied by -100 when the network had looked at it, and so was the user's input."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
        layer.bias.zero_()
    module = Call(lambda self, x: self.a(x.mul_(-100)), a=layer).eval()
    x = torch.tensor([0.5, 0.52])
    answer = tr.verify(module, x, label, eps=0.1)
    assert torch.equal(x, torch.tensor([0.5, 0.52]))
    assert answer.verdict == "falsified"
    point = answer.counterexample
    assert point is not None
    assert ((point - x).abs() <= 0.1 + 1e-6).all()
    assert int((-100 * point).argmax()) != label
