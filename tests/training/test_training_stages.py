"""Trainings in stages: what each of them trains, at which radius and rate, and how it resumes."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from small_trainings import CPU, train
from torch import nn
from trainer_helpers import flat

import tightrope as tr
from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.checkpoints import load_checkpoint, save_checkpoint
from tightrope.training.objectives import Loss, Objective, Stage
from tightrope.training.settings import Settings
from tightrope.training.stages import Plan, freeze
from tightrope.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


class Noted(Objective):
    """Cross-entropy in the ball's corner, mixed with that of a random point; notes its calls."""

    calls: ClassVar[list] = []

    def __init__(self, name):
        self.own = name

    def __call__(self, model, x, y, radius):
        self.calls.append((self.own, radius, model.progress))
        corner = F.cross_entropy(model.graph(Box.ball(x, radius).upper), y)
        random = F.cross_entropy(model.graph(Box.ball(x, radius).sample()), y)
        robust = model.logits.detach().argmax(1) == y
        return Loss(model.progress * corner + (1 - model.progress) * random, robust)


@dataclass(frozen=True)
class Layered(Objective):
    """Three stages, of which each freezes one ReLU more."""

    name: ClassVar[str] = "layered"
    summary: ClassVar[str] = "test"

    def __call__(self, model, x, y, radius):
        return self.stages[0].objective(model, x, y, radius)

    @property
    def stages(self):
        return (
            Stage(Noted("a"), frozen=0, radius=4.0, rate=1.0, mix=0.5),
            Stage(Noted("b"), frozen=1, radius=2.0, rate=0.5, mix=0.25),
            Stage(Noted("c"), frozen=2, mix=0.0),
        )


@pytest.fixture(autouse=True)
def calls():
    Noted.calls.clear()
    return Noted.calls


def network(seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(5, 3))


def batches(count=3):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


GIVEN = {
    "method": "layered",
    "eps": 0.05,
    "epochs": 12,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "decay_epochs": "2,3",
    "decay_factor": 0.5,
    "weight_decay": 0.01,
    "l1": 1e-3,
    "select": "last",
}


def resolve(**given):
    settings = Settings.parse({**GIVEN, **given}, Layered)
    return settings.resolve(normalize=False, network={})


def make(module=None, **given):
    settings = resolve(**given)
    return Trainer(module or network(), (4,), settings, settings.objective(), CPU)


# --- the plan ---------------------------------------------------------------------------------


def test_epochs_are_divided_among_the_stages():
    plan = Plan.of(Layered(), 12)
    assert (len(plan.stages), plan.epochs, plan.several) == (3, 4, True)
    assert [plan.place(e) for e in (0, 3, 4, 11)] == [(0, 0), (0, 3), (1, 0), (2, 3)]
    assert [plan.in_last_stage(e) for e in (0, 7, 8, 11)] == [False, False, True, True]
    # Half of 4 epochs of 3 iterations; a quarter of them; nothing.
    assert [plan.progress(0, i, 3) for i in range(3)] == pytest.approx([0, 1 / 6, 2 / 6])
    assert plan.progress(1, 2, 3) == pytest.approx(5 / 6)
    assert plan.progress(2, 0, 3) == plan.progress(3, 2, 3) == 1.0
    assert [plan.progress(4, i, 3) for i in range(3)] == pytest.approx([0, 1 / 3, 2 / 3])
    assert plan.progress(5, 0, 3) == plan.progress(8, 0, 3) == 1.0


def test_the_last_stage_has_what_is_left_over():
    plan = Plan.of(Layered(), 14)
    assert [plan.place(e) for e in (7, 8, 11, 12, 13)] == [(1, 3), (2, 0), (2, 3), (2, 4), (2, 5)]
    assert plan.in_last_stage(13) and plan.progress(13, 2, 3) == 1.0
    records, _ = train(make(epochs=5), batches(1))
    assert [record["stage"] for record in records] == [1, 2, 3, 3, 3]


def test_most_trainings_are_one_stage():
    plan = Plan.of(tr.IBP(), 7)
    assert (len(plan.stages), plan.epochs, plan.several) == (1, 7, False)
    assert plan.place(6) == (0, 6) and plan.in_last_stage(0)
    assert plan.progress(3, 1, 5) is None  # what the objective is told is the radius's share
    assert plan.stages[0] == Stage(plan.stages[0].objective)


def test_frozen_layers_have_no_gradient_and_compute_the_same():
    module = network()
    graph = trace(module, (4,))
    x = torch.rand(5, 4)
    assert freeze(graph, 0) is graph
    for relus, frozen in ((1, 2), (2, 4), (3, 6)):
        module.zero_grad(set_to_none=True)
        cold = freeze(graph, relus)
        assert torch.equal(cold(x), graph(x))
        cold(x).sum().backward()
        without = [p.grad is None for p in module.parameters()]
        assert without == [True] * frozen + [False] * (8 - frozen)
        with torch.no_grad():  # the weights are those of the module
            module[0].weight.add_(0.1)
        assert torch.equal(cold(x), graph(x))


# --- the trainer ------------------------------------------------------------------------------


def test_each_stage_has_a_radius_a_rate_and_a_mixture_of_its_own(calls):
    records, _ = train(make(), batches())
    assert [r["stage"] for r in records] == [1] * 4 + [2] * 4 + [3] * 4
    assert [r["radius"] for r in records] == pytest.approx([0.2] * 4 + [0.1] * 4 + [0.05] * 4)
    decay = [1, 1, 0.5, 0.25]
    rates = [0.1 * d for d in decay] + [0.05 * d for d in decay]
    rates += [0.1 * d for d in decay]  # the last stage says nothing of its rate
    assert [r["learning_rate"] for r in records] == pytest.approx(rates)
    assert [name for name, _, _ in calls] == ["a"] * 12 + ["b"] * 12 + ["c"] * 12
    progress = [min(1, i / 6) for i in range(12)] + [min(1, i / 3) for i in range(12)] + [1] * 12
    assert [k for _, _, k in calls] == pytest.approx(progress)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_frozen_weights_stay_bit_for_bit(optimizer):
    """Neither momentum, nor weight decay, nor the L1 norm moves them."""
    trainer, seen = make(optimizer=optimizer), []

    def note(made, *_):
        seen.append({k: v.clone() for k, v in made.module.state_dict().items()})

    trainer.run(batches(), None, on_epoch=note)
    moved = lambda a, b: {k for k in seen[0] if not torch.equal(seen[a][k], seen[b][k])}  # noqa: E731
    layers = [{f"{i}.weight", f"{i}.bias"} for i in (0, 2, 4, 6)]
    assert moved(0, 3) == set().union(*layers)
    assert moved(3, 7) == set().union(*layers[1:])
    assert moved(7, 11) == set().union(*layers[2:])


def test_each_stage_begins_with_a_new_optimiser():
    trainer, states = make(momentum=0.9), []
    trainer.run(batches(), None, on_epoch=lambda t, *_: states.append(t.checkpoint().optimizer))
    # Momentum of what still learns only; that of an epoch before is gone.
    assert [len(state["state"]) for state in states] == [8] * 4 + [6] * 4 + [4] * 4


def test_only_the_last_stage_competes():
    """Robust accuracy of another stage means something else; until then the latest is kept."""
    trainer = make(select="best")
    records, selections = train(trainer, batches(), batches(1))
    assert selections[:8] == [True] * 8
    last = [record["validation_robust"] for record in records[8:]]
    best = [max(last[:i], default=-1.0) for i in range(4)]
    assert selections[8:] == [value > before for value, before in zip(last, best, strict=True)]
    assert trainer.selected_epoch == 8 + last.index(max(last))
    assert trainer.best == max(last)


def test_held_out_data_is_seen_as_by_the_stage(calls):
    trainer = make(select="best")
    trainer.run([batches()[0]], batches(1))
    held_out = calls[1::2]
    assert [name for name, _, _ in held_out] == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    # At the radius to be robust to, and with nothing mixed in.
    assert {(radius, progress) for _, radius, progress in held_out} == {(0.05, 1.0)}


@pytest.mark.parametrize("stop", [(1, 1), (3, 2), (4, 0), (5, 1), (8, 0), (9, 2)])
def test_resuming_changes_nothing(stop, tmp_path):
    """Inside of stages, at their borders, and after the first iterations behind these."""
    given = {"momentum": 0.9, "select": "best"}
    whole = make(**given)
    expected, chosen = train(whole, batches(), batches(1))

    class Stop(Exception):
        pass

    class Watch:
        def step(self, epoch, iteration, result, radius):
            if (epoch, iteration) == stop:
                raise Stop

        def epoch(self, record):
            pass

    path = tmp_path / "checkpoint.pt"
    with pytest.raises(Stop):
        make(**given).run(
            batches(),
            batches(1),
            progress=Watch(),
            on_epoch=lambda t, *_: save_checkpoint(t.checkpoint(), path),
        )
    torch.manual_seed(999)
    resumed = make(network(seed=5), **given)  # other weights, to be replaced
    resumed.restore(load_checkpoint(path))
    assert resumed.finished == stop[0]
    records, selections = train(resumed, batches(), batches(1))
    assert (records, selections) == (expected[stop[0] :], chosen[stop[0] :])
    assert flat(resumed.module.state_dict()) == flat(whole.module.state_dict())
    assert flat(resumed.optimizer.state_dict()) == flat(whole.optimizer.state_dict())
    assert (resumed.best, resumed.selected_epoch) == (whole.best, whole.selected_epoch)


# --- settings ---------------------------------------------------------------------------------


def test_drops_of_the_rate_are_counted_in_each_stage():
    assert resolve(decay_epochs=None, epochs=21).decay_epochs == (5, 6)
    assert resolve(epochs=21).annealing_epochs == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 2}, "epochs = 2 must be at least 3: layered trains in 3 stages"),
        ({"annealing_epochs": 2}, "layered trains each stage at one radius: set warmup_epochs = 0"),
        ({"warmup_epochs": 1}, "layered trains each stage at one radius: set warmup_epochs = 0"),
        ({"average_from": 7}, "average_from must be in the last stage, 8 or later"),
    ],
)
def test_what_does_not_go_with_stages_is_refused(given, message):
    with pytest.raises(UserError) as caught:
        resolve(**given)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_weights_may_be_averaged_in_the_last_stage():
    trainer, before = make(average_from=8), {}

    def note(made, record, _):
        if record["epoch"] == 7:
            before.update({k: v.clone() for k, v in made.module.state_dict().items()})

    trainer.run(batches(), None, on_epoch=note)
    after = trainer.module.state_dict()
    same = {name for name in after if torch.equal(after[name], before[name])}
    assert same == {"0.weight", "0.bias", "2.weight", "2.bias"}  # means of equal numbers


def test_a_run_of_stages_names_them_in_its_history(tmp_path):
    options = {"train_samples": 40, "validation": 8, "width": 1, "batch_size": 16}
    options |= {"net": "cnn4", "hidden": 3, "batch_norm": False}
    run = tr.train(out=tmp_path / "run", method=Layered(), eps=0.01, epochs=3, **options)
    assert [record["stage"] for record in run.history()] == [1, 2, 3]
