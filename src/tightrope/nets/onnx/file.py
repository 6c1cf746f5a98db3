"""From a file to an ONNX model in memory, within the limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from tightrope.deadline import Deadline
from tightrope.errors import UserError, shorten
from tightrope.limits import ONNX_BYTES
from tightrope.nets.messages import one_line
from tightrope.nets.onnx.wire import DamagedError, check_memory
from tightrope.reading import open_regular, read_bytes


def load(path: Path, deadline: Deadline) -> Any:
    """Return the model in a file, plain or compressed (`.gz`), with data that lie beside it."""
    import onnx

    try:
        content = read_bytes(path, ONNX_BYTES, deadline)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        check_memory(content, onnx.ModelProto, ONNX_BYTES, str(path))
        model = onnx.load_model_from_string(content)
    except DamagedError as error:
        raise UserError(f"{path} is not an ONNX file: {error}") from None
    except UserError:
        raise
    except Exception as error:  # protobuf's exceptions are not public
        raise UserError(f"{path} is not an ONNX file: {one_line(error)}") from None
    if not model.graph.node or not model.graph.output:
        raise UserError(f"{path} is not an ONNX file: it holds no network")
    total = len(content)
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            deadline.check()
            total += _load_data(tensor, path, ONNX_BYTES.value - total)
    return model


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t


def _load_data(tensor: Any, path: Path, most: int) -> int:
    """Put the data of a tensor into it that lie in another file, in or below the model's folder."""
    from onnx import TensorProto

    settings = {entry.key: entry.value for entry in tensor.external_data}
    location = settings.get("location", "")
    beside = path.parent / location
    parts = PurePosixPath(location).parts
    folder = path.parent.resolve()
    try:
        inside = bool(parts) and ".." not in parts and beside.resolve().is_relative_to(folder)
        offset, length = int(settings.get("offset", 0)), int(settings.get("length", -1))
    except (ValueError, OSError):
        inside, offset, length = False, 0, -1
    if not inside or offset < 0 or "\\" in location:
        raise UserError(f"{path}: data must lie beside it, not in {shorten(location)}")
    try:
        with open_regular(beside) as file:
            size = max(0, os.fstat(file.fileno()).st_size - offset)
            size = size if length < 0 else min(length, size)
            if size > most:
                raise ONNX_BYTES.exceeded(f"{path}, with the data beside it,")
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise UserError(f"cannot read {beside}: {error.strerror or error}") from None
    if len(data) < length:
        raise UserError(f"{beside} is shorter than {path} says")
    tensor.raw_data = data
    tensor.data_location = TensorProto.DEFAULT
    tensor.ClearField("external_data")
    return len(data)
