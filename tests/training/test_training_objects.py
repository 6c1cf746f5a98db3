"""`tr.train` with a method object, and networks that need care."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightrope as tr
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel
from tightrope.training.estimating import trained_split
from tightrope.training.objectives import METHODS
from tightrope.training.parsing import number, setting
from tightrope.training.settings import Settings, stored_settings


@dataclass(frozen=True)
class Own(tr.IBP):
    """IBP by another name, with an option."""

    name = "own"
    summary = "a method of one's own"
    factor: float = setting(1.0, number(0, strict=True), "factor of the loss")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> tr.Loss:
        loss = super().__call__(model, x, y, radius)
        return replace(loss, value=self.factor * loss.value)


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


def test_an_own_method_is_written_resumed_and_refused(tmp_path: Path) -> None:
    """And the table of methods stays as it is: nothing else knows the method."""
    before, out = dict(METHODS), tmp_path / "run"
    small = {**SMALL, "net": "mlp", "width": 4}
    run = tr.train(method=Own(factor=2.0), out=out, **small)
    assert before == METHODS
    stored = run.values()
    assert stored["method"] == "own" and stored["own.factor"] == 2.0
    # Shi et al.'s initialisation and annealing: the class is asked, not only the table.
    assert stored["initialization"] == "shi"
    assert Settings.parse(stored, Own).objective() == Own(2.0)
    assert tr.certify(run, samples=5).samples == 5 and tr.estimate(run, samples=5).samples == 5
    history = run.history_file.read_text()
    again = tr.train(method=Own(factor=2.0), out=out, resume=True)
    assert again == run and run.history_file.read_text() == history
    with pytest.raises(UserError, match=r"was trained with other settings \(own\)"):
        tr.train(method=Own(factor=3.0), out=out, resume=True)
    for method in (None, "own"):
        with pytest.raises(UserError, match="unknown method 'own'"):
            tr.train(method=method, out=out, resume=True)
    with pytest.raises(
        UserError, match=r"unknown setting 'own\.factr'; did you mean 'own\.factor'"
    ):
        tr.train(method=Own(), own={"factr": 1.0}, out=tmp_path / "other", **small)
    with pytest.raises(UserError, match=r"belongs to method 'taps', but the method is 'own'"):
        tr.train(method=Own(), taps={"weight": 1.0}, out=tmp_path / "other", **small)
    with pytest.raises(UserError, match="unknown method 'own'"):
        stored_settings(run)
    assert before == METHODS and not (tmp_path / "other").exists()


def test_a_run_from_before_an_option_can_be_resumed_by_an_object(tmp_path: Path) -> None:
    run = tr.train(method=tr.SABR(steps=1), net="mlp", width=4, out=tmp_path / "run", **SMALL)
    text = run.config.read_text()
    assert 'start = "ball"\n' in text
    run.config.write_text(text.replace('start = "ball"\n', ""))
    tr.train(method=tr.SABR(steps=1), out=run.folder, resume=True)
    with pytest.raises(UserError, match=r"trained with other settings \(sabr\)"):
        tr.train(method=tr.SABR(steps=1, start="input"), out=run.folder, resume=True)


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
