"""What is certified: the network of a run, or one that users bring with samples of their own."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightrope.certification.arguments import check_network, precision
from tightrope.certification.deciding import OnnxContent, open_subject
from tightrope.certification.names import DEFAULT_STAGES, DISTANCE_STAGES
from tightrope.certification.properties import (
    PIXELS,
    Ball,
    Domain,
    norm_setting,
    parse_domain,
    radius_limit,
)
from tightrope.data import Dataset, read_test_samples, samples_of_pair
from tightrope.devices import pick_device
from tightrope.domains import lipschitz
from tightrope.errors import UserError, shorten
from tightrope.graph import Graph, trace
from tightrope.graph.ops import Op
from tightrope.limits import ONNX_BYTES
from tightrope.nets.distance import Distance
from tightrope.nets.onnx.check import evenly
from tightrope.nets.onnx.importing import OnnxNetwork
from tightrope.radius import Radius, parse_radii
from tightrope.reading import file_hash
from tightrope.runs.examination import choose_samples, examine, proving_device
from tightrope.runs.folder import FINGERPRINTS, Run, open_run
from tightrope.runs.lock import Lock, Wait
from tightrope.runs.shards import Shard

CHECKED_BALLS = 6
SUFFIXES = (".onnx", ".onnx.gz")


@dataclass(frozen=True)
class Wanted:
    """Which samples are asked for, at which radii of which norm, computed where."""

    eps: Radius | Sequence[Radius] | None
    samples: int | None
    start: int
    device: str | None
    norm: float = math.inf
    shard: Shard | None = None


@dataclass(frozen=True)
class Source:
    """A network, test samples and radii of a norm; the files go to the folder of `run`.

    `own` is the radius that a folder gets if it has none yet. `settings` tell which network it is.
    """

    run: Run
    network: nn.Module | Graph | Path
    input_shape: tuple[int, ...]
    data: Dataset
    indices: Tensor
    radii: list[Fraction]
    own: Fraction
    device: torch.device
    dtype: torch.dtype = torch.float32
    domain: Domain = PIXELS
    norm: float = math.inf
    settings: dict[str, Any] = field(default_factory=dict)
    shard: Shard | None = None

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of some samples."""
        return self.data.test_inputs(indices).to(self.dtype), self.data.y_test[indices]

    def portable_network(self) -> nn.Module | Graph | OnnxContent:
        """Return the network for machines that have none of its files: weights, on the CPU."""
        if isinstance(self.network, Path):
            return OnnxContent(self.network.name, self.network.read_bytes())
        if isinstance(self.network, Graph):
            return self.network.to(torch.device("cpu"))
        return copy.deepcopy(self.network).cpu()

    @property
    def usual_stages(self) -> tuple[str, ...]:
        """The stages for this kind of network."""
        parts = self.network.modules() if isinstance(self.network, nn.Module) else ()
        graph = self.network if isinstance(self.network, Graph) else None
        distances = any(isinstance(part, Distance) for part in parts)
        if distances or (graph is not None and lipschitz.applies(graph)):
            return DISTANCE_STAGES
        return DEFAULT_STAGES

    @cached_property
    def neurons(self) -> int:
        """How many numbers are computed for one sample."""
        return open_subject(self.network, self.input_shape, self.device).neurons


def is_network(given: object) -> bool:
    """Return whether something to certify is a network rather than a run folder."""
    if isinstance(given, str | Path):
        return Path(given).name.endswith(SUFFIXES) and not Path(given).is_dir()
    return not isinstance(given, Run)


@contextmanager
def opened(
    given: Any, data: Any, out: Any, domain: Domain, wanted: Wanted, wait: Wait
) -> Iterator[tuple[Source, Lock | None]]:
    """Open what is to be certified, and keep other commands out of its folder."""
    if is_network(given):
        if data is None:
            raise UserError("data is missing: the samples (x, y), or an .npz file, to certify")
        if wanted.eps is None:
            raise UserError("eps is missing: the radius around each sample")
        if not isinstance(out, str | Path | None):
            raise UserError(f"out must be the path of a folder, got {shorten(out)}")
        with contextlib.ExitStack() as stack:
            folder = Path(out or stack.enter_context(tempfile.TemporaryDirectory()))
            run = Run(folder)
            _check_folder(run)
            source = _brought(run, given, data, domain, wanted)
            yield source, stack.enter_context(run.lock("certify", wait))
        return
    alone = out if wanted.shard is None else None
    if data is not None or alone is not None or domain != PIXELS:
        raise UserError("data, out and domain go with a network, a run folder has its own")
    run = open_run(given)
    run.check()
    if wanted.shard is not None:
        part = Run(wanted.shard.folder(run.folder) if out is None else Path(out))
        _check_folder(part)
        with part.lock("certify", wait) as lock:
            yield replace(_trained(run, wanted), run=part), lock
        return
    with run.lock("certify", wait) as lock:
        yield _trained(run, wanted), lock


def _trained(run: Run, wanted: Wanted) -> Source:
    """Return the network of a run and its test samples."""
    usual = run.settings().eps
    radii = [usual] if wanted.eps is None else _radii(wanted, PIXELS)
    check_own_radius(wanted.eps, wanted.norm)
    found = examine(run, radii[0], wanted.samples, wanted.start, wanted.device, None)
    return Source(
        run,
        found.module,
        found.input_shape,
        found.data,
        found.indices,
        radii,
        usual if usual in radii else radii[0],
        found.device,
        norm=wanted.norm,
        settings={**run.fingerprints(), **norm_setting(wanted.norm)},
        shard=wanted.shard,
    )


def _check_folder(run: Run) -> None:
    if run.folder.exists() and not run.folder.is_dir():
        raise UserError(f"{run.folder} is a file; give a folder for the results")
    if run.config.exists():
        raise UserError(
            f"{run.folder} holds a run of its own (config.toml); give another folder as --out"
        )


def _brought(run: Run, given: Any, data: Any, domain: Domain, wanted: Wanted) -> Source:
    """Return a network that a user brings, and samples, after a look at both."""
    network, domain = check_network(given), parse_domain(domain)
    radii = _radii(wanted, domain)
    device = proving_device(pick_device(wanted.device or "auto"))
    shape = None if isinstance(network, nn.Module) else network_graph(network).input_shape
    pixels = domain == PIXELS
    if isinstance(data, str | Path):
        samples = read_test_samples(Path(data), shape, in_pixels=pixels)
    else:
        samples = samples_of_pair(data, shape, in_pixels=pixels)
    if isinstance(network, nn.Module):
        network = network.to(device).eval()
        graph = trace(network, samples.input_shape, frozen=True)
    else:
        graph = network_graph(network)
    samples = _with_classes(samples, graph)
    indices = choose_samples(samples, wanted.samples, wanted.start)
    dtype = network.dtype if isinstance(network, OnnxNetwork) else precision(graph, torch.float32)
    inputs = samples.test_inputs(indices)
    _check_values(inputs, dtype, domain)
    if isinstance(network, OnnxNetwork):
        some = Ball(inputs.to(dtype), radii[0], domain, wanted.norm).outer()
        chosen = evenly(range(len(indices)), CHECKED_BALLS)
        network.check([some[i : i + 1] for i in chosen])
    task = network.to(device) if isinstance(network, Graph) else network
    return Source(
        run,
        Path(given).resolve() if isinstance(task, OnnxNetwork) else task,
        samples.input_shape,
        samples,
        indices,
        radii,
        radii[0],
        device,
        dtype,
        domain,
        wanted.norm,
        {
            **_names(given, data),
            "shape": list(samples.input_shape),
            **({} if pixels else {"domain": "none" if domain is None else list(domain)}),
            **norm_setting(wanted.norm),
            **_fingerprints(given, graph),
        },
        wanted.shard,
    )


def _radii(wanted: Wanted, domain: Domain) -> list[Fraction]:
    assert wanted.eps is not None
    return parse_radii(wanted.eps, largest=radius_limit(domain, wanted.norm))


def check_own_radius(eps: object, norm: float) -> None:
    """Refuse to take the radius that a run was trained for as one of another norm."""
    if eps is None and norm != math.inf:
        raise UserError("eps is missing: the run's own radius is one of the linf norm")


def network_graph(network: Graph | OnnxNetwork) -> Graph:
    """Return the graph of a network that is not a module."""
    return network if isinstance(network, Graph) else network.graph


def _with_classes(samples: Dataset, graph: Graph) -> Dataset:
    """Call the classes by the numbers of the outputs; labels must be among them."""
    if len(graph.output_shape) != 1 or graph.output_shape[0] < 2:
        raise UserError(
            f"the network must give one number for each of at least two classes, but its output "
            f"has shape {graph.output_shape}"
        )
    classes = graph.output_shape[0]
    highest = int(samples.y_test.max())
    if highest >= classes:
        raise UserError(f"there is a label {highest}, but the network has {classes} outputs")
    return samples.renamed(tuple(map(str, range(classes))))


def _check_values(inputs: Tensor, dtype: torch.dtype, domain: Domain) -> None:
    if not torch.equal(inputs.to(dtype).to(inputs.dtype), inputs):
        raise UserError(f"the samples are no {dtype} numbers, which is what the network takes")
    low, high = (-math.inf, math.inf) if domain is None else domain
    if not bool(((inputs.double() >= low) & (inputs.double() <= high)).all()):
        raise UserError(f"the samples must lie in [{low:g}, {high:g}], the domain")


def _names(given: Any, data: Any) -> dict[str, str]:
    """Return the files that were given, for the report."""
    files = {"network": given, "data": data}
    return {name: str(v) if isinstance(v, str | Path) else "" for name, v in files.items()}


def _fingerprints(given: Any, graph: Graph) -> dict[str, str]:
    """Return hashes of the file, or of the weights and operations; nothing is normalised by us."""
    if isinstance(given, str | Path):
        weights, structure = file_hash(Path(given), ONNX_BYTES), "onnx"
    else:
        content = hashlib.sha256()

        def look(tensor: Tensor) -> Tensor:
            content.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            content.update(
                tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            )
            return tensor

        graph.map_tensors(look)
        weights = content.hexdigest()
        lines = (f"{_described(node.op)} {node.inputs} {node.shape}" for node in graph.nodes)
        structure = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return dict(zip(FINGERPRINTS, (weights[:16], structure[:16], "none"), strict=True))


def _described(op: Op) -> str:
    """Return the kind of an operation and its numbers, apart from tensors."""
    values = ((f.name, getattr(op, f.name)) for f in fields(op))
    plain = [f"{name}={value}" for name, value in values if not isinstance(value, Tensor)]
    return f"{type(op).__name__}({', '.join(plain)})"
