"""`tightrope.verify`: one property of one network, proved or refuted.

`verify` asks whether a network is robust around one input, `verify_file` whether a VNN-LIB
property of an ONNX network has a counterexample.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from tightrope.answer import Answer, Cause, Verdict, falsified, undecided
from tightrope.box import Box
from tightrope.budget import PROVING_ADVICE, TOO_LITTLE, is_out_of_memory
from tightrope.certification.arguments import Network, check_network, precision
from tightrope.certification.cascade import solve
from tightrope.certification.problem import (
    CHOICES,
    Choices,
    Problem,
    check_choices,
    check_timeout,
)
from tightrope.certification.properties import PIXELS, Domain, Unsafe
from tightrope.certification.questions import check_question
from tightrope.certification.regions import Region, around, corners, inside
from tightrope.certification.search.together import FEWEST, alike, decide_together
from tightrope.certification.specs import Spec
from tightrope.certification.subjects import Subject, proving
from tightrope.certification.vnnlib import (
    Case,
    Specification,
    floats,
    format_counterexample,
    read_vnnlib,
)
from tightrope.certification.vnnlib.joining import Files, Joined, join
from tightrope.deadline import Deadline, OutOfTimeError, check_time, until
from tightrope.devices import pick_device
from tightrope.errors import UserError
from tightrope.graph import Graph
from tightrope.limits import VNNLIB_COEFFICIENTS, VNNLIB_ROWS
from tightrope.nets.onnx.check import evenly
from tightrope.nets.onnx.importing import OnnxNetwork
from tightrope.radius import Radius
from tightrope.runs.examination import check_seed, proving_device

NO_TIME = "not all of the input boxes were looked at"
NOT_READ = "the files were not read to their end"
NO_FLOATS = "the outputs have factors that no floats stand for"
# A network is compared with its file at points of so many of the boxes of a property.
CHECKED_BOXES = 6


def verify(
    network: Network | str | Path,
    x: Tensor | None = None,
    label: int | None = None,
    *,
    eps: Radius | Tensor | None = None,
    box: Box | tuple[Tensor, Tensor] | None = None,
    spec: Spec | None = None,
    norm: float | str = math.inf,
    domain: Domain = PIXELS,
    timeout: float = 60.0,
    split: str = "auto",
    branching: str = "intercept",
    cuts: str = "auto",
    seed: int = 0,
) -> Answer:
    """Decide whether a class wins, or a spec holds, at all inputs of a set.

    The set is all points within `eps` of `x` (and within `domain`) in a `norm`: linf, l2 or l1. In
    the first one, `eps` may be a tensor with a radius for each feature. Or it is `box`, any box or
    pair of corners. What must hold is that class `label` wins, or `spec`, made of `argmax`,
    `within` and `linear`, joined by & and |.

    `network` is a module, a graph or the path of an ONNX file. `x` and the corners are inputs
    without a batch dimension, `x` in the network's own precision. The result says `verified`,
    `falsified` (with a counterexample) or `unknown` (with a reason). `split` says what a search
    takes apart (auto, input, relu), `branching` by which rule it chooses neurons, `cuts` whether
    it uses multi-neuron constraints (auto, off, on).
    """
    check_timeout(timeout)
    check_seed(seed)
    choices, deadline = check_choices(split, branching, cuts), Deadline.after(timeout)
    wanted = check_question(x, eps, box, label, spec)
    asked = around(x, eps, domain, norm) if box is None else corners(box)  # type: ignore[arg-type]
    network = check_network(network)
    with evaluating(network):
        subject, region = examine(network, asked)
        problem = wanted.problem(subject, region)
        found = region.center
        if isinstance(problem, Answer):
            return problem
        if found is not None and problem.fails(found):
            return dataclasses.replace(falsified(found), stage="natural", note=region.note())
        left = max(deadline.left, 0.0)  # what tracing and checking have left
        answer = solve(subject, problem, timeout=left, seed=seed, choices=choices)
        return dataclasses.replace(answer, note=_joined(region.note(), subject.note(answer)))


def examine(network: Network, asked: Region | Box) -> tuple[Subject, Region]:
    """Return the network as certification needs it, and the set of inputs for its precision."""
    box = asked.inner if isinstance(asked, Region) else asked.map(lambda t: t[None])
    subject = examine_network(network, tuple(box.lower.shape[1:]), box)
    dtype = (
        network.dtype
        if isinstance(network, OnnxNetwork)
        else precision(subject.graph, box.lower.dtype)
    )
    region = asked if isinstance(asked, Region) else inside(asked, dtype)
    if region.inner.lower.dtype != dtype:
        raise UserError(
            f"x must be {dtype}, which is what the network takes, got {region.inner.lower.dtype}"
        )
    if isinstance(network, OnnxNetwork):
        network.check([region.outer])
    return subject, region


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    """Leave a module's layers in the modes they were in."""
    layers = list(network.modules()) if isinstance(network, nn.Module) else []
    modes = [layer.training for layer in layers]
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def examine_network(network: Network, input_shape: tuple[int, ...], box: Box) -> Subject:
    """Return what certification needs of a module, a graph or an ONNX network.

    Whether the graph is the network is checked at points of the box, too.
    """
    if isinstance(network, nn.Module):
        return Subject.of(network, input_shape, box)
    run: Callable[[Tensor], Tensor] = network if isinstance(network, Graph) else network.run
    graph = network if isinstance(network, Graph) else network.graph
    if graph.input_shape != input_shape:
        raise UserError(f"x has shape {input_shape}, the network takes {graph.input_shape}")
    return Subject(graph, run)


def verify_file(
    onnx: Files,
    vnnlib: Path | str,
    *,
    timeout: float = 60.0,
    split: str = "auto",
    branching: str = "intercept",
    cuts: str = "auto",
    seed: int = 0,
    device: str = "cpu",
) -> Answer:
    """Decide a VNN-LIB property of an ONNX network: `verified` if it has no counterexample.

    A file that describes several input boxes has a counterexample if one of them has. Where it
    declares several networks, `onnx` has the file of each by name. `split` says what a search takes
    apart (auto, input, relu), `branching` by which rule it chooses neurons, `cuts` whether it uses
    multi-neuron constraints (auto, off, on), `device` where bounds and attacks are computed (cpu,
    cuda, auto).
    """
    choices = check_choices(split, branching, cuts)
    return verify_and_tell(
        onnx, vnnlib, timeout=timeout, seed=seed, choices=choices, device=device
    )[0]


def verify_and_tell(
    onnx: Files,
    vnnlib: Path | str,
    *,
    timeout: float,
    seed: int,
    choices: Choices = CHOICES,
    device: str = "cpu",
    started: float | None = None,
) -> tuple[Answer, str | None]:
    """As `verify_file`, with the text of a counterexample in the format of the competition.

    The clock (`time.monotonic`) starts now, or at the moment that is given.
    """
    check_timeout(timeout)
    check_seed(seed)
    target = proving_device(pick_device(device))
    started = time.monotonic() if started is None else started
    deadline = Deadline(started + timeout)
    try:
        with until(deadline):
            specification = read_vnnlib(Path(vnnlib), deadline)
            network = join(specification, onnx, Path(vnnlib), deadline)
            specification = specification.for_type(network.dtype)
            network.check(_some_boxes(network, specification), deadline)
    except OutOfTimeError:
        answer = undecided(Cause.TIME, NOT_READ)
        return dataclasses.replace(answer, stage="input", seconds=time.monotonic() - started), None
    try:
        subject = Subject(network.graph().to(target), network.run)
        answer, case = _decide_cases(subject, network, specification, deadline, seed, choices)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        answer = undecided(Cause.MEMORY, f"{TOO_LITTLE}: {PROVING_ADVICE}")
        return dataclasses.replace(answer, seconds=time.monotonic() - started), None
    note = _joined(_note(specification, network.dtype), subject.note(answer))
    answer = dataclasses.replace(answer, seconds=time.monotonic() - started, note=note)
    if answer.counterexample is None or case is None:
        return answer, None
    outputs = network.run(answer.counterexample[None])[0, : specification.outputs]
    point, values = (t.flatten().double().tolist() for t in (answer.counterexample, outputs))
    text = format_counterexample(specification, case, point, values)
    return dataclasses.replace(answer, outputs=outputs), text


def _decide_cases(
    subject: Subject,
    network: Joined,
    specification: Specification,
    deadline: Deadline,
    seed: int,
    choices: Choices,
) -> tuple[Answer, Case | None]:
    """Decide each input box; the first counterexample ends it. What is proved holds for all."""
    subproblems, bound = 0, math.inf
    opened: Answer | None = None
    found = Answer(Verdict.VERIFIED, "empty")
    for found, case in _answers(subject, network, specification.cases, deadline, seed, choices):
        subproblems += found.subproblems
        if found.verdict is Verdict.FALSIFIED:
            return dataclasses.replace(found, subproblems=subproblems), case
        if found.verdict is Verdict.UNKNOWN and opened is None:  # an open answer counts as false
            opened = found
        bound = min(bound, math.inf if found.bound is None else found.bound)
    known = bound if math.isfinite(bound) and opened is None else None
    answer = found if opened is None else opened
    return dataclasses.replace(answer, bound=known, subproblems=subproblems), None


def _answers(
    subject: Subject,
    network: Joined,
    cases: Sequence[Case],
    deadline: Deadline,
    seed: int,
    choices: Choices,
) -> Iterator[tuple[Answer, Case | None]]:
    """Yield the answer of each input box, or of many that ask the same but for numbers."""
    parts: dict[object, list[Case]] = {}
    for case in cases:
        asked = tuple(tuple(row.factors for row in c.rows) for c in case.unsafe)
        parts.setdefault(asked, []).append(case)
    for part in parts.values():
        if choices.split != "relu":
            together = _decide_together(subject, network, part, deadline, seed)
            if together is not None:
                yield together
                continue
        for case in part:
            if deadline.left <= 0:
                yield dataclasses.replace(undecided(Cause.TIME, NO_TIME), stage="input"), None
                return
            yield _decide_case(subject, network, case, deadline.left, seed, choices), case


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _note(specification: Specification, dtype: torch.dtype) -> str:
    """Say which inputs have the value of a float because no float lies between their bounds."""
    fixed = {i for case in specification.cases for i in case.fixed}
    if not fixed:
        return ""
    name = str(dtype).removeprefix("torch.")
    what = "input was" if len(fixed) == 1 else "inputs were"
    return (
        f"{len(fixed)} {what} fixed at the nearest {name}, since none lies between the bounds; "
        "what is proved holds for that value and for all between the bounds"
    )


def _some_boxes(network: Joined, specification: Specification) -> list[Box]:
    """Return a few of a property's boxes, evenly chosen."""
    chosen = evenly(specification.cases, CHECKED_BOXES)
    return [case.outer().map(lambda t: t.view(1, *network.input_shape)) for case in chosen]


def _decide_together(
    subject: Subject, network: Joined, cases: Sequence[Case], deadline: Deadline, seed: int
) -> tuple[Answer, Case | None] | None:
    """Decide many input boxes in one search, if they ask the same but for numbers."""
    whole = all(c.rows and c.exact for case in cases for c in case.unsafe)
    if not whole or len(cases) < FEWEST:
        return None
    started = time.monotonic()
    try:
        with until(deadline), proving(subject):
            torch.manual_seed(seed)
            problems = [_problem(subject, network, case) for case in cases]
            sound = [problem for problem in problems if problem is not None]
            if len(sound) < len(cases) or not alike(sound):
                return None
            found = decide_together(subject, sound, deadline)
    except OutOfTimeError:
        found = undecided(Cause.TIME, NO_TIME), -1
    if found is None:
        return None
    answer, number = found
    seconds = time.monotonic() - started
    stage = "bab" if answer.subproblems else "attack"
    known = cases[number] if answer.counterexample is not None else None
    return dataclasses.replace(answer, stage=stage, seconds=seconds), known


def _problem(subject: Subject, network: Joined, case: Case) -> Problem | None:
    """Return the problem of an input box; None if no float lies in it."""
    check_time()
    inner = case.inner(network.dtype)
    if inner is None:
        return None

    device = subject.device

    def shaped(t: Tensor) -> Tensor:
        return t.view(1, *network.input_shape).to(device)

    def fails(point: Tensor) -> bool:
        outputs = subject.outputs(point[None])[0].double().tolist()
        inputs = point.flatten().double().tolist()
        if network.echo:
            outputs = outputs[: -len(inputs)]
        return case.contains(inputs) and case.unsafe_at(outputs, inputs)

    outer = case.outer().map(shaped)
    size = subject.graph.output_shape[0]
    inputs = network.inputs if network.echo else 0
    unsafe = _unsafe(case, size - inputs, inputs).to(device)
    return Problem(outer, inner.map(shaped), unsafe, fails)


def _decide_case(
    subject: Subject,
    network: Joined,
    case: Case,
    timeout: float,
    seed: int,
    choices: Choices,
) -> Answer:
    problem = _problem(subject, network, case)
    if problem is None:
        return dataclasses.replace(undecided(Cause.INPUT, "it is too thin"), stage="input")
    if any(not conjunction.rows for conjunction in case.unsafe):
        # Any outputs are unsafe, as long as they are numbers.
        center = problem.inner.project(problem.inner.center)[0]
        if problem.fails(center):
            return dataclasses.replace(falsified(center), stage="input")
        return dataclasses.replace(undecided(Cause.OUTPUT), stage="input")
    found = solve(subject, problem, timeout=timeout, seed=seed, choices=choices)
    if found and not all(conjunction.exact for conjunction in case.unsafe):
        doubt = undecided(Cause.ROUNDING, NO_FLOATS, subproblems=found.subproblems)
        return dataclasses.replace(doubt, stage=found.stage, seconds=found.seconds)
    return found


def _unsafe(case: Case, outputs: int, inputs: int) -> Unsafe:
    rows = [row for conjunction in case.unsafe for row in conjunction.rows]
    VNNLIB_ROWS.check(len(rows), "the list of constraints on the outputs")
    width = outputs + inputs
    VNNLIB_COEFFICIENTS.check(len(rows) * width, f"{len(rows)} constraints on {width} outputs")
    counts = torch.tensor([len(conjunction.rows) for conjunction in case.unsafe])
    group = torch.arange(len(counts)).repeat_interleave(counts)
    return Unsafe(*floats(rows, outputs, inputs), group)
