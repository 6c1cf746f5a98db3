"""Bounds, verdicts and estimates on a pretended GPU are those of the CPU."""

import dataclasses
import json

import gpu_steps
import pytest
import torch
from pretend_cuda import CUDA, pretend_cuda, real
from torch import nn

import tightrope as tr
from tightrope import nets
from tightrope.certification.bounding import METHODS
from tightrope.certification.search import shared
from tightrope.certification.stages import STAGES
from tightrope.runs import Run

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 0.02


@pytest.fixture
def alike(monkeypatch):
    """The CPU takes the ways of a GPU."""
    gpu_steps.as_on_gpu(monkeypatch)


def small(device="cpu"):
    torch.manual_seed(3)
    layers = (nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(18, 6), nn.ReLU(), nn.Linear(6, 3)).to(device).eval()


def inputs(count=3):
    return torch.rand(count, *gpu_steps.SHAPE, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("method", METHODS)
def test_bounds_are_the_same(method, alike):
    expected = tr.bounds(small(), inputs(), eps=EPS, method=method)
    with pretend_cuda():
        found = tr.bounds(small("cuda"), inputs().to("cuda"), eps=EPS, method=method)
        assert found.lower.device == found.upper.device == CUDA
    assert torch.equal(real(found.lower), expected.lower)
    assert torch.equal(real(found.upper), expected.upper)


def test_slopes_of_many_images_are_optimised_together(alike):
    net, x = small(), inputs(6)
    alone = [tr.bounds(net, one[None], eps=0.2, method="alpha") for one in x]
    with pretend_cuda() as counts:
        gpu = small("cuda")
        tr.bounds(gpu, x[:1].to("cuda"), eps=0.2, method="alpha")
        first = counts.ops.total()
        found = real(tr.bounds(gpu, x.to("cuda"), eps=0.2, method="alpha").corners)
        assert counts.ops.total() - first < 2 * first
    crown = tr.bounds(net, x, eps=0.2)
    gained = [[c.upper - c.lower for c in alone], list(crown.upper - crown.lower)]
    width, loose = (float(torch.cat([w.flatten() for w in each]).sum()) for each in gained)
    # Those of one image alone come from a reduced network: another order of the same sums.
    assert float((found[1] - found[0]).sum()) <= width + 0.05 * (loose - width)
    outputs = net(x).double()
    assert (found[0] <= outputs).all() and (outputs <= found[1]).all()


def timeless(answer):
    """Return an answer without what a clock says."""
    values = {f.name: real(getattr(answer, f.name)) for f in dataclasses.fields(answer)}
    point = values.pop("counterexample", None)
    return {k: v for k, v in values.items() if "seconds" not in k}, point


@pytest.mark.parametrize("eps", [0.01, 0.08, 0.3])
@pytest.mark.parametrize("split", ["relu", "input"])
def test_one_sample_has_the_same_answer(eps, split, alike, monkeypatch):
    monkeypatch.setattr("tightrope.certification.stages.PROBING", 600.0)  # no clock decides
    x = inputs(1)[0]
    label = int(small()(x[None]).argmax())
    options = {"eps": eps, "split": split, "timeout": 6000}
    expected = timeless(tr.verify(small(), x, label, **options))
    with pretend_cuda():
        answer = tr.verify(small("cuda"), x.to("cuda"), label, **options)
        found = timeless(answer)
    assert found[0] == expected[0]
    assert (found[1] is None) == (expected[1] is None)
    assert found[1] is None or torch.equal(found[1], expected[1])


def bent(activation):
    torch.manual_seed(4)
    layers = (nn.Flatten(), nn.Linear(64, 8), activation(), nn.Linear(8, 6), activation())
    return nn.Sequential(*layers, nn.Linear(6, 4)).eval()


OTHERS = {
    "smooth": lambda: bent(nn.Tanh),
    "leaky": lambda: bent(nn.LeakyReLU),
    "distances": gpu_steps.distance_network,
}


@pytest.mark.parametrize("eps", [0.005, 0.05])
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_have_the_same_answer(name, eps, alike):
    x = inputs(1)[0]
    net = OTHERS[name]().eval()
    label, options = int(net(x[None]).argmax()), {"eps": eps, "timeout": 6000}
    expected = timeless(tr.verify(net, x, label, **options))
    with pretend_cuda() as counts:
        found = timeless(
            tr.verify(OTHERS[name]().eval().to("cuda"), x.to("cuda"), label, **options)
        )
    assert counts.ops.total() > 10
    assert found[0] == expected[0]
    assert (found[1] is None) == (expected[1] is None)
    assert found[1] is None or torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("norm", "eps"), [("l2", 0.1), ("l1", 0.3), ("l2", 2.0)])
def test_balls_have_the_same_answer(norm, eps, alike):
    x = inputs(1)[0]
    label = int(small()(x[None]).argmax())
    options = {"eps": eps, "norm": norm, "timeout": 6000}
    expected = timeless(tr.verify(small(), x, label, **options))
    with pretend_cuda():
        found = timeless(tr.verify(small("cuda"), x.to("cuda"), label, **options))
    assert found[0] == expected[0]
    assert (found[1] is None) == (expected[1] is None)
    assert found[1] is None or torch.equal(found[1], expected[1])


def test_a_property_file_has_the_same_answer(tmp_path, alike):
    network, text = tmp_path / "net.onnx", tmp_path / "property.vnnlib"
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    nets.export_onnx(module, (2,), network)
    lines = [f"(declare-const {name} Real)" for name in ("X_0", "X_1", "Y_0", "Y_1")]
    lines += [f"(assert (>= X_{i} 0.0))\n(assert (<= X_{i} 0.3))" for i in range(2)]
    for threshold in (-10, 0.0, 10):
        text.write_text("\n".join([*lines, f"(assert (<= Y_0 {threshold}))"]))
        expected = tr.verify_file(network, text)
        with pretend_cuda():
            found = tr.verify_file(network, text, device="cuda")
        assert found.verdict == expected.verdict and found.stage == expected.stage


# --- runs ---------------------------------------------------------------------------------------


def records(run):
    """Return the journal without what a clock says."""
    lines = (run.folder / "certification.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines if '"index"' in line]
    return [{k: v for k, v in r.items() if k not in ("seconds", "times")} for r in kept]


@pytest.mark.parametrize("stages", [tuple(STAGES), ("ibp", "bab"), ("crown", "milp")])
def test_a_certification_is_the_same(stages, certifiable, tmp_path, alike):
    import shutil

    copy = Run(tmp_path / "copy")
    shutil.copytree(certifiable.folder, copy.folder)
    options = {"eps": 0.1, "stages": stages, "timeout": 600, "steps": 10, "restarts": 2}
    expected = tr.certify(certifiable, device="cpu", **options)
    with pretend_cuda() as counts:
        found = tr.certify(copy, device="cuda", **options)
    assert counts.ops.total() > 100
    assert records(copy) == records(certifiable)
    assert found.certified == expected.certified and found.adversarial == expected.adversarial
    assert len({r["verdict"] for r in records(copy)}) > 1


@pytest.mark.parametrize("largest", [1 << 14, 1])
def test_searches_that_share_batches_are_the_same(largest, tmp_path, alike, monkeypatch):
    """On a GPU they do whatever the size of the network."""
    monkeypatch.setattr(shared, "NEURONS", largest)
    from handmade import write_run

    torch.manual_seed(2)
    layers = (nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
    module = nn.Sequential(*layers, nn.Linear(12, 3)).eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False).mul_(2.0)
    x = torch.rand(16, 24, generator=torch.Generator().manual_seed(1))
    runs = [
        write_run(tmp_path / name, module, x.numpy(), module(x).argmax(1).tolist())
        for name in ("cpu", "cuda")
    ]
    options = {"eps": 0.06, "stages": ("ibp", "crown", "attack", "bab"), "timeout": 600}
    options |= {"steps": 10, "restarts": 3}
    tr.certify(runs[0], device="cpu", **options)
    with pretend_cuda():
        tr.certify(runs[1], device="cuda", **options)
    found, expected = map(records, runs)
    assert found == expected
    assert any(r["stage"] == "bab" for r in expected)
    assert {r["verdict"] for r in expected} == {"verified", "falsified"}


EVALUATED = {
    "attack": (tr.attack, {"eps": 0.1, "steps": 8, "restarts": 2}),
    "suite": (tr.attack, {"eps": 0.1, "suite": "autoattack"}),
    "ball": (tr.attack, {"eps": 0.3, "norm": "l2", "steps": 8, "restarts": 2}),
    "estimate": (tr.estimate, {"eps": 0.1, "steps": 8, "restarts": 2}),
    "smooth": (tr.smooth, {"sigma": 0.2, "draws": 200, "selection": 20}),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_what_evaluates_a_run_says_the_same(name, certifiable, alike):
    evaluate, options = EVALUATED[name]
    expected = dataclasses.asdict(evaluate(certifiable, device="cpu", **options))
    with pretend_cuda() as counts:
        found = dataclasses.asdict(evaluate(certifiable, device="cuda", **options))
    assert counts.ops.total() > 10
    assert found.pop("seconds") and expected.pop("seconds")
    assert found == expected
