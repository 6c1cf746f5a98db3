"""What is of another type than asked for gets one line that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tightrope as tr
from tightrope.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

MODULE = nn.Sequential(nn.Linear(4, 3))
X, BATCH, LABELS = torch.full((4,), 0.5), torch.full((6, 4), 0.5), torch.zeros(6, dtype=torch.int64)
SAMPLES = {"data": (BATCH, LABELS), "eps": 0.1}

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "time as text": (lambda: tr.verify(MODULE, X, 0, eps=0.1, timeout="5"), "timeout must be a"),
    "no time": (lambda: tr.largest_radius(MODULE, X, 0, timeout=None), "timeout must be a"),
    "times": (lambda: tr.certify(MODULE, **SAMPLES, timeout=[1]), "timeout must be a"),
    "sparse": (lambda: tr.verify(MODULE, X.to_sparse(), 0, eps=0.1), "to_dense"),
    "samples": (lambda: tr.certify(MODULE, **SAMPLES, samples="a"), "samples must be a whole"),
    "half a sample": (
        lambda: tr.certify(MODULE, **SAMPLES, samples=2.5),
        "samples must be a whole",
    ),
    "start": (lambda: tr.certify(MODULE, **SAMPLES, start=0.5), "start must be a whole number"),
    "folder": (lambda: tr.certify(MODULE, **SAMPLES, out=3), "out must be the path"),
    "layer": (lambda: tr.bounds(MODULE, BATCH, eps=0.1, node=3), "node must be the name"),
    "size": (lambda: tr.trace(MODULE, 4), "input_shape must be the sizes"),
    "text for sizes": (lambda: tr.trace(MODULE, "4"), "input_shape must be the sizes"),
    "negative size": (lambda: tr.trace(MODULE, (-4,)), "input_shape must be the sizes"),
    "size that is not whole": (lambda: tr.trace(MODULE, (4.0,)), "input_shape must be the sizes"),
    "nothing": (lambda: tr.trace(None, (4,)), "must be an nn.Module, got NoneType"),
    "class": (lambda: tr.trace(nn.ReLU, (4,)), "must be an nn.Module, got ReLU"),
    "weights": (lambda: tr.trace(MODULE.state_dict(), (4,)), "must be an nn.Module, got Ordered"),
    "box of arrays": (lambda: tr.Box(np.zeros(3), np.ones(3)), "two torch tensors, got ndarray"),
    "box of lists": (lambda: tr.Box([0], [1]), "two torch tensors, got list and list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_types_get_one_line(name: str) -> None:
    call, reason = WRONG[name]
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert reason in message and "\n" not in message
