"""`tightrope.verify`: one property of one network, proved or refuted.

`verify` asks whether a network is robust around one input, `verify_file` whether a VNN-LIB
property of an ONNX network has a counterexample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from tightrope.certification.complete import Problem, robustness
from tightrope.certification.properties import Ball, Samples, Unsafe, Verdict
from tightrope.certification.solving import Verification, solve
from tightrope.certification.subjects import Subject
from tightrope.certification.vnnlib import (
    Case,
    Specification,
    format_counterexample,
    read_vnnlib,
)
from tightrope.errors import UserError
from tightrope.graph import Graph
from tightrope.nets.onnx_import import OnnxNetwork, read_onnx
from tightrope.radius import Radius, parse_radius

Network = nn.Module | Graph | OnnxNetwork

NO_TIME = "time: not all of the input boxes were looked at"


def verify(
    network: Network,
    x: Tensor,
    label: int,
    *,
    eps: Radius,
    timeout: float = 60.0,
    seed: int = 0,
) -> Verification:
    """Decide whether no point within `eps` of `x` (and within [0, 1]) changes the class.

    `x` is one input without a batch dimension, in the network's own precision. The result says
    `verified`, `falsified` (with a counterexample) or `unknown` (with a reason).
    """
    _check_timeout(timeout)
    radius, x, label = parse_radius(eps), x.detach(), int(label)
    with _evaluating(network):
        subject = examine_network(network, tuple(x.shape))
        _check_sample(network, subject.graph, x, label)
        samples = Samples(Ball(x[None], radius), torch.tensor([label], device=x.device))
        if int(subject.predict(x[None])[0]) != label:
            return Verification(Verdict.FALSIFIED, "natural", 0.0, counterexample=x)
        return solve(subject, robustness(subject, samples), timeout=timeout, seed=seed)


@contextmanager
def _evaluating(network: Network) -> Iterator[None]:
    """Leave a module's layers in the modes they were in."""
    layers = list(network.modules()) if isinstance(network, nn.Module) else []
    modes = [layer.training for layer in layers]
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.training = mode


def _check_sample(network: Network, graph: Graph, x: Tensor, label: int) -> None:
    if len(graph.output_shape) != 1 or graph.output_shape[0] < 2:
        raise UserError(
            f"the network must give one number for each of at least two classes, but its output "
            f"has shape {graph.output_shape} (x has no batch dimension)"
        )
    if not 0 <= label < graph.output_shape[0]:
        raise UserError(f"label must be one of 0 to {graph.output_shape[0] - 1}, got {label}")
    dtype = network.dtype if isinstance(network, OnnxNetwork) else _precision(graph, x.dtype)
    if x.dtype != dtype:
        raise UserError(f"x must be {dtype}, which is what the network takes, got {x.dtype}")
    if not (x.isfinite().all() and x.amin() >= 0 and x.amax() <= 1):
        raise UserError("x must lie in [0, 1]")


def _precision(graph: Graph, default: torch.dtype) -> torch.dtype:
    """Return the type of the network's weights; numbers of no dimension do not count."""
    found = [default if default.is_floating_point else torch.float32]

    def look(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.is_floating_point():
            found.append(tensor.dtype)
        return tensor

    graph.map_tensors(look)
    return found[-1]


def examine_network(network: Network, input_shape: tuple[int, ...]) -> Subject:
    """Return what certification needs of a module, a graph or an ONNX network."""
    if isinstance(network, nn.Module):
        return Subject.of(network, input_shape)
    run: Callable[[Tensor], Tensor] = network if isinstance(network, Graph) else network.run
    graph = network if isinstance(network, Graph) else network.graph
    if graph.input_shape != input_shape:
        raise UserError(f"x has shape {input_shape}, the network takes {graph.input_shape}")
    return Subject(graph, run)


def _check_timeout(timeout: float) -> None:
    if not (math.isfinite(timeout) and timeout > 0):
        raise UserError(f"timeout must be a positive number of seconds, got {timeout}")


def verify_file(
    onnx: Path | str, vnnlib: Path | str, *, timeout: float = 60.0, seed: int = 0
) -> Verification:
    """Decide a VNN-LIB property of an ONNX network: `verified` if it has no counterexample.

    A file that describes several input boxes has a counterexample if one of them has.
    """
    _check_timeout(timeout)
    started = time.monotonic()
    network = read_onnx(Path(onnx))
    specification = read_vnnlib(Path(vnnlib))
    _check_sizes(network, specification, Path(onnx), Path(vnnlib))
    subject = Subject(network.graph, network.run)
    domains, bound = 0, math.inf
    open_ones: list[Verification] = []
    found = Verification(Verdict.VERIFIED, "empty", 0.0)
    for case in specification.cases:
        left = timeout - (time.monotonic() - started)
        if left <= 0:
            open_ones.insert(0, Verification(Verdict.UNKNOWN, "input", 0.0, reason=NO_TIME))
            break
        found = _decide_case(subject, network, case, left, seed)
        domains += found.domains
        if found.verdict is Verdict.FALSIFIED:
            break
        if found.verdict is Verdict.UNKNOWN:
            open_ones.append(found)
        bound = min(bound, math.inf if found.bound is None else found.bound)
    if found.verdict is not Verdict.FALSIFIED and open_ones:
        found = open_ones[0]
    return Verification(
        found.verdict,
        found.stage,
        time.monotonic() - started,
        bound if math.isfinite(bound) and found.verdict is Verdict.VERIFIED else None,
        found.counterexample,
        domains,
        found.reason,
    )


def _check_sizes(
    network: OnnxNetwork, specification: Specification, onnx: Path, vnnlib: Path
) -> None:
    inputs = math.prod(network.input_shape)
    if (specification.inputs, specification.outputs) != (inputs, network.output_size):
        raise UserError(
            f"{vnnlib} declares {specification.inputs} inputs and {specification.outputs} "
            f"outputs, {onnx} has {inputs} and {network.output_size}: they do not belong together"
        )


def _decide_case(
    subject: Subject, network: OnnxNetwork, case: Case, timeout: float, seed: int
) -> Verification:
    inner = case.inner(network.dtype)
    if inner is None:
        return Verification(
            Verdict.UNKNOWN, "input", 0.0, reason="no float lies in the box: it is too thin"
        )

    def shaped(t: Tensor) -> Tensor:
        return t.view(1, *network.input_shape)

    def fails(point: Tensor) -> bool:
        outputs = subject.outputs(point[None])[0].double().tolist()
        inside = case.contains(point.flatten().double().tolist())
        return inside and any(conjunction.holds(outputs) for conjunction in case.unsafe)

    center = inner.project(inner.center)
    if any(not conjunction.matrix for conjunction in case.unsafe):
        # Any outputs are unsafe, as long as they are numbers.
        if fails(shaped(center)[0]):
            return Verification(Verdict.FALSIFIED, "input", 0.0, counterexample=shaped(center)[0])
        return Verification(Verdict.UNKNOWN, "input", 0.0, reason="outputs that are not finite")
    outer = case.outer().map(shaped)
    problem = Problem(outer, inner.map(shaped), _unsafe(case, network.output_size), fails)
    return solve(subject, problem, timeout=timeout, seed=seed)


def _unsafe(case: Case, outputs: int) -> Unsafe:
    parts = [conjunction.rows() for conjunction in case.unsafe]
    counts = torch.tensor([len(offset) for _, offset in parts])
    return Unsafe(
        torch.cat([matrix.view(-1, outputs) for matrix, _ in parts]),
        torch.cat([offset for _, offset in parts]),
        torch.arange(len(parts)).repeat_interleave(counts),
    )


def counterexample_text(vnnlib: Path | str, onnx: Path | str, verification: Verification) -> str:
    """Return the text of a counterexample in the format of the VNN competition."""
    assert verification.counterexample is not None
    network, specification = read_onnx(Path(onnx)), read_vnnlib(Path(vnnlib))
    point = verification.counterexample
    outputs = network.run(point[None])[0].double().tolist()
    inputs = point.flatten().double().tolist()
    case = next(
        c
        for c in specification.cases
        if c.contains(inputs) and any(conjunction.holds(outputs) for conjunction in c.unsafe)
    )
    return format_counterexample(case, inputs, outputs)
