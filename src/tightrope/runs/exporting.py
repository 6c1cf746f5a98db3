"""`tightrope.export`: a trained network as ONNX."""

from __future__ import annotations

from pathlib import Path

from tightrope import nets
from tightrope.errors import UserError
from tightrope.runs import Run, open_run


def export(run: Run | str | Path, onnx: str | Path) -> float:
    """Write the network of a run as ONNX, checked by onnxruntime.

    Returns the largest difference between the two on random inputs.
    """
    if Path(onnx).is_dir() or not Path(onnx).name:
        raise UserError(f"--onnx must be a file to write, got {str(onnx)!r}")
    module, architecture = open_run(run).network()
    return nets.export_onnx(module, architecture.input_shape, Path(onnx))
