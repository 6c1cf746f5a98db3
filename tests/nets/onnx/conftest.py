"""What tests of ONNX files have in common."""

from __future__ import annotations

import pytest
from onnx_models import node, save_model

from tightrope.nets.onnx.importing import read_onnx


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Libraries that are loaded with the first file count for no test."""
    path = tmp_path_factory.mktemp("first") / "net.onnx"
    read_onnx(save_model(path, [node("Relu", "x")], (1, 5)))
