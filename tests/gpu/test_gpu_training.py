"""Training on a pretended GPU: the same numbers as the CPU, and every tensor in its place."""

import sys

import gpu_steps
import pytest
import torch
from pretend_cuda import CUDA, PretendTensor, pretend_cuda, real

from tightrope.data import Batches
from tightrope.data.augmentation import Augmentation
from tightrope.graph import trace
from tightrope.training.batchnorm import precise_batchnorm
from tightrope.training.checkpoints import load_checkpoint, save_checkpoint
from tightrope.training.objectives import (
    ADCERT,
    CAP,
    COLT,
    CROWNIBP,
    IBP,
    METHODS,
    SABR,
    STAPS,
    TAPS,
    DiffAI,
    SortNet,
    Standard,
)
from tightrope.training.settings import Settings
from tightrope.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

SPLIT = {"taps": 1, "staps": 2}
OBJECTIVES = {
    name: method(classifier_relus=SPLIT[name]) if name in SPLIT else method()
    for name, method in METHODS.items()
}
OBJECTIVES |= {
    "taps-single": TAPS(classifier_relus=1, estimators="single"),
    "taps-restarts": TAPS(classifier_relus=2, restarts=2, connector=0.0),
    "staps-shrink": STAPS(classifier_relus=1, shrink=0.8),
    "crown-ibp-margins": CROWNIBP(end_beta=0.5, end_kappa=0.3),
    "crown-ibp-fused": CROWNIBP(end_beta=0.5, loss="fused"),
    "crown-ibp-all-layers": CROWNIBP(end_beta=0.5, bounds="crown"),
    "diffai-hybrid": DiffAI(domain="hrand", correlated=5, relu="smooth", center="random"),
    "diffai-zonotopes": DiffAI(domain="z", relu="deepz", loss="worst", center="attack"),
    "cap-projections": CAP(projections=5),
    "ad-cert-rslad": ADCERT(imitate="rslad", attack="teacher", teacher_input="adversarial"),
    "sortnet-hinge": SortNet(loss="hinge"),
}
HELPERS = {
    "rgs": (Standard(), {"smoothing": "rgs", "smoothing_pairs": 2}),
    "pgpe": (SABR(), {"smoothing": "pgpe", "smoothing_pairs": 2}),
    "sam": (TAPS(classifier_relus=1), {"sam_rho": 0.1}),
    "edac": (IBP(), {"edac_weight": 0.3}),
    "tightness": (IBP(), {"tightness_weight": 0.1}),
    "all": (STAPS(classifier_relus=2), {"edac_weight": 0.3, "sam_rho": 0.1}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_is_the_same(name, monkeypatch):
    gpu_steps.assert_same(*gpu_steps.on_both(OBJECTIVES[name], monkeypatch))


@pytest.mark.parametrize("name", METHODS)
def test_a_step_in_parts_is_the_same(name, monkeypatch):
    gpu_steps.assert_same(*gpu_steps.on_both(OBJECTIVES[name], monkeypatch, accumulate=3))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", HELPERS)
def test_what_is_put_around_a_step_is_the_same(name, accumulate, monkeypatch):
    objective, given = HELPERS[name]
    options = {"helpers": given, "accumulate": accumulate}
    gpu_steps.assert_same(*gpu_steps.on_both(objective, monkeypatch, **options))


@pytest.mark.parametrize("number", range(3))
def test_a_step_of_each_stage_is_the_same(number, monkeypatch):
    stage = COLT(layers=(0, 1, 2), steps=3).stages[number]
    found = gpu_steps.on_both(stage.objective, monkeypatch, net="plain", progress=0.4)
    gpu_steps.assert_same(*found)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["ibp", "sabr", "mtl-ibp"])
def test_regularised_steps_are_the_same(name, accumulate, monkeypatch):
    options = {"annealing": True, "regularizer_weight": 0.5, "l1": 1e-3, "natural_weight": 0.2}
    found = gpu_steps.on_both(OBJECTIVES[name], monkeypatch, accumulate=accumulate, **options)
    gpu_steps.assert_same(*found)


def test_precise_statistics_are_the_same():
    batches = [gpu_steps.batch(5), gpu_steps.batch(3)]
    found = {}
    with pretend_cuda():
        for device in ("cpu", "cuda"):
            net = gpu_steps.network().to(device)
            moved = [(x.to(device), y.to(device)) for x, y in batches]
            precise_batchnorm(trace(net, gpu_steps.SHAPE), moved)
            found[device] = [real(t) for t in net.buffers()]
    assert all(map(torch.equal, found["cuda"], found["cpu"]))
    assert not torch.equal(found["cpu"][0], torch.zeros(3))


# --- the trainer --------------------------------------------------------------------------------

GIVEN = {
    "method": "taps",
    "eps": 0.05,
    "epochs": 3,
    "annealing_epochs": 1,
    "average_from": 1,
    "select": "last",
    "precise_bn": True,
    "learning_rate": 0.01,
    "taps.steps": 3,
}


def batches(device):
    x, y = gpu_steps.batch(20)
    images = (x * 255).to(torch.uint8)
    flipped = Augmentation(flip=True, crop=8, padding=1)
    return (
        Batches(images, y, 6, training=True, drop_last=True, augment=flipped, device=device),
        Batches(images, y, 10, device=device),
    )


def trainer(device, net="norm", **given):
    settings = Settings.parse({**GIVEN, **given}).resolve(normalize=False, network={})
    torch.manual_seed(4)
    made, objective = gpu_steps.NETWORKS[net](), settings.objective()
    teacher = gpu_steps.network().eval() if objective.needs_teacher else None
    where = gpu_steps.SHAPE, settings, objective, torch.device(device)
    return Trainer(made, *where, teacher=teacher)


def train(made, device):
    records = []
    made.run(
        *batches(device), on_epoch=lambda t, record, selected: records.append((record, selected))
    )
    numbers = [({k: v for k, v in r.items() if "seconds" not in k}, s) for r, s in records]
    return numbers, [real(t) for t in made.module.state_dict().values()]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "radam"])
def test_a_training_is_the_same(optimizer, monkeypatch):
    gpu_steps.as_on_gpu(monkeypatch)
    records, weights = train(trainer("cpu", optimizer=optimizer), "cpu")
    with pretend_cuda() as counts:
        made = trainer("cuda", optimizer=optimizer)
        assert all(isinstance(p, PretendTensor) for p in made.module.parameters())
        counts.clear()
        found, others = train(made, "cuda")
    assert found == records
    assert all(map(torch.equal, others, weights))
    assert counts.uploads.total() and not counts.unpinned


PLAIN = {"average_from": None, "annealing_epochs": 0, "precise_bn": False, "taps.steps": None}
OTHERS = {
    "helped": {"sam_rho": 0.05, "edac_weight": 0.3, "tightness_weight": 1e-3},
    "smoothed": {"smoothing": "pgpe", "smoothing_pairs": 2, "average_decay": 0.9},
    "taught": {**PLAIN, "method": "ad-cert", "ad-cert.steps": 2, "accumulate": 2},
    "staged": {**PLAIN, "net": "plain", "method": "colt", "colt.layers": "0,1,2", "colt.steps": 2},
    "distances": {**PLAIN, "net": "distances", "method": "sortnet", "sortnet.ramp_end": 2},
    "short": {"search_precision": "bf16", "deterministic": True},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_trainings_are_the_same_and_resume(name, tmp_path, monkeypatch):
    given = {k: v for k, v in {**GIVEN, **OTHERS[name]}.items() if v is not None}
    monkeypatch.setattr(sys.modules[__name__], "GIVEN", given)
    given = {"net": given.pop("net", "norm")}
    gpu_steps.as_on_gpu(monkeypatch)
    records, weights = train(trainer("cpu", **given), "cpu")
    with pretend_cuda():
        found, others = train(trainer("cuda", **given), "cuda")
        last = resumed_after_an_epoch("cuda", "cuda", tmp_path, given)
    assert found == records and all(map(torch.equal, others, weights))
    assert last[0] == records[1:] and all(map(torch.equal, last[1], weights))


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_training_continues_on_another_device(first, then, tmp_path, monkeypatch):
    gpu_steps.as_on_gpu(monkeypatch)
    _, weights = train(trainer("cpu"), "cpu")
    with pretend_cuda():
        records, found = resumed_after_an_epoch(first, then, tmp_path, {}, epochs=2)
    assert len(records) == 1
    assert all(map(torch.equal, found, weights))


def resumed_after_an_epoch(first, then, folder, given, epochs=1):
    """Train on one device for some epochs, go on with the checkpoint on another."""

    class StopError(Exception):
        pass

    def stop(made, record, selected):
        save_checkpoint(made.checkpoint(), folder / "checkpoint.pt")
        if record["epoch"] == epochs - 1:
            raise StopError

    with pytest.raises(StopError):
        trainer(first, **given).run(*batches(first), on_epoch=stop)
    resumed = trainer(then, **given)
    resumed.restore(load_checkpoint(folder / "checkpoint.pt"))
    return train(resumed, then)


def test_a_seed_means_the_same_network_on_every_device():
    plain = trainer("cpu", initialization="shi").module
    with pretend_cuda():
        moved = trainer("cuda", initialization="shi").module
        assert all(p.device == CUDA for p in moved.parameters())
        found = [real(p) for p in moved.parameters()]
    assert all(map(torch.equal, found, plain.parameters()))
    assert not torch.equal(found[0], gpu_steps.network()[0].weight)


def test_a_step_at_radius_zero_is_the_clean_loss(monkeypatch):
    found, expected = gpu_steps.on_both(Standard(), monkeypatch, radius=0.0)
    gpu_steps.assert_same(found, expected)
    assert found[0].robust == found[0].natural
