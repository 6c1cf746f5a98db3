"""Whole runs on the pretended GPU: the files are those of the CPU, whichever device began them."""

import gpu_steps
import pytest
import torch
from pretend_cuda import pretend_cuda

import tightrope as tr

pytestmark = pytest.mark.usefixtures("one_thread")

NET = {"net": "mlp", "width": 8, "depth": 2, "batch_norm": True, "normalize": True}
SMALL = {
    **NET,
    **{"method": "taps", "taps": {"steps": 3}, "eps": 0.02, "annealing_epochs": 1, "epochs": 3},
    **{"train_samples": 150, "validation": 50, "batch_size": 50, "select": "best"},
}


class StopError(Exception):
    """The end of a training in the middle of it."""


class Stopper:
    """Stops in the second epoch."""

    def step(self, epoch, iteration, result, radius):
        if (epoch, iteration) == (1, 1):
            raise StopError

    def epoch(self, record):
        pass


def files(folder):
    """Return what was found, without what a clock and a device say."""
    lines = (folder / "history.jsonl").read_text().splitlines()
    return (folder / "model.safetensors").read_bytes(), len(lines)


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_another_device(first, then, tmp_path, monkeypatch):
    gpu_steps.as_on_gpu(monkeypatch)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tr.train(out=whole, device="cpu", **SMALL)
    with pretend_cuda() as counts:
        with pytest.raises(StopError):
            tr.train(out=parts, device=first, progress=Stopper(), **SMALL)
        begun = counts.ops.total()
        tr.train(out=parts, device=then, resume=True)
        ops = counts.ops.total()
    assert (begun > 100) == (first == "cuda") and (ops - begun > 100) == (then == "cuda")
    assert files(parts) == files(whole)
    checkpoint = torch.load(
        parts / "checkpoint.pt", weights_only=True
    )  # what is stored is on no GPU
    assert {t.device.type for t in checkpoint["model"].values()} == {"cpu"}
