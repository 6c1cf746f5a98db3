"""Giving away half of a search: where others are idle, a late sample's pool is cut in two.

Both halves together are the search that there was: the sample is verified if both are, falsified
if one is. The time that was left is divided, too, so that a sample takes no more than its seconds
in all, wherever they are spent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightrope.certification.search.pool import Pool
from tightrope.deadline import OutOfTimeError
from tightrope.parallel import current_wishes

if TYPE_CHECKING:
    from tightrope.certification.search.branch_and_bound import BranchAndBound

LEAST = 16  # open subproblems of a search that is worth dividing


@dataclass
class Sharing:
    """What is to be given away while a sample is searched: others that wait, or half of it."""

    others: Callable[[], bool]  # returns whether there were some
    half: Callable[[BranchAndBound, float], None]  # takes a search, and its seconds


_CURRENT: ContextVar[Sharing | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def sharing(how: Sharing | None) -> Iterator[None]:
    """Let searches inside share when that is wished."""
    token = _CURRENT.set(how)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def share(search: BranchAndBound, pool: Pool, deadline: float) -> float:
    """Give something away if that is wished; return the deadline of what stays."""
    how, wishes = _CURRENT.get(), current_wishes()
    if how is None:
        return deadline
    if wishes.stop:
        raise OutOfTimeError
    if not wishes.share:
        return deadline
    if how.others():
        wishes.share = False
    elif len(pool) >= LEAST:
        wishes.share = False
        now = time.monotonic()
        seconds = (deadline - now) / 2
        how.half(_halved(search, pool), seconds)
        return now + seconds
    return deadline


def _halved(search: BranchAndBound, pool: Pool) -> BranchAndBound:
    """Take every second subproblem, from the lowest bound on; return a search of those."""
    problems, bound = pool.take_all()
    places = torch.arange(len(bound), device=bound.device)
    stays, goes = places[::2], places[1::2]
    pool.add(problems[stays], bound[stays])
    other = copy(search)
    other.refute, other.pool = _nobody, Pool(problems[goes], bound[goes])
    other.count, other.stuck, other.lowest = 0, 0, math.inf
    other.patience, other._tightener = copy(search.patience), None
    other.cutter = copy(search.cutter)
    return other


def _nobody(points: Tensor, groups: Tensor) -> Tensor | None:
    """Stand for what refutes: it is the network's, and stays where that is."""
    raise AssertionError("a search that was given away must be told how to refute")
