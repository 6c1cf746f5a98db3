"""Python takes what a shell cannot give: names with NUL bytes, numbers of any length."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import tightrope as tr

NAME = "a\0b"
LONG = 10**5000
LINEAR = torch.nn.Linear(2, 2)

NAMES: dict[str, Callable[[Path], object]] = {
    "train": lambda run: tr.train(out=NAME),
    "train, data": lambda run: tr.train(out=run.parent / "new", data=NAME),
    "train, data_dir": lambda run: tr.train(out=run.parent / "new", data="cifar10", data_dir=NAME),
    "certify": lambda run: tr.certify(NAME),
    "attack": lambda run: tr.attack(run.parent / NAME),
    "estimate": lambda run: tr.estimate(NAME),
    "report": lambda run: tr.report(NAME),
    "report, out": lambda run: tr.report(run, out=run.parent / NAME),
    "report, folder of out": lambda run: tr.report(run, out=run.parent / NAME / "page.html"),
    "export": lambda run: tr.export(NAME, onnx=run.parent / "net.onnx"),
    "export, onnx": lambda run: tr.export(run, onnx=run.parent / NAME),
    "verify_file": lambda run: tr.verify_file(NAME, "spec.vnnlib"),
    "compare": lambda run: tr.compare(["ibp"], out=NAME),
    "reproduce": lambda run: tr.reproduce("cost", out=run.parent / NAME),
}
NUMBERS: dict[str, Callable[[Path], object]] = {
    "seed": lambda run: tr.certify(run, seed=LONG, samples=2),
    "samples": lambda run: tr.certify(run, samples=LONG),
    "start": lambda run: tr.certify(run, start=-LONG),
    "jobs": lambda run: tr.certify(run, jobs=-LONG),
    "steps": lambda run: tr.attack(run, steps=LONG, samples=2),
    "restarts": lambda run: tr.attack(run, restarts=LONG, samples=2),
    "classifier_relus": lambda run: tr.estimate(run, classifier_relus=LONG, samples=2),
    "eps": lambda run: tr.certify(run, eps=LONG),
    "eps, digits": lambda run: tr.certify(run, eps="0." + "1" * 5000),
    "eps, fraction": lambda run: tr.bounds(LINEAR, torch.rand(1, 2), eps=Fraction(1, LONG)),
    "label": lambda run: tr.verify(LINEAR, torch.rand(2), LONG, eps=0.1),
    "seed of verify": lambda run: tr.verify(LINEAR, torch.rand(2), 0, eps=0.1, seed=2**64),
    "seeds": lambda run: tr.compare(["ibp"], out=run.parent / "new", seeds=LONG),
    "samples of reproduce": lambda run: tr.reproduce("cost", out=run, samples=-LONG),
    "pattern": lambda run: tr.reproduce("precision", out=run, only="x" * 10**6),
    "width": lambda run: tr.train(out=run.parent / "new", width=LONG),
    "width, digits": lambda run: tr.train(out=run.parent / "new", width="9" * 5000),
    "weights": lambda run: tr.train(out=run.parent / "new", net="mlp", width=65536, depth=9),
    "depth": lambda run: tr.train(out=run.parent / "new", net="mlp", depth=10**6),
    "batch_norm": lambda run: tr.train(out=run.parent / "new", batch_norm=LONG),
    "validation": lambda run: tr.train(out=run.parent / "new", validation="9" * 5000),
    "decay_epochs": lambda run: tr.train(out=run.parent / "new", decay_epochs=[LONG]),
}


@pytest.mark.parametrize("function", NAMES)
def test_names_with_a_nul_byte(run: Path, function: str) -> None:
    refused(run, NAMES[function])


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_thousands_of_digits(run: Path, name: str) -> None:
    refused(run, NUMBERS[name])


def refused(run: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(tr.UserError) as caught:
        call(run)
    message = str(caught.value)
    assert "\n" not in message and "\0" not in message and len(message) < 1000
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]
