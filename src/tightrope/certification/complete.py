"""Complete methods for one problem: branch and bound, and mixed-integer programming.

A problem is `verified` by strict bounds (a mixed-integer program: by its dual bound, less an
allowance for the solver's tolerances), falsified by a point that the original network fails at,
and open otherwise, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from tightrope.answer import Answer, Cause, Verdict, falsified, undecided, verified
from tightrope.budget import fitting
from tightrope.certification.problem import CHOICES, Choices, OpenProblem, Problem, proof, worst_row
from tightrope.certification.raids import Raids
from tightrope.certification.refutation import Refuter
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.certification.search.inputs import (
    InputSearch,
    input_search,
    splits_inputs,
    suits_nesting,
    suits_turns,
)
from tightrope.certification.search.nested import NestedSearch
from tightrope.certification.search.on_graph import GraphSearch
from tightrope.certification.search.on_pieces import PieceSearch
from tightrope.certification.search.signs import SignSearch
from tightrope.certification.search.turns import Turns
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline, OutOfTimeError, until
from tightrope.domains.linear.bounded import MEMORY, Relaxation, relaxed
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import (
    ALPHA,
    CROWN,
    CROWN_IBP,
    Effort,
    reduction_bytes,
    reduction_fits,
    relax,
    unstable_neurons,
)
from tightrope.domains.linear.relaxations import unstable
from tightrope.domains.linear.rules import ACTIVATIONS
from tightrope.domains.milp import program as milp
from tightrope.domains.reduced.reduction import reduce, reducible
from tightrope.errors import UserError
from tightrope.precision import ROUNDING

Search = BranchAndBound | InputSearch | NestedSearch | GraphSearch | PieceSearch

NOT_BOUNDED = "the network was not bounded to its end"
# Attacks on networks that branch and bound cannot split.
LAST_ATTACKS, LAST_STEPS = 20, 200
TINY, FEW_SIGNS = 1000, 24  # neurons in all, and unstable ones that are split rather than inputs
DECIDED = 0.25  # of the neurons of a network may be unstable by intervals to begin with them


def linear_bounds(subject: Subject, opened: OpenProblem, choices: Choices) -> Answer:
    """Bound all layers by lines, and the rows of the property on top of them."""
    if splits_inputs(subject, opened.problem, choices.split) and not _tiny(subject):
        return undecided()  # the search begins with that
    relaxation = bound_nodes(subject, opened, CROWN)
    if opened.effort is not CROWN:
        return undecided()
    unsafe = opened.problem.unsafe
    matrix = unsafe.matrix.unflatten(1, relaxation.graph.output_shape)
    worst = worst_row(unsafe, relaxation.lower(relaxation.output, Coefficients(matrix, None)))
    return proof(worst)


def root(
    subject: Subject, opened: OpenProblem, deadline: Deadline, choices: Choices = CHOICES
) -> Answer:
    """Bound all layers with optimised slopes, and the rows of the property on top of them."""
    try:
        with until(deadline):
            return _root(subject, opened, deadline, choices)
    except OutOfTimeError:
        return undecided(Cause.TIME, NOT_BOUNDED)


def _root(subject: Subject, opened: OpenProblem, deadline: Deadline, choices: Choices) -> Answer:
    problem, unsafe = opened.problem, opened.problem.unsafe
    settings = SearchSettings(branching=choices.branching, cuts=choices.cuts)
    if suits_nesting(subject, problem, choices.split):
        relaxation = bound_nodes(subject, opened, CROWN)
        nested = NestedSearch(
            relaxation, unsafe, Raids(problem.refuter(subject)), settings=settings
        )
        return _begun(opened, nested, nested.begin())
    if _better_by_inputs(subject, opened, choices):
        boxes = input_search(subject, problem, opened.nodes)
        return _begun(opened, boxes, boxes.begin())
    relaxation = bound_nodes(subject, opened)
    refuter = Raids(problem.refuter(subject))
    if not reducible(relaxation.graph):
        pieces = PieceSearch(relaxation, unsafe, refuter)
        return _begun(opened, pieces, pieces.begin(deadline))
    if reduction_fits(relaxation):
        network = reduce(relaxation, unsafe.matrix, unsafe.offset)
        signs = BranchAndBound(network, unsafe.group, refuter, settings=settings)
        return _begun(opened, signs, signs.begin())
    search = GraphSearch(relaxation, unsafe, refuter)
    found = search.begin(deadline)
    opened.nodes = search.relaxation.known(0)
    return _begun(opened, search, found)


def _begun(opened: OpenProblem, search: Search, found: Answer) -> Answer:
    """Keep a search for later: only one that has begun, for another knows of nothing open."""
    opened.search = search
    return found


def _better_by_inputs(subject: Subject, opened: OpenProblem, choices: Choices) -> bool:
    """Return whether the box is to be cut: with few signs to split, those are the faster way."""
    if not splits_inputs(subject, opened.problem, choices.split):
        return False
    if choices.split == "input" or not (_tiny(subject) and reducible(subject.exact)):
        return True
    return unstable_neurons(bound_nodes(subject, opened, CROWN)) > FEW_SIGNS


def _tiny(subject: Subject) -> bool:
    """Return whether bounds of all layers cost next to nothing."""
    nodes = subject.exact.nodes
    return sum(math.prod(n.shape) for n in nodes if isinstance(n.op, ACTIVATIONS)) <= TINY


def bound_nodes(subject: Subject, opened: OpenProblem, effort: Effort = ALPHA) -> Relaxation:
    """Return a strict relaxation of the network, from what is known already; it is kept.

    A network that is too large to be reduced keeps its intervals if they decide most neurons: the
    search on it bounds those neurons again that matter.
    """
    graph, box = subject.exact, opened.problem.outer
    if opened.nodes is not None and opened.effort in (None, effort, ALPHA):
        return relaxed(graph, dict(opened.nodes), rounding=ROUNDING)
    if effort is not CROWN_IBP and opened.effort is not CROWN and reducible(graph):
        rough = bound_nodes(subject, opened, CROWN_IBP)
        if not reduction_fits(rough) and _mostly_decided(rough):
            return rough
    known, settled = opened.nodes, opened.settled
    found = relax(graph, box, effort=effort, rounding=ROUNDING, known=known, settled=settled)
    opened.nodes, opened.effort = found.known(0), effort
    return found


def _mostly_decided(relaxation: Relaxation) -> bool:
    """Return whether few neurons are unstable behind the first layer, which is exact."""
    nodes = relaxation.graph.nodes
    masks = [unstable(relaxation.boxes[nodes[i].inputs[0]]) for i in sorted(relaxation.lines)][1:]
    return sum(int(m.sum()) for m in masks) < DECIDED * sum(m.numel() for m in masks)


def branch_and_bound(
    subject: Subject, opened: OpenProblem, deadline: Deadline, choices: Choices = CHOICES
) -> Answer:
    """Decide a problem by splitting ReLUs, or its inputs where few of them vary."""
    if opened.search is None:
        found = root(subject, opened, deadline, choices)
        if found or found.cause is not None:
            return found
    search, opened.search = opened.search, None
    if isinstance(search, InputSearch) and choices.split == "auto" and reducible(subject.exact):
        found = _run(search, Deadline.after(deadline.left / 2))
        if found.cause is not Cause.TIME or deadline.left <= 0:
            return found
        other = branch_and_bound(subject, opened, deadline, replace(choices, split="relu"))
        return replace(other, subproblems=found.subproblems + other.subproblems)
    assert search is not None
    by_signs = isinstance(search, BranchAndBound) and choices.split == "auto"
    if by_signs and suits_turns(subject, opened.problem):
        return _run(Turns(search, lambda: _by_inputs(subject, opened, deadline)), deadline)
    found = _run(search, deadline)
    if isinstance(search, InputSearch | NestedSearch):
        return found
    if isinstance(search, PieceSearch):
        if found.cause is Cause.TOO_CLOSE:
            found = _by_signs(subject, opened, search, found, deadline)
        return _attack_on(subject, opened, deadline, found)
    if found.verdict is Verdict.FALSIFIED:
        return found
    instead = _instead(search) if isinstance(search, GraphSearch) else ""
    return replace(found, details=f"{found.details}{_widest(subject, opened)}{instead}")


def _by_signs(
    subject: Subject, opened: OpenProblem, pieces: PieceSearch, found: Answer, deadline: Deadline
) -> Answer:
    """Look for signs that are tested, where those that are open leave nothing else to be cut."""
    refuter = Raids(opened.problem.refuter(subject))
    search = SignSearch(pieces.relaxation, pieces.unsafe, refuter)
    if not search.open():
        return found
    other = _run(search, deadline)
    return replace(other, subproblems=found.subproblems + other.subproblems)


def _by_inputs(subject: Subject, opened: OpenProblem, deadline: Deadline) -> InputSearch | None:
    """Return a search over the inputs, None if there is no time to make it."""
    try:
        with until(deadline):
            return input_search(subject, opened.problem, opened.nodes)
    except OutOfTimeError:
        return None


def _run(search: Search | SignSearch | Turns, deadline: Deadline) -> Answer:
    with until(Deadline()):  # it looks at the clock itself, and says how far it came
        found = search.run(deadline.end)
    if found and not math.isfinite(found.bound or 0.0):
        return undecided(Cause.TIME, NOT_BOUNDED)  # nothing open, because nothing was looked at
    return found


def _instead(search: GraphSearch) -> str:
    """Say why the network was searched as it is."""
    relaxation = search.relaxation
    most = fitting(MEMORY, relaxation.box.lower.device) / 1e9
    needed = reduction_bytes(relaxation) / 1e9
    return f", not reduced: that takes {needed:.3g} GB, and there are {most:.3g}"


def _widest(subject: Subject, opened: OpenProblem) -> str:
    """Name the layer that there was most to split in."""
    nodes, known = subject.exact.nodes, opened.nodes or {}
    counts = {
        node.name: int(unstable(known[node.inputs[0]]).sum())
        for node in nodes
        if isinstance(node.op, ACTIVATIONS)
    }
    widest = max(counts, key=lambda name: counts[name], default="")
    return f", widest layer {widest!r} with {counts.get(widest, 0)} unstable neurons"


def _attack_on(subject: Subject, opened: OpenProblem, deadline: Deadline, found: Answer) -> Answer:
    """Attack what a search left open although there was time: nothing was left to be cut."""
    refuter = opened.problem.refuter(subject)
    for _ in range(LAST_ATTACKS):
        if found.verdict is not Verdict.UNKNOWN or deadline.left <= 0:
            return found
        point = refuter.search(steps=LAST_STEPS, restarts=1, deadline=deadline)
        if point is not None:
            return falsified(point, found.subproblems)
    return found


def mixed_integer_program(subject: Subject, opened: OpenProblem, deadline: Deadline) -> Answer:
    """Decide a problem by one mixed-integer program per row."""
    try:
        with until(deadline):
            relaxation = bound_nodes(subject, opened)
    except OutOfTimeError:
        return undecided(Cause.TIME, NOT_BOUNDED)
    try:
        encoding = milp.Encoding(subject.exact, opened.problem.outer, relaxation.boxes)
    except UserError as error:  # other activations than ReLU, numbers that are not finite
        return undecided(Cause.NO_ENCODING, str(error))
    refuter = opened.problem.refuter(subject)
    lowest = float("inf")
    groups = opened.problem.unsafe.group.unique()
    for group in groups:
        bound, point = _solve_group(encoding, opened.problem, group, refuter, deadline)
        if point is not None:
            return falsified(point)
        lowest = min(lowest, bound)
        if not bound > 0:
            cause = Cause.TIME if deadline.left < 0 else Cause.TOLERANCE
            # It is one of the problem if no group is left that may be worse.
            known = lowest if group == groups[-1] else None
            return undecided(cause, f"lowest bound {lowest:.4g}", bound=known)
    return verified(lowest)


def _solve_group(
    encoding: milp.Encoding,
    problem: Problem,
    group: Tensor,
    refuter: Refuter,
    deadline: Deadline,
) -> tuple[float, Tensor | None]:
    """Bound the rows of a group until one is positive; return the best bound, or a point."""
    best = float("-inf")
    for row in (problem.unsafe.group == group).nonzero()[:, 0].tolist():
        allowance = milp.safety(encoding, problem.unsafe.matrix[row])
        found = milp.minimize(
            encoding,
            problem.unsafe.matrix[row],
            float(problem.unsafe.offset[row]),
            seconds=deadline.left,
            stop_above=allowance,
            stop_below=0.0,
        )
        best = max(best, found.lower - allowance)
        if best > 0:
            break
        if found.point is not None:
            point = refuter(found.point.view(1, -1).to(problem.inner.lower), group[None])
            if point is not None:
                return best, point
    return best, None
