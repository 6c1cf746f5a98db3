"""Wrong conversions that the outputs cannot show, because rounding on the way explains more.

Each network adds 1e9 to a value and takes it away again; the check node by node has to notice.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx_models import node, random_array, save_model

from tightrope.errors import UserError
from tightrope.graph import ops
from tightrope.nets.onnx import builder as onnx_builder
from tightrope.nets.onnx import operators as onnx_operators
from tightrope.nets.onnx.importing import read_onnx

HUGE = np.full(4, 1e9, np.float32)
LOST = [node("Add", "x h", "p"), node("Add", "p z", "q"), node("Sub", "q p")]
WEIGHT = random_array(4, 4)


def saved(path, nodes, **constants):
    return save_model(path, [*nodes, *LOST], ("n", 4), {"h": HUGE, **constants})


def assert_found(path, at: str) -> None:
    with pytest.raises(UserError, match=f"the graph differs from onnxruntime at .*{at}"):
        read_onnx(path)


def test_another_slope(tmp_path, monkeypatch):
    path = saved(tmp_path / "net.onnx", [node("LeakyRelu", "x", "z", alpha=0.01)])
    read_onnx(path)
    wrong = lambda build, call: build.apply(call.value(), ops.LeakyRelu(0.02))  # noqa: E731
    monkeypatch.setitem(onnx_operators.CONVERTERS, "LeakyRelu", wrong)
    assert_found(path, "LeakyRelu")


def test_a_wrong_bias(tmp_path, monkeypatch):
    """Which only the graph that is handed out has."""
    nodes = [node("MatMul", "x w", "a"), node("Add", "a b", "z")]
    path = saved(tmp_path / "net.onnx", nodes, w=WEIGHT, b=random_array(4, seed=3))
    read_onnx(path)
    original = onnx_builder._as_bias
    seen = []

    def wrong(shift, layer):
        found = original(shift, layer)
        seen.append(found is not None)
        return None if found is None else found + 1e-3

    monkeypatch.setattr(onnx_builder, "_as_bias", wrong)
    assert_found(path, "Linear")
    assert any(seen)


def test_a_wrong_weight_beside_a_large_bias(tmp_path, monkeypatch):
    """Which only the graph shows that has the bias as a step of its own."""
    nodes = [node("MatMul", "x w", "a"), node("Add", "a h")]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 4), {"w": WEIGHT, "h": HUGE})
    read_onnx(path)
    weight = torch.from_numpy(WEIGHT).T + 1e-3
    wrong = lambda build, call: build.apply(call.value(), ops.Linear(weight, None))  # noqa: E731
    monkeypatch.setitem(onnx_operators.CONVERTERS, "MatMul", wrong)
    assert_found(path, "Linear")


def test_batches_that_mix_samples(tmp_path):
    """By less than the outputs may be off, but by a lot of what they are."""
    mixed = [node("ReduceMean", "x", "m", axes=[0]), node("Sub", "x m", "d")]
    tenth = np.array(0.1, np.float32)
    path = saved(tmp_path / "net.onnx", [*mixed, node("Mul", "d c", "z")], c=tenth)
    assert not read_onnx(path).batched
