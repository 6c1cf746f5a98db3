"""Random modules as people write them: source code with views, in-place changes, hooks and reuse.

`write(seed)` returns a module whose forward pass is a text (`module.source`), so that a module on
which something fails can be read. Each line was run while it was written: what does not run is not
kept. What may stand in a line is in `random_lines`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]

# The batch that lines are tried on: no size of a sample, so that nothing fits by accident.
BATCH = 7
MOST_VALUES = 64
MASKS = (-1e9, 1e9)


class Written(nn.Module):
    """A module with a text for a forward pass; `source` also says what hooks do."""

    def __init__(self, input_shape: Shape) -> None:
        super().__init__()
        self.input_shape = input_shape
        self.source = ""
        self.function: Callable[[nn.Module, Tensor], Tensor] | None = None

    def forward(self, v0: Tensor) -> Tensor:
        assert self.function is not None
        return self.function(self, v0)

    def finish(self, lines: list[str], notes: list[str]) -> None:
        body = "\n".join(f"    {line}" for line in lines)
        self.source = "\n".join([f"def forward(self, v0):\n{body}", *notes])
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.source, scope)
        self.function = scope["forward"]


class Writer:
    """A module in the making: its lines, and what they computed for one batch."""

    def __init__(self, seed: str, input_shape: Shape, dtype: torch.dtype) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(32))
        self.dtype = dtype
        self.module = Written(input_shape).to(dtype)
        if dtype == torch.float64:  # what has no parameters is taken for float32
            self.module.register_buffer("precision", torch.zeros((), dtype=dtype))
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.scope: dict[str, Any] = {"torch": torch, "F": F, "self": self.module}
        self.scope["v0"] = self.numbers(BATCH, *input_shape)
        self.names = ["v0"]
        self.held = 0

    # --- choices ------------------------------------------------------------------------------

    def choose(self, *options: Any) -> Any:
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def numbers(
        self, *shape: int, magnitudes: tuple[float, ...] = (1.0, 1.0, 0.01, 30.0)
    ) -> Tensor:
        """Draw a tensor of one magnitude, sometimes with exact zeros."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if self.chance(0.2):
            values = values * (torch.rand(shape, generator=self.generator) < 0.6)
        return (values * self.choose(*magnitudes)).to(self.dtype)

    # --- values -------------------------------------------------------------------------------

    def shape(self, name: str) -> Shape:
        return tuple(self.scope[name].shape[1:])

    def pick(self, fits: Callable[[Shape], bool] = lambda shape: True) -> str | None:
        """Choose a value, most often a late one."""
        names = [name for name in self.names if fits(self.shape(name))]
        if not names:
            return None
        return names[-1] if self.chance(0.6) else self.choose(*names)

    def partner(self, name: str) -> str | None:
        """Choose a value of the same shape."""
        shape = self.shape(name)
        return self.pick(lambda other: other == shape)

    def hold(self, value: nn.Module | nn.Parameter | Tensor, how: str = "attribute") -> str:
        """Keep a layer, parameter, buffer or plain tensor and return how to write it."""
        name = f"{'layer' if isinstance(value, nn.Module) else 'c'}{self.held}"
        self.held += 1
        if how == "buffer":
            self.module.register_buffer(name, value)
        else:
            setattr(self.module, name, value)
        return f"self.{name}"

    def layers(self) -> list[str]:
        return [f"self.{name}" for name, _ in self.module.named_children()]

    # --- lines --------------------------------------------------------------------------------

    def assign(self, expression: str | None) -> bool:
        """Write `v7 = expression` if it computes something for each sample."""
        if expression is None:
            return False
        name = f"v{len(self.names)}"
        if not self.run(f"{name} = {expression}"):
            return False
        value = self.scope[name]
        size = value[0].numel() if isinstance(value, Tensor) and value.dim() else 0
        if not 0 < size <= MOST_VALUES or len(value) != BATCH or value.dim() > 6:
            del self.scope[name]
            self.lines.pop()
            return False
        self.names.append(name)
        return True

    def run(self, line: str) -> bool:
        """Write a line if it runs."""
        try:
            with torch.no_grad():
                exec(line, self.scope)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        self.lines.append(line)
        return True

    def note(self, text: str) -> None:
        self.notes.append(f"# {text}")


def write(seed: str) -> Written:
    """Return a random module in evaluation mode, in float32 or float64."""
    from random_lines import KINDS, hook_all, join, mask

    chooser = random.Random(f"{seed} shape")
    dtype = chooser.choice((torch.float32, torch.float32, torch.float64))
    rank = chooser.choice((0, 1, 1, 1, 2, 3, 3, 3, 3, 4))
    sizes = [chooser.randint(1, 6 if rank == 1 else 5 if rank < 4 else 3) for _ in range(rank)]
    while math.prod(sizes) > MOST_VALUES:
        sizes[sizes.index(max(sizes))] -= 1
    writer = Writer(seed, tuple(sizes), dtype)
    kinds, weights = zip(*KINDS, strict=True)
    for kind in writer.random.choices(kinds, weights, k=writer.integer(2, 14)):
        kind(writer)
    join(writer)
    mask(writer)
    writer.lines.append(f"return {writer.names[-1]}")
    hook_all(writer)
    writer.module.finish(writer.lines, writer.notes)
    return writer.module.to(dtype).eval()
