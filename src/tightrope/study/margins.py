"""Worst margins of the test samples of a run: estimated, exact, and by a mixed-integer program.

Their files hold `max_i (o_i - o_y)`, as the paper's figures do: negative where a sample is robust.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightrope.attacks import Margin, Steps, pgd, worst_margin
from tightrope.attacks.ensemble import MILESTONES
from tightrope.certification.complete import bound_nodes
from tightrope.certification.problem import OpenProblem, Problem, robustness
from tightrope.certification.properties import Ball
from tightrope.certification.search import optimum
from tightrope.certification.subjects import Subject
from tightrope.devices import forked_random
from tightrope.domains.milp import program as milp
from tightrope.files import open_to_append, write_json, write_text
from tightrope.graph import trace
from tightrope.precision import full_precision
from tightrope.runs.examination import Examination, batch_seed, examine
from tightrope.runs.folder import ESTIMATED, EXACT, SPLITS, Run
from tightrope.runs.found import read_objects
from tightrope.training.estimating import estimated_margin, estimators, evaluated, trained_split
from tightrope.training.objectives import STAPS, TAPS, Objective

Progress = Callable[[int, int], None]

# Branch and bound may take this long for one sample before the mixed-integer program has to.
SEARCH_SECONDS = 5.0
MILP_SECONDS = 120.0
TOLERANCE = 1e-4
CHUNK = 100


def estimate_margins(run: Run, options: Mapping[str, Any], progress: Progress) -> None:
    """Write `margins.json`: the worst margins as each estimator of the options sees them."""
    examination = examine(run, options["eps"], options["samples"], 0, None)
    graph = trace(examination.module, examination.input_shape)
    relus = trained_split(run, graph)
    names = options["estimators"]
    known: dict[str, Objective] = {
        **estimators(relus),
        "staps": STAPS(relus, steps=20, ratio=0.4, loss="taps"),
    }
    chosen = {name: known[name] for name in names if name != "natural"}
    found: dict[str, list[float]] = {name: [] for name in names}
    for model, x, y, first in evaluated(examination, graph, relus, progress):
        if "natural" in found:
            found["natural"] += _rounded(-worst_margin(model.logits, y))
        for name, objective in chosen.items():
            torch.manual_seed(batch_seed(0, first))
            margins = estimated_margin(objective, model, x, y, float(examination.eps))
            found[name] += _rounded(-margins)
    settings = {**options, "classifier_relus": relus, **run.fingerprints()}
    write_json(run.folder / ESTIMATED, {"settings": settings, "margins": found})


def measure_splits(run: Run, options: Mapping[str, Any], progress: Progress) -> None:
    """Write `splits.json`: TAPS accuracy under each split of the options."""
    examination = examine(run, options["eps"], options["samples"], 0, None)
    relus: Sequence[int] = options["relus"]
    robust = dict.fromkeys(relus, 0)
    graph = trace(examination.module, examination.input_shape)
    for model, x, y, first in evaluated(examination, graph, max(relus), progress):
        for k in relus:
            torch.manual_seed(batch_seed(0, first))
            margins = estimated_margin(TAPS(k, loss="taps"), model, x, y, float(examination.eps))
            robust[k] += int((margins > 0).sum())
    total = len(examination.indices)
    settings = {**options, **run.fingerprints()}
    accuracies = {str(k): count / total for k, count in robust.items()}
    write_json(run.folder / SPLITS, {"settings": settings, "accuracies": accuracies})


def _rounded(margins: Tensor) -> list[float]:
    # Nine digits carry a float32; a value that is not finite has no place in JSON.
    values = [float(f"{value:.9g}") for value in margins.tolist()]
    return [value if math.isfinite(value) else 1e30 for value in values]


# --- exact margins ------------------------------------------------------------------------------


def exact_margins(
    run: Run, options: Mapping[str, Any], samples: int, compared: int, progress: Progress
) -> None:
    """Write `exact.jsonl`: the exact worst margins of the first samples, as they are found.

    The first `compared` of them are computed by a mixed-integer program as well. Continues
    where it was interrupted.
    """
    path = run.folder / EXACT
    header = {**options, "tolerance": TOLERANCE, **run.fingerprints()}
    known = _earlier(path, header)
    # A sample that lacks only its comparison is done again as a whole.
    known = {i: r for i, r in known.items() if "milp" in r or i >= compared}
    lines = [header, *known.values()]
    write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    examination = examine(run, options["eps"], samples, 0, None)
    subject = Subject.of(examination.module, examination.input_shape)
    done = len(known)
    with open_to_append(path) as file:
        for index, problem, start, label in _problems(subject, examination, known):
            record = _solve(subject, problem, start, label, compare=index < compared)
            file.write(json.dumps({"index": index, **record}).encode() + b"\n")
            file.flush()
            done += 1
            progress(done, samples)


def _earlier(path: Path, header: dict[str, Any]) -> dict[int, dict[str, Any]]:
    records = read_objects(path).whole("remove it, and it is computed again")
    if not records or records[0] != header:
        return {}  # of other weights
    return {record["index"]: record for record in records[1:]}


def _problems(
    subject: Subject, examination: Examination, known: Mapping[int, Any]
) -> Iterator[tuple[int, Problem, Tensor, int]]:
    """Yield each open sample with a bad point; the points are searched for in batches."""
    for first in range(0, len(examination.indices), CHUNK):
        indices, x, y = examination.batch(first, first + CHUNK)
        if all(int(i) in known for i in indices):
            continue
        points = _bad_points(subject, Ball(x, examination.eps), y, int(indices[0]))
        for k, index in enumerate(indices.tolist()):
            if index not in known:
                (problem,) = robustness(subject, Ball(x[k : k + 1], examination.eps), y[k : k + 1])
                yield index, problem, points[k : k + 1], int(y[k])


def _bad_points(subject: Subject, ball: Ball, y: Tensor, first: int) -> Tensor:
    with forked_random(subject.device), full_precision():
        torch.manual_seed(batch_seed(0, first))
        steps = Steps(50, milestones=MILESTONES)
        return pgd(subject.attacked, ball.inner(), Margin(y), steps=steps, restarts=3)


def _solve(
    subject: Subject, problem: Problem, start: Tensor, label: int, *, compare: bool
) -> dict[str, Any]:
    """Return the bracket of a worst margin `max_i (o_i - o_y)`, and who found it."""
    began = time.perf_counter()
    found = optimum.enclose(
        subject, problem, start=start, tolerance=TOLERANCE, timeout=SEARCH_SECONDS
    )
    # The search minimises o_y - o_i: what is attained is a lower end here.
    record: dict[str, Any] = {"by": "search", "lower": -found.upper, "upper": -found.lower}
    record["seconds"] = time.perf_counter() - began
    if compare or not found.finished:
        program = _by_program(subject, problem, label)
        record |= _combined(record, program, found.finished, compare)
    return {k: _number(v) for k, v in record.items()}


def _combined(
    record: dict[str, Any], program: dict[str, Any], finished: bool, compare: bool
) -> dict[str, Any]:
    """Return what a mixed-integer program adds to what the search found."""
    if finished:
        return {"milp": program}
    if record["lower"] > program["upper"] + TOLERANCE:
        # A point that the search found is worse than the program's proven worst case.
        return {"by": "nobody", "milp": program}
    ends = {"lower": max(record["lower"], program["lower"]), "upper": program["upper"]}
    found = {"by": "milp" if program["finished"] else "nobody", **ends}
    return {**found, "milp": None} if compare else found  # nothing to compare it with


def _by_program(subject: Subject, problem: Problem, label: int) -> dict[str, Any]:
    began = time.perf_counter()
    relaxation = bound_nodes(subject, OpenProblem(problem))
    encoding = milp.Encoding(subject.exact, problem.outer, relaxation.boxes)
    found = milp.minimize_margin(encoding, label, seconds=MILP_SECONDS)
    allowance = max(milp.safety(encoding, row) for row in problem.unsafe.matrix)
    return {
        "lower": _number(-found.upper),
        "upper": _number(-(found.lower - allowance)),
        "finished": found.finished,
        "seconds": time.perf_counter() - began,
    }


def _number(value: Any) -> Any:
    infinite = isinstance(value, float) and not math.isfinite(value)
    return math.copysign(1e30, value) if infinite else value
