"""Averaged weights: the mean of every tenth step, put in place at the end, through a resume."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tightrope as tr
from tightrope.errors import UserError
from tightrope.training.averaging import INTERVAL, WeightAverage
from tightrope.training.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "net": "mlp",
    "width": 8,
    "depth": 1,
    "batch_norm": True,
    "eps": 0.01,
    "epochs": 3,
    "train_samples": 1024,
    "validation": 64,
    "batch_size": 32,
    "annealing_epochs": 1,
    "select": "last",
}


def test_the_mean_of_every_tenth_step_from_the_epoch_on():
    module = nn.Linear(2, 1)
    average, seen = WeightAverage(module, 1), []
    for epoch in range(3):
        for iteration in range(25):
            with torch.no_grad():
                module.weight.add_(torch.randn(1, 2))
            average.update(epoch, iteration)
            if epoch >= 1 and iteration % INTERVAL == 0:
                seen.append(module.weight.detach().clone())
    assert average.apply() and average.count == len(seen) == 6
    torch.testing.assert_close(module.weight.detach(), torch.stack(seen).mean(0))


def test_an_exponential_average_of_every_step():
    module, decay = nn.Linear(2, 1), 0.9
    average, expected = WeightAverage(module, 1, decay), None
    for epoch in range(3):
        for iteration in range(7):
            with torch.no_grad():
                module.weight.add_(torch.randn(1, 2))
            average.update(epoch, iteration)
            if epoch >= 1:
                now = module.weight.detach().clone()
                expected = now if expected is None else decay * expected + (1 - decay) * now
    assert average.apply() and average.count == 14
    torch.testing.assert_close(module.weight.detach(), expected)


def test_without_a_start_nothing_happens():
    module = nn.Linear(2, 1)
    before = module.weight.detach().clone()
    average = WeightAverage(module, None)
    average.update(100, 0)
    assert not average.apply() and torch.equal(module.weight, before)


@pytest.mark.parametrize("decay", [None, 0.95])
def test_the_run_ends_with_the_average_also_after_a_resume(tmp_path: Path, decay):
    averaged = {"average_from": 1, "average_decay": decay}
    whole = tr.train(out=tmp_path / "whole", **averaged, **SMALL)
    plain = tr.train(out=tmp_path / "plain", **SMALL)
    assert whole.weights.read_bytes() != plain.weights.read_bytes()

    class Stop(Exception):
        pass

    class Stopper:
        def step(self, epoch, iteration, result, radius):
            if epoch == 2 and iteration == 5:
                raise Stop

        def epoch(self, record):
            pass

    with pytest.raises(Stop):
        tr.train(out=tmp_path / "cut", progress=Stopper(), **averaged, **SMALL)
    cut = tr.train(out=tmp_path / "cut", resume=True)
    assert cut.weights.read_bytes() == whole.weights.read_bytes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"average_from": 5, "select": "best"}, "set select = last"),
        ({"average_from": 70, "select": "last"}, "average_from must be below epochs"),
    ],
)
def test_settings_that_make_no_sense(given, message):
    with pytest.raises(UserError, match=message):
        Settings.parse(given).resolve(normalize=False, network={})
