"""The training loop on real digits: it learns, repeats, resumes and selects."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from small_trainings import tiny, tiny_trainer, train
from torch import nn
from trainer_helpers import CPU, build, flat, make

import tightrope
from tightrope.training.objectives import IBP, PGD, Standard
from tightrope.training.settings import Settings
from tightrope.training.trainer import Trainer, evaluate, make_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")


# --- learning ---------------------------------------------------------------------------------

RATES = {"adam": 1e-2, "adamw": 1e-2, "radam": 0.1, "sgd": 0.05}


@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize("method", ["standard", "pgd", "ibp"])
def test_two_epochs_lower_the_loss(method, optimizer, digits):
    options = {"pgd.steps": 2} if method == "pgd" else {}
    trainer = make(
        build(width=4),
        method=method,
        optimizer=optimizer,
        learning_rate=RATES[optimizer],
        annealing_epochs=0,
        eps=0.02,
        select="last",
        **options,
    )
    (first, second), _ = train(trainer, digits[0])
    assert second["loss"] < 0.9 * first["loss"]
    assert second["natural"] > first["natural"]
    if method == "standard":
        assert first["robust"] is None
    else:
        assert second["natural"] > second["robust"] > first["robust"]
    x, y = next(iter(digits[1]))
    accuracy = (trainer.module.eval()(x).argmax(1) == y).double().mean()
    assert accuracy > 0.3  # the module itself has learnt, statistics included


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_standard_training_is_the_plain_torch_loop(optimizer, digits):
    batches = [(x.double(), y) for x, y in digits[1] for _ in range(2)]  # fixed, of 60 and 40
    module, twin = build(seed=1).double(), build(seed=1).double()
    trainer = make(
        module,
        method="standard",
        epochs=3,
        optimizer=optimizer,
        momentum=0.8,
        learning_rate=0.05,
        decay_epochs=[1],
        decay_factor=0.1,
        weight_decay=1e-3,
        clip=0.5,
        l1=1e-3,
        select="last",
    )
    records, _ = train(trainer, batches)
    if optimizer == "sgd":
        plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.8, weight_decay=1e-3)
    else:
        plain = torch.optim.Adam(twin.parameters(), lr=0.05, weight_decay=1e-3)
    for epoch in range(3):
        for group in plain.param_groups:
            group["lr"] = 0.05 if epoch < 1 else 0.005
        total = 0.0
        for x, y in batches:
            plain.zero_grad()
            loss = F.cross_entropy(twin.train()(x), y)
            total += loss.item() * len(y)
            weights = [m.weight for m in twin if isinstance(m, nn.Conv2d | nn.Linear)]
            (loss + 1e-3 * sum(w.abs().sum() for w in weights)).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            plain.step()
        assert records[epoch]["loss"] == pytest.approx(total / 200, rel=1e-9)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-7, atol=1e-7)


def test_the_record_is_the_mean_over_the_steps(digits):
    steps, records = [], []

    class Watch:
        def step(self, epoch, iteration, result, radius):
            steps.append((epoch, iteration, result))

        def epoch(self, record):
            records.append(record)

    make(method="pgd", **{"pgd.steps": 1}).run(*digits, progress=Watch())
    assert [s[:2] for s in steps] == [(e, i) for e in range(2) for i in range(8)]
    for record in records:
        results = [s[2] for s in steps if s[0] == record["epoch"]]
        assert sum(r.samples for r in results) == 512
        for name in ("loss", "natural", "robust"):
            expected = sum(getattr(r, name) for r in results) / 512
            assert record[name] == pytest.approx(expected, rel=1e-12)
    assert set(records[0]) == {
        *("epoch", "radius", "learning_rate", "loss", "natural", "robust", "seconds"),
        *("validation_natural", "validation_robust", "validation_radius", "validation_seconds"),
    }


# --- schedules, clipping, initialisation ------------------------------------------------------


def test_radius_and_learning_rate_of_each_iteration():
    trainer = tiny_trainer(
        epochs=6,
        warmup_epochs=1,
        annealing_epochs=2,
        train_eps=0.3,
        eps=0.1,
        decay_epochs=[3, 5],
        decay_factor=0.1,
        learning_rate=0.01,
        select="last",
    )
    radii, rates = [], []

    class Watch:
        def step(self, epoch, iteration, result, radius):
            radii.append(radius)
            rates.append(trainer.optimizer.param_groups[0]["lr"])

        def epoch(self, record):
            assert record["radius"] == radii[-1]
            assert record["learning_rate"] == rates[-1]

    trainer.run(tiny(), None, progress=Watch())
    # Ramp from iteration 4 to 12: quarter 2, unit 0.3 / (6 * 4 * 8 + 16).
    unit = 0.3 / 208
    ramp = [0, 1, 16, 48, 80, 112, 144, 176]
    assert radii == pytest.approx([0.0] * 4 + [unit * n for n in ramp] + [0.3] * 12, rel=1e-12)
    assert rates == pytest.approx([0.01] * 12 + [0.001] * 8 + [0.0001] * 4, rel=1e-12)


@pytest.mark.parametrize("clip", [1e-3, 0.02])
def test_gradients_are_clipped_by_their_norm(clip):
    given = {"epochs": 1, "optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0}
    moved = {}
    for limit in (clip, None):
        trainer = tiny_trainer(**given, clip=limit, method="standard", select="last")
        before = nn.utils.parameters_to_vector(trainer.module.parameters()).detach().clone()
        trainer.run(tiny(1), None)
        after = nn.utils.parameters_to_vector(trainer.module.parameters()).detach()
        moved[limit] = after - before
    assert moved[None].norm() > 2 * clip
    assert moved[clip].norm() == pytest.approx(clip, rel=1e-3)
    directions = [F.normalize(moved[limit], dim=0) for limit in (clip, None)]
    torch.testing.assert_close(*directions, rtol=1e-2, atol=1e-4)


def test_optimizers_take_their_settings():
    module = nn.Linear(2, 2)
    kinds = {"adam": "Adam", "adamw": "AdamW", "radam": "RAdam", "sgd": "SGD"}
    for name, kind in kinds.items():
        settings = Settings(optimizer=name, learning_rate=0.3, weight_decay=0.01, momentum=0.7)
        optimizer = make_optimizer(module, settings)
        assert type(optimizer).__name__ == kind
        assert optimizer.defaults["lr"] == 0.3 and optimizer.defaults["weight_decay"] == 0.01
        if name == "sgd":
            assert optimizer.defaults["momentum"] == 0.7
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 2


def test_initialization_follows_the_setting():
    for kind, changed in (("shi", True), ("default", False)):
        module = build(width=8)
        before = copy.deepcopy(module.state_dict())
        after = make(module, initialization=kind).module.state_dict()
        moved = {k for k, v in after.items() if not torch.equal(v, before[k])}
        assert moved == ({"0.weight", "3.weight"} if changed else set())
        if changed:
            assert after["3.weight"].std() == pytest.approx(math.sqrt(2 * math.pi) / 128, rel=0.1)


def test_regularizers_belong_to_methods_with_bounds(few):
    weights = {}
    for method in ("pgd", "ibp"):
        for weight in (0.0, 0.5):
            given = {"initialization": "default", "annealing_epochs": 1, "select": "last"}
            options = {"pgd.steps": 1} if method == "pgd" else {}
            trainer = make(method=method, regularizer_weight=weight, **given, **options)
            train(trainer, few[0])
            weights[method, weight] = flat(trainer.module.state_dict())
    assert weights["pgd", 0.0] == weights["pgd", 0.5]
    assert weights["ibp", 0.0] != weights["ibp", 0.5]


def test_precise_statistics_at_the_end_of_each_epoch():
    batches = [reference.batch(size, seed=size) for size in (5, 6, 7)]
    settings = Settings.parse({"epochs": 1, "precise_bn": True, "select": "last", "eps": 0.01})
    settings = settings.resolve(normalize=False, network={})
    trainer = Trainer(reference.norm_net(), reference.SHAPE, settings, IBP(), CPU)
    trainer.run(batches, None)
    models = [reference.Reference(trainer.module, x) for x, _ in batches]
    for layer in models[0].statistics:
        means = [m.statistics[layer][0] for m in models]
        counts = [m.counts[layer] for m in models]
        variances = [
            m.statistics[layer][1] * n / (n - 1) for m, n in zip(models, counts, strict=True)
        ]
        torch.testing.assert_close(layer.running_mean, torch.stack(means).mean(0))
        torch.testing.assert_close(layer.running_var, torch.stack(variances).mean(0))


# --- evaluation -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Standard(), PGD(steps=3), IBP()])
def test_evaluate_counts_samples(method):
    net = reference.norm_net()
    x, y = reference.batch(40)
    net(x)
    net.eval()
    y = torch.where(torch.arange(40) % 3 == 0, y, net(x).argmax(1))
    graph = tightrope.trace(net, reference.SHAPE)
    torch.manual_seed(0)
    whole = evaluate(graph, method, [(x, y)], 0.01)
    torch.manual_seed(0)
    parts = evaluate(graph, method, [(x[:7], y[:7]), (x[7:], y[7:])], 0.01)
    right = (net(x).argmax(1) == y).double().mean().item()
    assert whole[0] == parts[0] == right
    if isinstance(method, Standard):
        assert whole[1] is parts[1] is None
    else:
        assert 0 < parts[1] < right
        assert evaluate(graph, method, [(x, y)], 0.0)[1] == right
    if isinstance(method, IBP):
        assert whole == parts
