"""Predicted hours: counts are right and linear, and the record is what the script makes of them."""

import importlib
import json
from pathlib import Path

import gpu_steps
import pytest
import torch

import tightrope as tr
from tightrope.graph import trace
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "results" / "costs"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("counting"), importlib.import_module("costs")


def test_a_product_is_counted(benchmarks):
    counting, _ = benchmarks
    a, b = torch.rand(3, 5), torch.rand(5, 7)
    bill = counting.counted(lambda: (a @ b).view(7, 3).t())
    assert bill.total == (1, 2 * 3 * 5 * 7, 4 * (15 + 35 + 21))


def step_bill(counting, samples, steps):
    net = gpu_steps.network()
    graph = trace(net, gpu_steps.SHAPE)
    x, y = gpu_steps.batch(samples)
    step = Step(graph, tr.TAPS(classifier_relus=1, steps=steps), 0.1, l1=1e-6)
    torch.manual_seed(0)
    with counting.as_on_a_gpu():
        return counting.counted(lambda: step(x, y, 0.1, annealing=False))


def test_a_step_is_linear_in_the_batch_and_in_the_steps(benchmarks):
    counting, _ = benchmarks
    few, many, long = (step_bill(counting, *case) for case in ((2, 1), (3, 1), (2, 2)))
    both = step_bill(counting, 3, 2)

    def mixed(u, w):
        weights = ((1 - u) * (1 - w), few), (u * (1 - w), many), ((1 - u) * w, long), (u * w, both)
        return counting.combined(*weights).total

    found = step_bill(counting, 12, 4).total
    assert mixed(10, 3) == pytest.approx(found, rel=1e-6)


def test_a_card_that_is_twice_as_fast_takes_half_as_long(benchmarks):
    _, costs = benchmarks
    lines = [["a", "mm", 1, 10**12, 10**6], ["b", "add", 1, 0, 10**10], ["c", "add", 5, 0, 100]]
    slow = costs.timed(lines, costs.Card("slow", 1e12, 1e11))
    fast = costs.timed(lines, costs.Card("fast", 2e12, 2e11))
    assert slow.computing == pytest.approx(1 / costs.COMPUTE)
    assert slow.moving == pytest.approx(0.1 / costs.MEMORY)
    assert fast.computing == pytest.approx(slow.computing / 2)
    assert fast.moving == pytest.approx(slow.moving / 2)
    assert fast.starting == slow.starting == pytest.approx(5 * costs.KERNEL)
    assert costs.timed(lines, costs.A100, share=0.5).computing * 2 == pytest.approx(
        costs.timed(lines, costs.A100).computing
    )


def test_the_record_is_what_the_counts_say(benchmarks):
    _, costs = benchmarks
    counts = json.loads((RECORD / "counts.json").read_text())
    record = json.loads((RECORD / "costs.json").read_text())
    for (setting, method), published in costs.PAPER.items():
        row = record[setting.replace("0.", "0")][method]
        name = f"{setting}-{method}"
        assert row["training"] == costs.training(name, counts[name], published)
        assert row["certification"] == costs.certification(counts[name], published)
        assert row["training"]["own"] < row["training"]["paper"]  # a lower limit
