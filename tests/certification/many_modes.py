"""Ways to decide a problem: every stage and rule, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

from tightrope.answer import Answer
from tightrope.certification import complete
from tightrope.certification.cascade import SINGLE_SETTINGS, solve, walk
from tightrope.certification.names import DEFAULT_STAGES
from tightrope.certification.problem import Choices, OpenProblem, Problem
from tightrope.certification.search import inputs
from tightrope.certification.search.branching import RULES
from tightrope.certification.search.inputs import InputSearch, InputSettings
from tightrope.certification.search.together import decide_together
from tightrope.certification.stages import STAGES
from tightrope.certification.subjects import Subject
from tightrope.deadline import Deadline
from tightrope.domains.boxes.bounding import box_bounder

PATIENCE = 5.0  # what is not decided by then is next to zero, and may stay open
HURRIED = 1.0
FEW = InputSettings(limit=1500)

# Gets the problems of one network; returns their answers.
Mode = Callable[[Subject, list[Problem]], list[Answer]]


def solving(
    stages: tuple[str, ...] = DEFAULT_STAGES, patience: float = PATIENCE, **choices: str
) -> Mode:
    """Return a mode that decides one problem after the other."""

    def decide(subject: Subject, problems: list[Problem]) -> list[Answer]:
        chosen = Choices(**choices)
        return [
            solve(subject, problem, timeout=patience, stages=stages, choices=chosen)
            for problem in problems
        ]

    return decide


def all_at_once(subject: Subject, problems: list[Problem]) -> list[Answer]:
    """Send all problems through the stages together."""
    stages = {name: STAGES[name] for name in DEFAULT_STAGES}
    opened = [OpenProblem(problem, PATIENCE) for problem in problems]
    answers = dict(walk(subject, opened, stages, SINGLE_SETTINGS))
    return [answers[i] for i in range(len(problems))]


def on_the_graph(subject: Subject, problems: list[Problem]) -> list[Answer]:
    """Search as if the network were too large to be reduced."""
    with mock.patch.object(complete, "reduction_fits", lambda relaxation: False):
        return solving(("alpha", "bab"), split="relu")(subject, problems)


def within_boxes(subject: Subject, problems: list[Problem]) -> list[Answer]:
    """Halve boxes that inherit bounds, as if the network were large."""
    with mock.patch.object(inputs, "MOST_NEURONS", -1):
        decide = solving(("alpha", "bab"), patience=HURRIED)
        return decide(subject, problems)


def over_inputs(subject: Subject, problems: list[Problem]) -> list[Answer]:
    """Cut boxes, some thousand of them, and nothing else."""
    answers = []
    for problem in problems:
        unsafe = problem.unsafe
        bounder = box_bounder(subject.exact, problem.outer, unsafe.matrix, unsafe.offset)
        refuter = problem.refuter(subject)
        search = InputSearch(bounder, problem.outer, unsafe.group, refuter, settings=FEW)
        answers.append(search.run(float("inf")))
    return answers


def together(subject: Subject, problems: list[Problem]) -> tuple[Answer, int] | None:
    """Decide whether all problems hold, in one search of some thousand boxes."""
    limited = partial(InputSearch, settings=FEW)
    with mock.patch("tightrope.certification.search.together.InputSearch", limited):
        return decide_together(subject, problems, Deadline())


MODES: dict[str, Mode] = {
    "auto": solving(),
    "input": over_inputs,
    **{f"relu {rule}": solving(split="relu", branching=rule) for rule in RULES},
    **{f"{rule} alone": solving(("bab",), split="relu", branching=rule) for rule in RULES},
    "cuts on": solving(split="relu", cuts="on"),
    "cuts alone": solving(("bab",), split="relu", cuts="on"),
    "cuts off": solving(("bab",), split="relu", cuts="off"),
    "graph": on_the_graph,
    "within boxes": within_boxes,
    "all at once": all_at_once,
    "ibp": solving(("ibp",)),
    "crown-ibp": solving(("crown-ibp",)),
    "crown": solving(("crown",)),
    "alpha": solving(("alpha",)),
    "alpha relu": solving(("alpha",), split="relu"),
    "attack": solving(("quick", "attack")),
    "milp": solving(("milp",)),
}
