"""Every stored counterexample is one: inside the exact ball and misclassified when replayed."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import write_run
from torch import nn

import tightrope as tr
from tightrope import nets
from tightrope.data.mnist import load_mnist
from tightrope.runs import Run

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_replays(run: Run, x: torch.Tensor, eps: Fraction) -> int:
    """Check all counterexamples of a run against its test inputs; return how many there are."""
    module, _ = nets.load(run.folder)  # from disk, as anyone would
    records = [json.loads(line) for line in run.journal.read_text().splitlines()]
    stored = [record for record in records if "counterexample" in record]
    for record in stored:
        assert record["verdict"] == "falsified" and record["stage"] in ("quick", "attack", "bab")
        point = np.load(run.folder / record["counterexample"], allow_pickle=False)
        sample = x[record["index"]].numpy()
        assert point.dtype == np.float32 and point.shape == sample.shape
        assert np.isfinite(point).all()
        for value, pixel in zip(point.ravel().tolist(), sample.ravel().tolist(), strict=True):
            assert abs(Fraction(value) - Fraction(pixel)) <= eps and 0 <= value <= 1
        with torch.no_grad():
            answer = int(module(torch.from_numpy(point)[None]).argmax())
        assert answer != record["label"], f"sample {record['index']} is classified correctly"
    names = {record["counterexample"] for record in stored}
    assert {f"counterexamples/{p.name}" for p in run.counterexamples.iterdir()} == names
    return len(stored)


@pytest.mark.parametrize("eps", ["1/10", "8/255", "1e-2"])
def test_on_mnist(tmp_path: Path, eps: str) -> None:
    run = tr.train(
        out=tmp_path / "run",
        net="mlp",
        width=8,
        depth=1,
        batch_norm=False,
        method="standard",
        train_samples=1024,
        validation=64,
        epochs=3,
        batch_size=64,
        learning_rate=0.01,
        eps=eps,
    )
    summary = tr.certify(run, samples=100, steps=20, restarts=1)
    count = assert_replays(run, load_mnist().x_test[:100].float() / 255, Fraction(eps))
    by_stage = {name: counts["falsified"] for name, counts in summary.stages.items()}
    assert count == sum(by_stage[name] for name in ("quick", "attack", "bab"))
    assert count >= {"1/10": 20, "8/255": 10, "1e-2": 3}[eps]
    # Eight neurons are nothing to branch and bound, which needs no attack to find its points.
    assert summary.verified + summary.falsified == 100 and summary.unknown == 0
    alone = tr.certify(run, samples=100, stages=("bab",), force=True)
    assert (alone.verified, alone.falsified) == (summary.verified, summary.falsified)
    assert assert_replays(run, load_mnist().x_test[:100].float() / 255, Fraction(eps)) == count


def twins(inputs: int, hidden: int) -> nn.Sequential:
    """Return a network whose two outputs are equal but for the order of adding.

    Which of them float32 finds larger depends on how many inputs are evaluated at once.
    """
    architecture = nets.Architecture(
        "mlp", (inputs,), 2, None, {"width": 2 * hidden, "depth": 1, "batch_norm": False}
    )
    generator = torch.Generator().manual_seed(1)
    module = architecture.build()
    first, last = module[1], module[3]
    order = torch.randperm(hidden, generator=generator)
    with torch.no_grad():
        rows = torch.randn(hidden, inputs, generator=generator)
        weights = torch.randn(hidden, generator=generator)
        first.weight.copy_(torch.cat((rows, rows[order])))
        first.bias.zero_()
        last.weight.zero_()
        last.bias.zero_()
        last.weight[0, :hidden], last.weight[1, hidden:] = weights, weights[order]
    return module


def test_a_counterexample_holds_on_its_own(tmp_path: Path) -> None:
    """Found in a batch, it must be one for whoever feeds it to the network alone."""
    module = twins(16, 32)
    x = torch.rand(120, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        labels = module(x).argmax(1)
    run = write_run(tmp_path / "run", module, x.numpy(), labels.tolist(), eps="0.01")
    tr.certify(run, stages=("attack",), steps=10, restarts=1)
    assert_replays(run, x, Fraction(1, 100))
