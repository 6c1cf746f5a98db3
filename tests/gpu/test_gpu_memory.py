"""A card that is too small: what is said, what is kept, and that following the advice helps."""

import json

import gpu_steps
import pytest
import torch
from pretend_cuda import pretend_cuda, real
from torch import nn

import tightrope as tr
from tightrope import nets
from tightrope.budget import PROVING_ADVICE, explaining_memory, is_out_of_memory
from tightrope.certification import session
from tightrope.cli import main
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"net": "mlp", "width": 8, "depth": 1, "batch_norm": False, "normalize": False}
SMALL = {**TINY, "train_samples": 200, "validation": 50, "batch_size": 50, "epochs": 3}
ASKED = {"eps": 0.1, "stages": ("ibp", "attack"), "steps": 5, "restarts": 2}


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and "too little memory" in text
    assert "Memory Management" not in text  # PyTorch's own advice is about PyTorch
    return text


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GB.\nMore"), " (CUDA out of memory)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), " (DefaultCPUAllocator"),
        (MemoryError(), ";"),
    ],
)
def test_all_kinds_are_explained(error, said):
    assert is_out_of_memory(error)
    with pytest.raises(tr.UserError) as told, explaining_memory(PROVING_ADVICE):
        raise error
    assert said in one_line(told) and str(told.value).endswith(PROVING_ADVICE)


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="something else"), explaining_memory(PROVING_ADVICE):
        raise RuntimeError("something else")


def test_training_says_what_to_change_and_goes_on(tmp_path, monkeypatch):
    original, calls = Step.__call__, []

    def full(step, *arguments, **options):
        calls.append(1)
        if len(calls) == 5:  # in the second epoch
            raise torch.OutOfMemoryError("CUDA out of memory. See Memory Management")
        return original(step, *arguments, **options)

    monkeypatch.setattr(Step, "__call__", full)
    options = {"method": "ibp", "eps": 0.01, "device": "cpu", **SMALL}
    with pytest.raises(tr.UserError) as error:
        tr.train(out=tmp_path / "run", **options)
    for fragment in ("accumulate", "batch_size", "--resume", "--device"):
        assert fragment in one_line(error)
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 1
    tr.train(out=tmp_path / "run", resume=True, **options)
    tr.train(out=tmp_path / "whole", **options)
    found, whole = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("run", "whole"))
    assert found == whole


def test_a_larger_accumulate_takes_less(monkeypatch):
    gpu_steps.as_on_gpu(monkeypatch)
    batch, objective = gpu_steps.batch, tr.SABR(steps=2)
    monkeypatch.setattr(gpu_steps, "batch", lambda: batch(140))
    with pretend_cuda() as counts:
        gpu_steps.step(objective, "cuda")  # records the network
        counts.clear()
        gpu_steps.step(objective, "cuda")
        needed = counts.most
    with pretend_cuda(largest=0.6 * needed):
        with pytest.raises(torch.OutOfMemoryError):
            gpu_steps.step(objective, "cuda")
        gpu_steps.step(objective, "cuda", accumulate=7)


def test_certification_says_what_to_change_and_goes_on(certifiable, monkeypatch):
    monkeypatch.setattr(session, "BATCH", 2)
    records = certifiable.folder / "certification.jsonl"
    original, calls = session.Decider.__call__, []

    def full(decider, item, send):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. See Memory Management")
        return original(decider, item, send)

    monkeypatch.setattr(session.Decider, "__call__", full)
    with pytest.raises(tr.UserError) as error:
        tr.certify(certifiable, device="cpu", **ASKED)
    for fragment in ("TIGHTROPE_LIMIT_MEMORY_BYTES", "fewer jobs", "--device", "is saved"):
        assert fragment in one_line(error)
    assert len(records.read_text().splitlines()) == 4
    assert tr.certify(certifiable, device="cpu", **ASKED).complete
    indices = [json.loads(line)["index"] for line in records.read_text().splitlines()]
    assert sorted(indices) == list(range(10))


@pytest.mark.parametrize("ask", [tr.attack, tr.estimate, tr.smooth], ids=lambda f: f.__name__)
def test_whatever_needs_a_card_says_so(ask, certifiable):
    with pretend_cuda(largest=16), pytest.raises(tr.UserError) as error:
        ask(certifiable, device="cuda", samples=4)
    assert "fewer jobs" in one_line(error)


def test_the_command_prints_one_line(certifiable, capsys):
    with pretend_cuda(largest=16), pytest.raises(SystemExit) as end:
        main(["certify", str(certifiable.folder), "--eps", "0.1", "--device", "cuda"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tightrope: the device has too little memory (CUDA out of memory)")


def test_a_property_is_unknown(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    nets.export_onnx(module, (2,), tmp_path / "net.onnx")
    lines = [f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1")]
    lines += [f"(assert (>= X_{i} 0.0))\n(assert (<= X_{i} 0.3))" for i in range(2)]
    (tmp_path / "p.vnnlib").write_text("\n".join([*lines, "(assert (<= Y_0 -10))"]))
    files = (tmp_path / "net.onnx", tmp_path / "p.vnnlib")
    assert tr.verify_file(*files).verdict == "verified"
    with pretend_cuda(largest=8):
        answer = tr.verify_file(*files, device="cuda")
    assert answer.verdict == "unknown" and answer.cause == "memory"
    assert "too little memory" in answer.reason and "--device" in answer.reason


CASES = [(method, images) for method in ("crown-ibp", "crown", "alpha") for images in (1, 3)]


@pytest.mark.parametrize(("method", "images"), CASES)
def test_what_is_free_on_the_card_decides_how_much_is_computed_at_a_time(
    method, images, monkeypatch
):
    torch.manual_seed(3)
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    net, x = nn.Sequential(*layers, nn.Linear(576, 6)), torch.rand(images, 1, 16, 16)
    found = []
    with pretend_cuda() as counts:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
        for free in (8 << 30, 80_000):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d=None, free=free: (free, 1e10))
            counts.clear()
            box = tr.bounds(net.to("cuda"), x.to("cuda"), eps=0.02, method=method)
            found.append((counts.ops.total(), real(box.lower)))
    (at_once, plenty), (in_parts, little) = found
    if (method, images) == ("alpha", 1):  # a network that cannot be reduced there keeps its slopes
        assert in_parts < at_once and (little <= plenty + 1e-3).all()
    else:
        assert in_parts > 1.5 * at_once
        near = 1e-5 if method == "alpha" else 1e-12  # slopes are searched for in float32
        assert torch.allclose(plenty, little, rtol=near, atol=near)
