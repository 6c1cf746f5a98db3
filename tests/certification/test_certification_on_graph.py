"""Branch and bound on the network itself, as large networks need it, against exact answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from effort import mostly_slow
from instances import draw_instance
from test_certification_exact import agree
from torch import nn

from tightrope.box import Box
from tightrope.certification import complete
from tightrope.certification.complete import Answer, Problem, bound_nodes, branch_and_bound
from tightrope.certification.properties import Unsafe
from tightrope.certification.refutation import Refuter
from tightrope.certification.search.on_graph import GraphSettings, branch_on_graph
from tightrope.certification.search.open_branches import OpenBranches
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.branches.bounder import GraphBounder
from tightrope.domains.linear.crown import CROWN

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENT = GraphSettings(root_iterations=10, iterations=10)


def search(
    subject: Subject,
    problem: Problem,
    known: Mapping[int, Box] | None,
    *,
    timeout: float,
    settings: GraphSettings = PATIENT,
) -> Answer:
    """Decide a problem without ever reducing the network."""
    relaxation = bound_nodes(subject, problem, known, CROWN)
    refuter = Refuter(subject, problem.inner, problem.unsafe, problem.fails)
    found = branch_on_graph(
        relaxation, problem.unsafe, refuter, deadline=Deadline.after(timeout), settings=settings
    )
    return Answer(found.proved, found.point, found.bound, found.subproblems, found.reason)


@pytest.mark.parametrize("part", mostly_slow(range(20), 3))
def test_answers_are_those_of_enumeration(part: int) -> None:
    counts = agree(search, range(20_000 + 6 * part, 20_006 + 6 * part), most=32, single=True)
    assert counts["verified"] >= 10 and counts["falsified"] >= 10
