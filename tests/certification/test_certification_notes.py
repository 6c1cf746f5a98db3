"""What answers say beside the verdict."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightrope as tr

pytestmark = pytest.mark.usefixtures("one_thread")


class Rounding(nn.Module):
    """A jump that lies in any box around zero: only intervals bound it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((torch.round(x[:, 0]), x[:, 1]), 1)


def test_layers_that_only_intervals_bound_are_named_where_nothing_is_decided() -> None:
    x = torch.tensor([0.5 + 1e-3, 0.2])
    for radius, verdict in (("1e-4", "verified"), ("0.1", "falsified")):
        found = tr.verify(Rounding(), x, 0, eps=radius, timeout=120.0)
        assert found.verdict == verdict and not found.note

    class Hidden(nn.Module):
        """Two jumps that cancel, which intervals do not know."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            jumps = torch.round(x[:, 0]) + torch.round(-x[:, 0])
            return torch.stack((x[:, 1] + jumps, 0 * x[:, 1]), 1)

    found = tr.verify(Hidden(), x, 0, eps="0.1", timeout=60.0, split="relu")
    assert found.verdict == "unknown" and "bounded by intervals alone" in found.note
    assert "'round" in found.note
