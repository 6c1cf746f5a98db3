"""`tr.train` with a method object, and networks that need care."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightrope as tr
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.estimating import trained_split
from tightrope.training.settings import Settings

SMALL: dict[str, Any] = {"train_samples": 64, "validation": 32, "batch_size": 16, "epochs": 2}


def test_an_object_and_options_of_its_own_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"taps.weight is given twice"):
        tr.train(method=tr.TAPS(weight=5.0), taps={"weight": 2.0}, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [5, tr.TAPS, object(), [tr.TAPS()]])
def test_what_is_no_method(tmp_path: Path, method: Any) -> None:
    with pytest.raises(UserError, match=r"a name or an objective such as tr\.TAPS"):
        tr.train(method=method, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["l1", "clip", "learning_rate", "taps.weight"])
def test_numbers_that_no_float_holds(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} must be a number"):
        Settings.parse({"method": "taps", name: 10**400})


@pytest.mark.parametrize("channels", [2, 4, 8])
def test_strided_convolutions_of_single_pixels(channels: int) -> None:
    """Values and gradients are PyTorch's own; with channels last its backward pass may crash."""
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, 2 * channels, 1, stride=(2, 3), dtype=torch.float64)
    x = torch.randn(3, channels, 7, 8, dtype=torch.float64, requires_grad=True)
    ours = trace(layer, (channels, 7, 8))(x)
    theirs = F.conv2d(x, layer.weight, layer.bias, (2, 3))
    torch.testing.assert_close(ours, theirs)
    seen = (x, layer.weight, layer.bias)
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), seen),
        torch.autograd.grad(theirs.square().sum(), seen),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_narrow_residual_networks_train_and_are_estimated(tmp_path: Path) -> None:
    """Their classifier cannot have one ReLU: the smallest split is taken."""
    run = tr.train(net="resnet", width=4, blocks=1, method="ibp", out=tmp_path / "run", **SMALL)
    module, architecture = run.network()
    graph = trace(module, architecture.input_shape)
    assert 1 not in graph.cuts() and trained_split(run, graph) == 2
    other = tr.train(method=tr.TAPS(0), net="mlp", out=tmp_path / "other", **SMALL)
    module, architecture = other.network()
    assert trained_split(other, trace(module, architecture.input_shape)) == 1
    estimated = tr.estimate(run, samples=20)
    assert estimated.settings["classifier_relus"] == 2
    assert estimated.ibp <= estimated.taps <= estimated.natural
