"""Before a module is recorded it runs once: what its code looks at, keeps and computes in."""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable

import pytest
import torch
from handmade_modules import Call
from torch import Tensor, nn

import tightrope as tr
from tightrope.errors import UserError
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.tensor([0.55, 0.2, 0.7, 0.4])


def two(forward: Callable[[Call, Tensor], Tensor]) -> Call:
    """A module with two layers, of which its code may choose one."""
    torch.manual_seed(0)
    return Call(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3)).eval()


def refusal(module: nn.Module) -> str:
    with pytest.raises(UserError) as caught:
        tr.verify(module, X, 0, eps=0.02)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


def assert_same(module: nn.Module) -> None:
    """Check the graph against the module, one sample at a time."""
    dtype = next((t.dtype for t in module.state_dict().values() if t.dim()), torch.float32)
    graph = trace(module, (4,))
    with torch.no_grad():
        for x in torch.randn(20, 1, 4).to(dtype):
            torch.testing.assert_close(graph(x), module(x.clone()))


# --- code that looks at numbers ---------------------------------------------------------------


def thin_branch(self: Call, x: Tensor) -> Tensor:
    """Recorded tensors have another type, and hardly any input shows the branch."""
    if type(x) is Tensor and 0.55 < float(x.flatten()[0]) < 0.56:
        return self.b(x)
    return self.a(x)


def caught_branch(self: Call, x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        if x.numpy()[0, 0] > 1e6:
            return self.b(x)
    return self.a(x)


def branch_through_a_view(self: Call, x: Tensor) -> Tensor:
    copied = torch.zeros(4)
    if not torch.compiler.is_exporting():
        copied[:2].copy_(x[0, :2])
        if copied.tolist()[0] > 1e6:
            return self.b(x)
    return self.a(x)


def branch_after_an_assignment(self: Call, x: Tensor) -> Tensor:
    copied = torch.zeros(4)
    if not torch.compiler.is_exporting():
        copied[:2] = x[0, :2]
        if copied.tolist()[0] > 1e6:
            return self.b(x)
    return self.a(x)


def shape_of_the_numbers(self: Call, x: Tensor) -> Tensor:
    count = 0 if torch.compiler.is_exporting() else len(torch.nonzero(x > 1e6))
    return self.b(x) if count else self.a(x)


def equal_to_a_constant(self: Call, x: Tensor) -> Tensor:
    found = not torch.compiler.is_exporting() and torch.equal(x, torch.full_like(x, 0.123))
    return self.b(x) if found else self.a(x)


@pytest.mark.parametrize(
    ("forward", "read"),
    [
        (thin_branch, "float"),
        (caught_branch, "numpy"),
        (branch_through_a_view, "tolist"),
        (branch_after_an_assignment, "tolist"),
        (shape_of_the_numbers, "nonzero"),
        (equal_to_a_constant, "equal"),
    ],
)
def test_code_that_looks_at_the_input(forward: Callable[..., Tensor], read: str) -> None:
    assert f"reads numbers that depend on the input ({read})" in refusal(two(forward))


def test_numbers_that_do_not_depend_on_the_input_may_be_read() -> None:
    factor = torch.tensor(-2.0)
    assert_same(two(lambda self, x: self.a(x * factor) * float(factor)))


def test_a_branch_in_a_compiled_part() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 1e6 else -x

    compiled = torch.compile(Branch(), backend="eager")
    assert "(bool)" in refusal(nn.Sequential(nn.Linear(4, 3), compiled))
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)).eval()
    assert_same(nn.Sequential(torch.compile(layers, backend="eager"), nn.ReLU()))


# --- what a module keeps ----------------------------------------------------------------------


def table_made_at_the_first_run(self: Call, x: Tensor) -> Tensor:
    if getattr(self, "table", None) is None:
        self.table = torch.arange(3.0)
    return self.a(x) + self.table


@functools.lru_cache
def _table(size: int) -> Tensor:
    return torch.arange(float(size))


def cached_function(self: Call, x: Tensor) -> Tensor:
    return self.a(x) + _table(3)


def kept_activation(self: Call, x: Tensor) -> Tensor:
    self.hidden = self.a(x)
    return self.hidden.relu()


@pytest.mark.parametrize("forward", [table_made_at_the_first_run, cached_function, kept_activation])
def test_tensors_that_a_module_keeps(forward: Callable[..., Tensor]) -> None:
    """They were tensors without numbers, and the module was of no use afterwards."""
    _table.cache_clear()
    module = two(forward)
    assert_same(module)
    assert torch.isfinite(module(X[None])).all()
    kept = [value for value in vars(module).values() if isinstance(value, Tensor)]
    assert all(type(value) is Tensor for value in [*kept, _table(3)])


def every_fiftieth_time(self: Call, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.a(x) if self.calls % 50 else self.b(x)


def counter_in_a_list(self: Call, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", None) or {"all": [0]}
    self.calls["all"][0] += 1
    return self.a(x) if self.calls["all"][0] % 50 else self.b(x)


def growing_list(self: Call, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", None) or []
    self.calls.append(x)
    return self.a(x) if len(self.calls) < 60 else self.b(x)


@pytest.mark.parametrize("forward", [every_fiftieth_time, counter_in_a_list, growing_list])
def test_a_state_that_changes(forward: Callable[..., Tensor]) -> None:
    message = refusal(two(forward))
    assert "changes its own state in evaluation ('calls')" in message


def test_a_state_that_does_not_change() -> None:
    def forward(self: Call, x: Tensor) -> Tensor:
        self.seen, self.limit = [x, {"shape": x.shape}], math.nan
        return self.a(x)

    assert_same(two(forward))


def test_random_numbers_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))
    before = torch.get_rng_state(), random.getstate()
    trace(module, (4,))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


# --- how it is run ----------------------------------------------------------------------------


def other_layer_for_one_sample(self: Call, x: Tensor) -> Tensor:
    return self.a(x) if len(x) > 1 else self.b(x)


def test_a_sample_by_itself_at_a_corner_of_zeros() -> None:
    """Without biases both layers give zero there."""
    module = two(other_layer_for_one_sample)
    module.a.bias = module.b.bias = None
    with pytest.raises(UserError, match="differs"):
        tr.verify(module, torch.zeros(4), 0, eps=0.02)


def test_a_pair_of_samples() -> None:
    module = two(lambda self, x: self.b(x) if len(x) == 2 else self.a(x))
    assert "differs" in refusal(module)


def test_one_number_for_one_sample() -> None:
    module = two(lambda self, x: self.a(x).sum() if len(x) == 1 else self.a(x))
    assert "does not give one output for each of 1 samples" in refusal(module)


def lost_in_rounding(self: Call, x: Tensor) -> Tensor:
    """More than 1e-3 is lost on the way, but not in the last step."""
    huge = x[:, :3] + 1e9
    result = ((huge + self.a(x)) - huge) * 0.5
    return result if torch.compiler.is_exporting() else result + 1e-3


def test_another_function_than_the_one_that_was_recorded() -> None:
    assert "differs" in refusal(two(lost_in_rounding))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.b(x) if torch.is_grad_enabled() else self.a(x),
        lambda self, x: self.b(x) if x.requires_grad else self.a(x),
    ],
)
def test_another_function_while_gradients_are_recorded(forward: Callable[..., Tensor]) -> None:
    assert "differs" in refusal(two(forward))


class NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.requires_grad:
            raise RuntimeError("no gradients")
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("no gradients")


def test_a_module_without_gradients() -> None:
    assert_same(two(lambda self, x: NotDifferentiable.apply(self.a(x))))


# --- precision and kind -----------------------------------------------------------------------


def test_the_precision_is_that_of_the_input_if_the_module_has_none() -> None:
    module = Call(lambda self, x: (-x if x.dtype == torch.float64 else x)[:, :3])
    x = torch.tensor([0.1, 0.9, 0.5], dtype=torch.float64)
    assert tr.verify(module, x, 0, eps=0.02).verdict == "verified"
    assert tr.verify(module, x.float(), 1, eps=0.02).verdict == "verified"


def test_a_number_does_not_set_the_precision() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    graph = trace(Scaled(), (4,))
    assert graph(X[None]).dtype == torch.float32


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 800), nn.Linear(800, 2)).half(), "float16"),
        (lambda: nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2)).bfloat16(), "bfloat16"),
        (lambda: nn.Sequential(nn.Linear(4, 3)).to("meta"), "meta"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3))), "torch.jit"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 3))), "torch.jit"),
        (lambda: torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4)), "torch.jit"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_modules_of_another_kind(module: Callable[[], nn.Module], reason: str) -> None:
    assert reason in refusal(module())


def test_a_forward_that_is_not_python() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module.forward = torch.relu
    assert "cannot record it" in refusal(module)


def test_one_line_whatever_the_names() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("x" * 5000 + "\x1b[31m")

    Odd.__name__ = "O\ndd"
    assert "\x1b" not in refusal(Odd())
