"""Deadlines end what looks at the clock, and nothing else."""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tightrope import compiling, deadline
from tightrope.answer import Cause
from tightrope.box import Box
from tightrope.certification.search.branch_and_bound import BranchAndBound
from tightrope.certification.verifying import verify_and_tell
from tightrope.compiling import COMPILING, in_time
from tightrope.deadline import Deadline, OutOfTimeError, check_time, process_start, time_left, until
from tightrope.domains.linear.crown import relax
from tightrope.domains.reduced.reduction import reduce
from tightrope.domains.reduced.replay import strict_bounds
from tightrope.domains.reduced.splits import Bounder
from tightrope.graph import Graph, trace


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


def dense_graph(*sizes: int) -> Graph:
    torch.manual_seed(0)
    pairs = itertools.pairwise(sizes)
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
    return trace(nn.Sequential(*layers[:-1]).double(), (sizes[0],)).detach()


def test_evaluation_looks_at_the_clock() -> None:
    graph = dense_graph(3, 4, 2)
    with until(Deadline.after(0)), pytest.raises(OutOfTimeError):
        graph(torch.zeros(1, 3).double())


def test_time_left() -> None:
    assert time_left() == math.inf
    with until(Deadline.after(1000)):
        assert 0 < time_left() <= 1000
    with until(Deadline.after(-5)):
        assert time_left() <= -5


def test_this_process_began_before_now() -> None:
    began = process_start()
    assert began <= time.monotonic()
    child = os.fork()
    if not child:
        os._exit(0 if process_start() > began else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_system_that_does_not_say_when_a_process_began(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, **options: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", fail)
    assert process_start() == deadline._IMPORTED


def test_loops_are_compiled_if_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = SimpleNamespace(
        signatures=[], py_func=in_time, stats=SimpleNamespace(cache_path=str(tmp_path))
    )
    assert in_time(loop)
    with until(Deadline.after(COMPILING + 1000)):
        assert in_time(loop)
    with until(Deadline.after(COMPILING / 2)):
        assert not in_time(loop)
        monkeypatch.setattr(loop, "stats", SimpleNamespace())
        assert not in_time(loop)
        monkeypatch.setattr(loop, "stats", SimpleNamespace(cache_path=str(tmp_path)))
        (tmp_path / "compiling.in_time-9.py311.nbi").touch()
        assert in_time(loop)
        (tmp_path / "compiling.in_time-9.py311.nbi").unlink()
        monkeypatch.setattr(loop, "signatures", ["some"])
        assert in_time(loop)
    assert compiling.COMPILING >= 20


def test_a_search_that_is_interrupted_has_all_its_subproblems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = dense_graph(4, 12, 12, 1)
    box = Box(-torch.ones(1, 4).double(), torch.ones(1, 4).double())
    relaxation = relax(graph, box, rounding=torch.finfo(torch.float64).eps)
    network = reduce(relaxation, torch.ones(1, 1).double(), torch.zeros(1).double())
    search = BranchAndBound(network, torch.zeros(1, dtype=torch.long), lambda *found: None)
    assert not search.begin()
    assert search.pool is not None and len(search.pool) == 1

    def late(*arguments: object, **options: object) -> None:
        raise OutOfTimeError

    monkeypatch.setattr(Bounder, "improve", late)
    found = search.run(math.inf)
    assert found.cause is Cause.TIME and len(search.pool) == 1
    assert "1 subproblems open" in found.details
    problems = search.bounder.root(torch.zeros(3, dtype=torch.long))
    with until(Deadline.after(0)), pytest.raises(OutOfTimeError):
        strict_bounds(network, problems)


def test_the_clock_of_a_command_runs_before_the_files_are_read() -> None:
    found, text = verify_and_tell(
        Path("no.onnx"), Path(__file__), timeout=60, seed=0, started=time.monotonic() - 61
    )
    assert found.cause is Cause.TIME and found.stage == "input" and text is None
    assert found.seconds >= 61
