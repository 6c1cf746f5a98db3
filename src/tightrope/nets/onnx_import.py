"""Networks from ONNX files, of whatever program.

The graph of a file is handed out only after onnxruntime has computed the same from the file on
random inputs of several magnitudes.
"""

from __future__ import annotations

import gzip
import importlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate
from tightrope.nets.messages import one_line
from tightrope.nets.onnx_builder import Shape, sample_shape
from tightrope.nets.onnx_convert import convert, opset_version

# Differences that rounding explains: multiples of the unit roundoff times the largest output and
# times the largest number on the way to it, and of the difference that our own rounding makes.
OUTPUT_ROUNDOFFS = 128
INNER_ROUNDOFFS = 4
OWN_ROUNDING = 32
SCALES = (0.0, 1e-3, 0.1, 1.0, 10.0, 1e3)


@dataclass(frozen=True, eq=False)
class OnnxNetwork:
    """A network from a file: as a graph to be bounded, and as onnxruntime runs it."""

    graph: Graph
    input_shape: tuple[int, ...]
    output_size: int
    dtype: torch.dtype
    session: Any
    batched: bool
    onnx_shape: Shape

    def run(self, x: Tensor) -> Tensor:
        """Run the file itself with onnxruntime on a batch: [N, *input_shape] to [N, output_size].

        Inputs are converted to the file's own type, `dtype`, the type of the outputs.
        """
        if not len(x):
            return torch.empty(0, self.output_size, dtype=self.dtype, device=x.device)
        return _run(self.session, self.onnx_shape, x.to(self.dtype), self.batched).to(x.device)


def read_onnx(path: Path) -> OnnxNetwork:
    """Read an ONNX file, plain or compressed (`.onnx.gz`), into a graph that computes the same."""
    _require_packages()
    model = _load(path)
    try:
        return _from_model(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error.__cause__


def _require_packages() -> None:
    for name in ("onnx", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(
                f"reading ONNX needs the package {name}: pip install 'tightrope[onnx]'"
            ) from None


def _load(path: Path) -> Any:
    import onnx

    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot read {path}: {reason}") from None
    try:
        model = onnx.load_model_from_string(content)
        onnx.load_external_data_for_model(model, str(path.parent))
    except Exception as error:  # protobuf's exceptions are not public
        raise UserError(f"{path} is not an ONNX file: {one_line(error)}") from None
    if not model.graph.node or not model.graph.output:
        raise UserError(f"{path} is not an ONNX file: it holds no network")
    return model


def _from_model(model: Any) -> OnnxNetwork:
    opset_version(model)
    name, shape, dtype = _input(model)
    if len(model.graph.output) != 1:
        names = ", ".join(output.name for output in model.graph.output)
        raise UserError(f"expected one output, got {len(model.graph.output)}: {names}")
    session = _session(model)
    free_batch = shape[0] is None
    fixed = tuple(1 if size is None else size for size in shape)
    try:
        with torch.no_grad():
            graph = convert(model, name, fixed, dtype)
    except RecursionError as error:  # pragma: no cover - protobuf limits nesting before
        raise UserError("the file is nested too deep") from error
    size = math.prod(graph.output_shape)
    points = _points(graph.input_shape, dtype)
    one_by_one = _run(session, fixed, points, False)
    batched = free_batch and _runs_batches(session, fixed, points, one_by_one)
    _compare(graph, points, one_by_one)
    return OnnxNetwork(graph, sample_shape(fixed), size, dtype, session, batched, fixed)


def _input(model: Any) -> tuple[str, tuple[int | None, ...], torch.dtype]:
    """Return name, shape (None for a free batch size) and type of the one input."""
    from onnx import TensorProto

    stored = {tensor.name for tensor in model.graph.initializer}  # old files list these as inputs
    inputs = [given for given in model.graph.input if given.name not in stored]
    if len(inputs) != 1:
        names = ", ".join(given.name for given in inputs) or "none"
        raise UserError(f"expected one input, got {len(inputs)}: {names}")
    kind = inputs[0].type.tensor_type
    types = {TensorProto.FLOAT: torch.float32, TensorProto.DOUBLE: torch.float64}
    if kind.elem_type not in types:
        raise UserError(f"the input {inputs[0].name!r} must be of type float32 or float64")
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim]
    shape = tuple(size if size > 0 else None for size in sizes)
    if not shape or None in shape[1:] or shape == (None,):
        raise UserError(
            f"the input {inputs[0].name!r} has no fixed shape: only its first dimension, "
            "the batch, may be free"
        )
    return inputs[0].name, shape, types[kind.elem_type]


def _session(model: Any) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal ones only: errors come as exceptions
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    try:
        content = model.SerializeToString()
        return onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no public base class
        raise UserError(f"onnxruntime cannot run the network: {one_line(error)}") from error


def _run(session: Any, shape: Shape, x: Tensor, batched: bool) -> Tensor:
    stored = {given.name for given in session.get_overridable_initializers()}
    name = next(given.name for given in session.get_inputs() if given.name not in stored)
    samples = x.detach().cpu()
    try:
        if batched:
            parts = [samples.reshape(len(x), *shape[1:])]
        else:
            parts = [sample.reshape(shape) for sample in samples]
        results = [session.run(None, {name: part.contiguous().numpy()})[0] for part in parts]
    except Exception as error:  # as above; also shapes that do not fit
        raise UserError(f"onnxruntime cannot run the network: {one_line(error)}") from error
    rows = len(x) if batched else 1
    return torch.cat([torch.from_numpy(result).reshape(rows, -1) for result in results])


def _points(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return random inputs of several magnitudes, from a generator of our own."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(len(SCALES), 2, *shape, generator=generator, dtype=dtype)
    scaled = torch.cat([scale * x for scale, x in zip(SCALES, normal, strict=True)])
    return torch.cat([scaled, torch.rand(2, *shape, generator=generator, dtype=dtype)])


def _runs_batches(session: Any, shape: Shape, points: Tensor, one_by_one: Tensor) -> bool:
    """Return whether samples can be run together; a free batch size alone does not tell."""
    try:
        together = _run(session, shape, points, True)
    except (UserError, RuntimeError):
        return False
    if together.shape != one_by_one.shape:
        return False
    finite = torch.isfinite(one_by_one).all(1)
    difference = (together - one_by_one)[finite].abs().amax(1)
    return bool((difference <= 1e-4 * one_by_one[finite].abs().amax(1)).all())


@torch.no_grad()
def _compare(graph: Graph, points: Tensor, theirs: Tensor) -> None:
    """Raise an error unless the graph computes the same up to rounding."""
    ours = graph(points)
    if ours.shape != theirs.shape:
        raise UserError(f"onnxruntime gives {theirs.shape[1]} outputs, not {ours.shape[1]}")
    finite = torch.isfinite(theirs).all(1)
    if not bool(finite.any()):
        raise UserError("the network gives infinite or NaN outputs")
    points, ours, theirs = points[finite], ours[finite].double(), theirs[finite].double()
    if not bool(torch.isfinite(ours).all()):
        raise UserError("the converted network overflows where onnxruntime does not")
    allowed = _rounding(graph.to(torch.float64), points, ours)
    difference = (ours - theirs).abs().amax(1)
    if not bool((difference <= allowed).all()):  # written so that NaN fails too
        worst = int((difference - allowed).argmax())
        raise UserError(
            f"the converted network differs from onnxruntime by {difference[worst]:.3g}, more "
            f"than rounding explains ({allowed[worst]:.3g}); this file is not supported"
        )


def _rounding(exact: Graph, x: Tensor, ours: Tensor) -> Tensor:
    """Return the largest difference of each sample that rounding explains."""
    everything = exact.propagate(evaluate.RULES, x.double(), keep=range(len(exact.nodes)))
    inner = torch.stack([value.flatten(1).abs().amax(1) for value in everything.values()]).amax(0)
    output = everything[len(exact.nodes) - 1]
    own = (ours - output).abs().amax(1)
    outer = output.abs().amax(1)
    unit = max(torch.finfo(x.dtype).eps, 1e-14)  # in float64 we have no own rounding to go by
    return unit * (OUTPUT_ROUNDOFFS * outer + INNER_ROUNDOFFS * inner) + OWN_ROUNDING * own
