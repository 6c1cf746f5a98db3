"""The module that a graph is compared with: as it was recorded, and as its user runs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn

from tightrope.errors import UserError
from tightrope.graph.same import Shown
from tightrope.graph.trace.attention import batch_first
from tightrope.graph.trace.capture import Captured
from tightrope.graph.trace.rehearsal import first_line, title

# Samples of a batch that are run one by one (as those of which a verdict speaks), those that are
# run as a pair, and those that are run as in training.
ALONE, PAIR, TRAINING = 7, 2, 3


class Reference:
    """Runs a module; `positions` says where the graph has the result of which operator."""

    def __init__(self, captured: Captured, positions: Mapping[fx.Node, int], output: int) -> None:
        self.captured, self.positions, self.output = captured, positions, output
        self.state = _plain_state(captured.module)
        # Attention is recorded in another order than it runs in.
        self.reordered = any(
            isinstance(part, nn.MultiheadAttention) for part in captured.module.modules()
        )

    def __call__(self, x: Tensor) -> Shown:
        """Return what the module computes, step by step and in batches of several sizes."""
        values: dict[int, list[Tensor]] = {}
        for node, value in self.captured.values(x.clone()):
            if node in self.positions:
                shown = value if value.is_floating_point() else value.to(x.dtype)
                values.setdefault(self.positions[node], []).append(shown)
        if not self.reordered:  # the same kernels on the same batch: what was recorded is what runs
            values.setdefault(self.output, []).append(self._run(x))
        alone = min(ALONE, len(x) - PAIR)
        found = [self._run(x[i : i + 1]) for i in range(alone)]
        found.append(self._run(x[alone : alone + PAIR]))
        if alone + PAIR < len(x):
            found.append(self._run_with_gradients(x[alone + PAIR :][:TRAINING]))
        return Shown(torch.cat(found), values)

    def check_attention(self) -> None:
        """Raise an error if the form in which attention is recorded is another function."""
        if not self.reordered:
            return
        try:
            with batch_first(checked=True), torch.no_grad():
                self.captured.module(self.captured.probe[:PAIR].clone())
        except Exception as error:  # whatever a copy of a layer in float64 raises
            name = title(self.captured.module)
            raise UserError(f"cannot trace {name}: {first_line(error)}") from error

    def check_state(self) -> None:
        """Raise an error if running the module has changed a number or a word that it keeps."""
        now = _plain_state(self.captured.module)
        for name, value in self.state.items():
            if now.get(name) != value:
                raise UserError(
                    f"the network changes its own state in evaluation ({name!r}), so it may not "
                    "always compute the same"
                )

    def _run(self, x: Tensor) -> Tensor:
        name = title(self.captured.module)
        try:
            found = self.captured.module(x.clone())
        except Exception as error:  # whatever the module raises
            raise UserError(
                f"{name} fails on a batch of {len(x)}: {first_line(error)}; batches of all sizes "
                "must work"
            ) from error
        if not isinstance(found, Tensor) or found.dim() == 0 or len(found) != len(x):
            raise UserError(f"{name} does not give one output for each of {len(x)} samples")
        return found

    def _run_with_gradients(self, x: Tensor) -> Tensor:
        """Run as in training; a module that cannot be differentiated is run without."""
        try:
            with torch.enable_grad():
                return self._run(x.clone().requires_grad_()).detach()
        except UserError:
            return self._run(x)


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and words that a module and its parts keep, also in lists and the like."""
    kept = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OF_EVERY_MODULE:
                kept[f"{path}.{name}" if path else name] = _plain(value)
    return kept


_OF_EVERY_MODULE = set(vars(nn.Module()))
_LONGEST, _DEEPEST = 1000, 3


def _plain(value: Any, depth: int = 0) -> Any:
    """Return what can be compared of a value: nothing of tensors, modules and other objects."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list | tuple | set | deque) or depth == _DEEPEST:
        return None
    return len(value), [_plain(part, depth + 1) for part in islice(value, _LONGEST)]
