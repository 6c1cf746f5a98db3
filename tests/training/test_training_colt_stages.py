"""COLT in stages: what they train, how they resume, what is refused."""

import pytest
import torch
import training_reference as reference
from small_trainings import train
from torch import nn
from trainer_helpers import flat, make

import tightrope as tr
from tightrope import nets
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.checkpoints import load_checkpoint, save_checkpoint
from tightrope.training.objectives import COLT
from tightrope.training.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")


# --- stages -----------------------------------------------------------------------------------


def test_published_stages():
    """CIFAR-10 at 2/255: 1.398, 1.271, 1.155 and 1.05 times the radius, here of `train_eps`."""
    stages = COLT((0, 1, 2, 3)).stages
    assert [1.05 * s.radius for s in stages] == pytest.approx([1.398, 1.271, 1.155, 1.05], abs=1e-3)
    assert [s.frozen for s in stages] == [0, 1, 2, 3]
    assert [0.03 * s.rate for s in stages] == pytest.approx([0.03, 0.0225, 0.016875, 0.01265625])
    assert [s.objective.area_weight for s in stages] == pytest.approx(
        [0.005 * 1.5**j for j in range(4)]
    )
    found = [(s.objective.previous, s.objective.current, s.objective.next) for s in stages]
    assert found == [(None, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, None)]
    stages = COLT((0, 1, 2), radius_factor=1.2, rate_factor=0.5).stages
    assert [1.05 * s.radius for s in stages] == pytest.approx([1.512, 1.26, 1.05])
    assert [s.rate for s in stages] == [1, 0.5, 0.25]


def colt_net(seed=0, width=2):
    torch.manual_seed(seed)
    return nets.build("cnn4", (1, 28, 28), 10, width=width, hidden=4, batch_norm=False)


TRAINING = {
    "method": "colt",
    "colt.layers": "0,1,2",
    "colt.projections": 4,
    "colt.steps": 2,
    "epochs": 6,
    "eps": 0.05,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "l1": 1e-5,
    "select": "best",
}


@pytest.mark.parametrize("stop", [(1, 1), (2, 0), (3, 2), (5, 1)])
def test_resuming_changes_nothing(stop, few, tmp_path):
    """Between stages and inside of each."""
    whole = make(colt_net(), **TRAINING)
    expected, chosen = train(whole, *few)
    assert [record["stage"] for record in expected] == [1, 1, 2, 2, 3, 3]

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
        make(colt_net(), **TRAINING).run(
            *few, progress=Watch(), on_epoch=lambda t, *_: save_checkpoint(t.checkpoint(), path)
        )
    torch.manual_seed(999)
    resumed = make(colt_net(seed=5), **TRAINING)
    resumed.restore(load_checkpoint(path))
    records, selections = train(resumed, *few)
    assert (records, selections) == (expected[stop[0] :], chosen[stop[0] :])
    assert flat(resumed.module.state_dict()) == flat(whole.module.state_dict())
    assert flat(resumed.optimizer.state_dict()) == flat(whole.optimizer.state_dict())


HELPERS = [
    {},
    {"smoothing": "rgs", "smoothing_pairs": 1},
    {"smoothing": "pgpe", "smoothing_pairs": 1},
    {"sam_rho": 0.05, "tightness_weight": 1e-4},
    {"edac_weight": 0.3, "momentum": 0.9, "weight_decay": 1e-3},
]


@pytest.mark.parametrize("helper", HELPERS, ids=lambda h: "-".join(h) or "none")
def test_frozen_weights_stay_bit_for_bit(helper, few):
    """Also beside helpers that move weights and put them back."""
    trainer, seen = make(colt_net(), **TRAINING, **helper), []

    def note(made, *_):
        seen.append({k: v.clone() for k, v in made.module.state_dict().items()})

    trainer.run(*few, on_epoch=note)
    names = list(seen[0])
    for end, frozen in ((1, 0), (3, 2), (5, 4)):  # the two epochs of each stage
        moved = [k for k in names if not torch.equal(seen[end - 1][k], seen[end][k])]
        assert moved == names[frozen:]
    assert all(torch.equal(seen[1][k], seen[3][k]) for k in names[:2])
    assert all(torch.equal(seen[3][k], seen[5][k]) for k in names[:4])


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": "1,2"}, "colt.layers must begin with 0, the ball, got [1, 2]"),
        ({"layers": ""}, "colt.layers must begin with 0, the ball, got []"),
        ({"layers": "0,2,1"}, "colt.layers must be increasing whole numbers separated by commas"),
        ({"layers": "-2,-1,2"}, "colt.layers must be whole numbers separated by commas"),
        ({"mix": 1.5}, "colt.mix must be between 0 and 1, got 1.5"),
        ({"projections": 0}, "colt.projections must be at least 1, got 0"),
        ({"radius_factor": 0}, "colt.radius_factor must be positive, got 0"),
        ({"area_weight": -1}, "colt.area_weight must be at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(UserError) as caught:
        Settings.parse({"method": "colt", **{f"colt.{k}": v for k, v in given.items()}})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"colt.layers": "0,1,4", "epochs": 3},
            "colt.layers has 4, but the network cannot be cut there; possible numbers of ReLUs: "
            "0, 1, 2",
        ),
        ({"batch_norm": True}, "colt freezes layers, which BatchNorm would not be"),
        ({"colt.layers": "0,1,2", "epochs": 2}, "epochs = 2 must be at least 3: colt trains in 3"),
        ({"annealing_epochs": 1}, "colt trains each stage at one radius"),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_anything_is_written(given, message, tmp_path):
    settings = {"net": "cnn3", "width": 1, "batch_norm": False, "epochs": 4, **given}
    out = tmp_path / "run"
    with pytest.raises(UserError) as caught:
        tr.train(out=out, method="colt", eps=0.1, train_samples=100, **settings)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    assert not out.exists()


def test_layers_that_are_neither_affine_nor_relus_are_refused():
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 4), nn.ReLU(),
        nn.Linear(4, 3),
    )  # fmt: skip
    graph = trace(net, reference.SHAPE)
    COLT((0, 1)).check(graph)
    with pytest.raises(UserError, match=r"colt\.layers = \[0, 2\] asks for .* behind a MaxPool"):
        COLT((0, 2)).check(graph)


def test_it_trains_a_run_that_is_certified(tmp_path):
    run = tr.train(
        out=tmp_path / "run", method=COLT((0, 1), steps=3), eps=0.02, epochs=4, net="cnn3",
        width=2, batch_norm=False, train_samples=600, validation=100, batch_size=50,
        learning_rate=0.01,
    )  # fmt: skip
    assert [record["stage"] for record in run.history()] == [1, 1, 2, 2]
    again = tr.train(out=tmp_path / "run", resume=True)
    assert again.settings().options["layers"] == [0, 1]
    result = tr.certify(again, samples=20, timeout=2)
    assert result.samples == 20 and result.certified > 0
