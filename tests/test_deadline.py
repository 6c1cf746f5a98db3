"""Deadlines end what looks at the clock, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tightrope.box import Box
from tightrope.deadline import Deadline, OutOfTimeError, check_time, until
from tightrope.domains.linear.crown import relax
from tightrope.graph import trace


def test_blocks_have_deadlines() -> None:
    check_time()
    with until(Deadline.after(1000)):
        check_time()
        with until(Deadline.after(0)), pytest.raises(OutOfTimeError):
            check_time()
        check_time()
        with pytest.raises(ZeroDivisionError), until(Deadline.after(0)):
            raise ZeroDivisionError
        check_time()
    check_time()


def test_bounding_looks_at_the_clock() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = trace(module.double(), (3,)).detach()
    box = Box(torch.zeros(1, 3).double(), torch.ones(1, 3).double())
    relax(graph, box)
    with until(Deadline.after(0)), pytest.raises(OutOfTimeError):
        relax(graph, box)
