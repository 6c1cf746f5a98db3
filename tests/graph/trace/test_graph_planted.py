"""Planted bugs: wrong converters and a wrong capture are found, with an output of 1e9 beside them.

Each module is traced as it is (it must be accepted), then with the bug (it must be refused).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from handmade_modules import Call, norm, rows
from planted_bugs import BUGS, FLAT
from torch import Tensor, fx, nn

from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.graph.trace import capture, converters, elementwise

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten

# These bugs change the shape of a result; numbers need not be compared.
FOUND_BY_SHAPE = {
    "convolution with swapped padding",
    "convolution with swapped stride",
    "convolution in one group",
    "average rounded down",
    "maximum without its padding",
    "transposed convolution with swapped padding",
}


def masked(forward: Callable[[Call, Tensor], Tensor], shape: tuple[int, ...]) -> Call:
    """A module with layers to play with, whose last output is 1e9 less."""
    torch.manual_seed(0)
    module = Call(
        lambda self, x: forward(self, x) + self.mask,
        square=nn.Linear(4, 4),
        other=nn.Linear(4, 4),
        drop=nn.Dropout(0.5),
        relu=nn.ReLU(inplace=True),
        conv=nn.Conv2d(2, 2, 3, padding=(1, 0)),
        grouped=nn.Conv2d(2, 2, 3, groups=2),
        norm=norm(nn.BatchNorm2d, 2),
        kernel=rows(3, 2, 3, 3),
        even=rows(3, 2, 2, 2),
        row=rows(4),
        column=rows(3, 1),
    )
    module.norm.running_var = torch.tensor([1e-3, 2.0])
    module.eval()
    with torch.no_grad():
        mask = torch.zeros(forward(module, torch.zeros(1, *shape)).shape[1:])
    mask.view(-1)[-1] = -1e9
    module.register_buffer("mask", mask)
    return module


def assert_found(module: nn.Module, shape: tuple[int, ...]) -> str:
    with pytest.raises(UserError) as caught:
        trace(module, shape)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", BUGS)
def test_wrong_converter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = BUGS[name]
    module = masked(planted.forward, planted.shape)
    trace(module, planted.shape)
    for operator in planted.operators:
        right = converters.CONVERTERS[operator]
        monkeypatch.setitem(converters.CONVERTERS, operator, planted.convert(right))
    message = assert_found(module, planted.shape)
    assert ("the graph differs from" in message) == (name not in FOUND_BY_SHAPE), message


def test_alpha_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = masked(lambda s, x: torch.add(x, s.square(x), alpha=2), FLAT)
    trace(module, FLAT)
    wrong = lambda a, b, alpha=1: elementwise._add(a, b)  # noqa: E731
    monkeypatch.setitem(converters.CONVERTERS, aten.add, wrong)
    assert "the graph differs from" in assert_found(module, FLAT)


# --- a wrong capture --------------------------------------------------------------------------


def changed_in_place(self: Call, x: Tensor) -> Tensor:
    hidden = self.square(x)
    return self.other(self.relu(hidden)) + hidden


def changed_after_dropout(self: Call, x: Tensor) -> Tensor:
    hidden = self.square(x)
    return self.other(self.relu(self.drop(hidden))) + hidden


def plain(self: Call, x: Tensor) -> Tensor:
    return self.other(self.square(x).relu()) - x


def ignore_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "_changes_a_tensor", lambda node: False)
    patch.setitem(converters.CONVERTERS, aten.relu_, converters.CONVERTERS[aten.relu])


def ignore_aliases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "_show_aliases", lambda program: None)


def ignore_hooks(patch: pytest.MonkeyPatch) -> None:
    export = torch.export.export

    def without_hooks(module: nn.Module, *args: Any, **options: Any) -> Any:
        hooks = module.square._forward_hooks
        kept = dict(hooks)
        hooks.clear()
        try:
            return export(module, *args, **options)
        finally:
            hooks.update(kept)

    patch.setattr(torch.export, "export", without_hooks)


def with_placeholders(change: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = capture._placeholders

        def wrong(module: nn.Module, program: Any) -> tuple[dict[str, Any], str]:
            held, entry = right(module, program)
            change(held)
            return held, entry

        patch.setattr(capture, "_placeholders", wrong)

    return plant


def exchange_layers(held: dict[str, Any]) -> None:
    one, two = "p_square_weight", "p_other_weight"
    held[one], held[two] = held[two], held[one]


def forget_a_bias(held: dict[str, Any]) -> None:
    held["p_other_bias"] = torch.zeros_like(held["p_other_bias"])


def unmask(held: dict[str, Any]) -> None:
    held["b_mask"] = held["b_mask"] + 1e-3


def return_another_value(patch: pytest.MonkeyPatch) -> None:
    def wrong(program: Any) -> fx.Node:
        return next(node for node in program.graph.nodes if node.target is aten.sub.Tensor)

    patch.setattr(capture, "_result", wrong)


CAPTURES: dict[str, tuple[Callable[..., Tensor], Callable[[pytest.MonkeyPatch], None]]] = {
    "changes in place ignored": (changed_in_place, ignore_changes),
    "aliases ignored": (changed_after_dropout, ignore_aliases),
    "hooks ignored": (plain, ignore_hooks),
    "weights exchanged": (plain, with_placeholders(exchange_layers)),
    "bias forgotten": (plain, with_placeholders(forget_a_bias)),
    "buffer off by a thousandth": (plain, with_placeholders(unmask)),
    "another value returned": (plain, return_another_value),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_wrong_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, plant = CAPTURES[name]
    module = masked(forward, FLAT)
    module.square.register_forward_hook(lambda layer, args, output: output - 0.01)
    trace(module, FLAT)
    plant(monkeypatch)
    assert "the graph differs from" in assert_found(module, FLAT)


def test_there_are_enough() -> None:
    assert len(BUGS) + len(CAPTURES) >= 50
