"""What a training draws at random, and that it resumes as if it had never stopped."""

import random

import numpy as np
import pytest
import torch
from small_trainings import train
from trainer_helpers import build, flat, make

import tightrope
from tightrope.training.checkpoints import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


# --- randomness -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pgd", "ibp"])
def test_training_leaves_the_callers_randomness_alone(method, few):
    trainer = make(method=method, select="last")
    torch.manual_seed(77)
    random.seed(77)
    np.random.seed(77)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    train(trainer, *few)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_the_whole_command_leaves_the_callers_randomness_alone(tmp_path):
    torch.manual_seed(78)
    before = torch.get_rng_state()
    options = {"train_samples": 64, "validation": 16, "width": 1, "epochs": 1, "batch_size": 16}
    runs = []
    for name in ("a", "b"):
        runs.append(tightrope.train(out=tmp_path / name, eps=0.01, **options))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(79)  # another state of the caller's must not change the run
        before = torch.get_rng_state()
    assert runs[0].weights.read_bytes() == runs[1].weights.read_bytes()
    other = tightrope.train(out=tmp_path / "c", eps=0.01, seed=1, **options)
    assert other.weights.read_bytes() != runs[0].weights.read_bytes()


def test_epochs_differ_from_each_other_and_with_the_seed(digits):
    orders = {}
    for seed in (0, 0, 1):
        seen = []

        class Watch:
            def __len__(self):
                return len(digits[0])

            def __iter__(self):
                for x, y in digits[0]:
                    seen.append(y.tolist())  # noqa: B023
                    yield x, y

        train(make(method="standard", seed=seed, select="last"), Watch())
        orders.setdefault(seed, []).append(seen)
    assert orders[0][0] == orders[0][1] != orders[1][0]
    assert orders[0][0][:8] != orders[0][0][8:]


# --- resuming ---------------------------------------------------------------------------------

RESUMED = [
    {"method": "ibp", "annealing_epochs": 2},
    {"method": "ibp", "annealing_epochs": 2, "accumulate": 2, "optimizer": "sgd"},
    {"method": "ibp", "precise_bn": True, "warmup_epochs": 1, "annealing_epochs": 1, "l1": 1e-4},
    {"method": "crown-ibp", "annealing_epochs": 2, "crown-ibp.end_beta": 0.3},
    {"method": "crown-ibp", "annealing_epochs": 2, "crown-ibp.loss": "fused", "accumulate": 2},
    {
        **{"method": "diffai", "diffai.domain": "z", "diffai.relu": "deepz"},
        **{"diffai.center": "random", "diffai.end_ratio": 0.5, "diffai.start_weight": 0.5},
    },
    {"method": "cap", "annealing_epochs": 2, "cap.projections": 9, "accumulate": 2},
    {"method": "pgd", "pgd.steps": 2},
    {"method": "pgd", "pgd.steps": 2, "accumulate": 2, "optimizer": "radam"},
    {"method": "standard", "optimizer": "adamw", "decay_epochs": "1,2"},
    {"method": "noise", "accumulate": 2},
    {"method": "arow", "arow.steps": 2},
    {"method": "mart", "mart.steps": 2, "edac_weight": 0.3},
    {"method": "ibp", "smoothing": "rgs", "smoothing_pairs": 2, "annealing_epochs": 1},
    {"method": "pgd", "pgd.steps": 2, "smoothing": "pgpe", "smoothing_pairs": 2},
    {"method": "ibp", "sam_rho": 0.05, "tightness_weight": 1e-4, "accumulate": 2},
]


@pytest.mark.parametrize("given", RESUMED, ids=lambda g: "-".join(map(str, g.values())))
def test_resuming_changes_nothing(given, few, tmp_path):
    given = {"epochs": 3, "eps": 0.05, "learning_rate": 3e-3, **given}
    whole = make(**given)
    expected, chosen = train(whole, *few)

    class Stop(Exception):
        pass

    class Watch:
        """Stops the training in the middle of the second epoch."""

        def step(self, epoch, iteration, result, radius):
            if (epoch, iteration) == (1, 2):
                raise Stop

        def epoch(self, record):
            pass

    path = tmp_path / "checkpoint.pt"
    first = make(**given)
    with pytest.raises(Stop):
        first.run(
            *few, progress=Watch(), on_epoch=lambda t, *_: save_checkpoint(t.checkpoint(), path)
        )
    torch.manual_seed(999)
    resumed = make(build(seed=5), **given)  # other weights, to be replaced
    resumed.restore(load_checkpoint(path))
    assert resumed.finished == 1
    records, selections = train(resumed, *few)
    assert records == expected[1:]
    assert selections == chosen[1:]
    assert flat(resumed.module.state_dict()) == flat(whole.module.state_dict())
    assert flat(resumed.optimizer.state_dict()) == flat(whole.optimizer.state_dict())
    assert (resumed.best, resumed.selected_epoch) == (whole.best, whole.selected_epoch)
    assert resumed.finished == 3


def test_a_finished_training_has_nothing_to_do(few, tmp_path):
    trainer = make(method="standard")
    train(trainer, *few)
    save_checkpoint(trainer.checkpoint(), tmp_path / "c.pt")
    again = make(method="standard")
    again.restore(load_checkpoint(tmp_path / "c.pt"))
    assert train(again, *few) == ([], [])
    assert flat(again.module.state_dict()) == flat(trainer.module.state_dict())


@pytest.mark.parametrize("other", [{"width": 3}, {"batch_norm": False}])
def test_checkpoints_of_other_networks_are_refused(other, digits, tmp_path):
    trainer = make(method="standard", epochs=1, select="last")
    train(trainer, digits[0])
    save_checkpoint(trainer.checkpoint(), tmp_path / "c.pt")
    with pytest.raises((ValueError, RuntimeError)):
        make(build(**other)).restore(load_checkpoint(tmp_path / "c.pt"))
