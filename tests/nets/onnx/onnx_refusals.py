"""Reading ONNX models that should be refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from patience import memory, within

from tightrope.errors import UserError
from tightrope.nets.onnx.importing import read_onnx

ints = np.array
FLOATS = np.ones(1, np.float32)


def refused(path: Path, *fragments: str, seconds: int = 30) -> None:
    with within(seconds), memory(400), pytest.raises(UserError) as caught:
        read_onnx(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 1000
    for fragment in fragments:
        assert fragment in message


def changed(path: Path, change) -> Path:
    model = onnx.load(path)
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


LIMIT = "exceeds the limit of 134217728 elements"
