"""Networks to ONNX, for other verifiers and runtimes.

A file is written only after onnxruntime has computed from its bytes what PyTorch computes.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightrope.errors import UserError
from tightrope.files import write_bytes
from tightrope.nets.distance import Distance
from tightrope.nets.messages import one_line
from tightrope.nets.registry import check_shape

# Largest difference of a logit that rounding explains, as a share of the largest logit (at
# least 1): onnxruntime merges layers and adds in another order than PyTorch.
TOLERANCE = 1e-4
CHECKED_BATCH_SIZES = (1, 2, 5)


def export_onnx(module: nn.Module, input_shape: Sequence[int], path: str | Path) -> float:
    """Write `module` in evaluation mode as one self-contained ONNX file with a free batch size.

    Returns the largest difference between onnxruntime's and PyTorch's outputs on random inputs;
    one above `TOLERANCE` is an error, and then nothing is written. `module` is not changed.
    """
    _require_packages()
    path, shape = Path(path), check_shape(input_shape)
    network = copy.deepcopy(module).cpu().eval().requires_grad_(False)
    for part in network.modules():
        if isinstance(part, Distance):
            part.composed = True
    batches = _random_batches(network, shape)
    outputs = [_run(network, batch) for batch in batches]
    content = _to_onnx(network, batches[1])
    difference = _check(content, batches, outputs)
    try:
        write_bytes(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path}: {one_line(error)}") from error
    return difference


def _require_packages() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(
                f"ONNX export needs the package {name}: pip install 'tightrope[onnx]'"
            ) from None


def _random_batches(network: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """Return inputs in [0, 1] from a generator of our own: the caller's stays as it is."""
    parameter = next(network.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    generator = torch.Generator().manual_seed(0)
    return [
        torch.rand(size, *shape, generator=generator, dtype=dtype) for size in CHECKED_BATCH_SIZES
    ]


def _run(network: nn.Module, batch: Tensor) -> Tensor:
    """Run the PyTorch network, which has to take the batch and give one tensor."""
    shape = tuple(batch.shape[1:])
    try:
        output = network(batch)
    except Exception as error:  # whatever a user's own module raises
        raise UserError(
            f"the network does not take inputs of shape {shape}: {one_line(error)}"
        ) from error
    if not isinstance(output, Tensor):
        raise UserError(f"the network must give one tensor, got {type(output).__name__}")
    return output


def _to_onnx(network: nn.Module, example: Tensor) -> bytes:
    """Return the network as a serialised ONNX model."""
    try:
        with _quiet():
            program = torch.onnx.export(
                network,
                (example,),
                dynamo=True,
                input_names=["input"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
            assert program is not None  # only the old exporter returns None
            model = program.model_proto
            _remove_metadata(model)
            return model.SerializeToString()
    except Exception as error:  # the exporter raises many kinds, and so does protobuf above 2 GB
        raise UserError(f"cannot export this network to ONNX: {_root(error)}") from error


def _remove_metadata(model: Any) -> None:
    """Drop the exporter's notes: they hold stack traces with paths of this machine."""
    graph = model.graph
    parts = (graph.node, graph.input, graph.output, graph.value_info, graph.initializer)
    for item in (model, graph, *(item for part in parts for item in part)):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")


def _check(content: bytes, batches: list[Tensor], outputs: list[Tensor]) -> float:
    """Return the largest difference from PyTorch's outputs, if rounding explains it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
        results = [session.run(None, {"input": batch.numpy()})[0] for batch in batches]
    except Exception as error:  # onnxruntime's exceptions share no public base class
        raise UserError(f"onnxruntime cannot run the export: {one_line(error)}") from error
    theirs, ours = torch.cat([torch.from_numpy(result) for result in results]), torch.cat(outputs)
    if theirs.shape != ours.shape:
        raise UserError("onnxruntime gives outputs of another shape than PyTorch")
    difference = (theirs - ours).abs().max().item()
    allowed = TOLERANCE * max(1.0, ours.abs().max().item())
    if not difference <= allowed:  # written so that NaN fails too
        raise UserError(
            f"the ONNX export differs from the PyTorch network by {difference:.3g}, more than "
            f"rounding explains ({allowed:.3g}); nothing was written"
        )
    return difference


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress lines, log messages and warnings from the user."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _root(error: BaseException) -> str:
    """Return the innermost cause; what the exporter wraps around it is several lines of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)
