"""EDAC, how helpers are put around a step, and which combinations are refused."""

import copy

import pytest
import torch
import training_reference as reference
from small_trainings import tiny, tiny_trainer, train
from torch import nn
from trainer_helpers import flat

from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training import assistance
from tightrope.training.assistance import AdversarialCertainty, LessCertain, assisted
from tightrope.training.nearby import SharpnessAware, Smoothed
from tightrope.training.objectives import IBP
from tightrope.training.settings import Settings
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**given):
    return Settings.parse(given).resolve(normalize=False, network={})


@pytest.fixture
def at_inputs(monkeypatch):
    """Attacks that stay at the inputs."""
    monkeypatch.setattr(assistance, "adversarial_points", lambda model, box, y, **_: model.x)


def test_certainty_is_the_deviation_of_the_logits(at_inputs):
    class Model:
        x = torch.zeros(2, 1)

        @staticmethod
        def graph(points):
            return torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]])

    loss = AdversarialCertainty(0.3)(Model(), Model.x, torch.tensor([0, 1]), 0.1)
    assert loss.value.item() == pytest.approx(0.3 * (1 + 3**0.5) / 2)
    assert loss.robust is None


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", reference.NETS)
def test_edac_by_hand(name, accumulate, at_inputs):
    """A step of the optimiser down the deviation, then everything else at the new weights."""
    weight, rate = 0.3, 0.05
    net = reference.NETS[name]()
    x, y = reference.batch()
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    step = Step(
        *(trace(net, reference.SHAPE), IBP(), 0.2),
        **{"l1": 1e-2, "natural_weight": 0.1, "accumulate": accumulate},
    )
    helped = assisted(step, settings(edac_weight=weight), optimizer)
    assert isinstance(helped, LessCertain) and helped.step is step
    helped(x, y, 0.05, annealing=False)

    expected = reference.NETS[name]()
    slow = reference.Reference(expected, x)
    (weight * slow.logits.std(1).mean()).backward()
    other = torch.optim.SGD(expected.parameters(), rate, momentum=0.9)
    other.step()
    for key, parameter in expected.named_parameters():
        torch.testing.assert_close(net.get_parameter(key), parameter, msg=key)
    assert flat(optimizer.state_dict()["param_groups"]) == flat(other.state_dict()["param_groups"])
    moved = copy.deepcopy(expected)
    moved.zero_grad()
    plain = Step(trace(moved, reference.SHAPE), IBP(), 0.2, l1=1e-2, natural_weight=0.1)
    plain(x, y, 0.05, annealing=False)
    for key, value in reference.gradients(moved).items():
        torch.testing.assert_close(reference.gradients(net)[key], value, msg=key)


def test_edac_waits_for_a_ball(at_inputs):
    net = reference.plain_net()
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = Step(trace(net, reference.SHAPE), IBP(), 0.2)
    assisted(step, settings(edac_weight=0.3), optimizer)(*reference.batch(), 0.0, annealing=False)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, Step),
        ({"smoothing": "rgs"}, Smoothed),
        ({"smoothing": "pgpe", "smoothing_sigma": 0.1, "smoothing_pairs": 3}, Smoothed),
        ({"sam_rho": 0.05}, SharpnessAware),
        ({"edac_weight": 0.3}, LessCertain),
    ],
)
def test_what_is_put_around_a_step(given, kind):
    net = reference.plain_net()
    step = Step(trace(net, reference.SHAPE), IBP(), 0.2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    chosen = settings(**given)
    found = assisted(step, chosen, optimizer)
    assert type(found) is kind
    if kind is Smoothed:
        values = (found.kind, found.sigma, found.pairs)
        assert values == (chosen.smoothing, chosen.smoothing_sigma, chosen.smoothing_pairs)
    if chosen.edac_weight:
        both = assisted(step, settings(**given, sam_rho=0.1), optimizer)
        assert isinstance(both, LessCertain) and isinstance(both.step, SharpnessAware)
        assert isinstance(both.before, Step) and both.before.l1 == 0


HELPERS = [
    {"smoothing": "rgs", "smoothing_pairs": 2},
    {"smoothing": "pgpe", "smoothing_pairs": 2},
    {"sam_rho": 0.05},
    {"edac_weight": 0.3},
    {"tightness_weight": 0.01},
]


@pytest.mark.parametrize("given", HELPERS, ids=lambda g: "-".join(map(str, g)))
def test_every_helper_changes_a_training(given):
    """And two trainings with it are the same."""
    weights = []
    for options in ({}, given, given):
        trainer = tiny_trainer(epochs=2, eps=0.1, select="last", **options)
        train(trainer, tiny())
        weights.append(flat(trainer.module.state_dict()))
    assert weights[0] != weights[1] == weights[2]


def test_networks_without_a_tightness_are_refused_at_once():
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(UserError, match="tightness_weight is for networks of linear layers"):
        tiny_trainer(net, tightness_weight=0.1)
    tiny_trainer(net)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"smoothing": "rgs", "sam_rho": 0.1}, "smoothing and sam_rho both move the weights"),
        ({"average_decay": 0.99}, "average_decay needs average_from"),
        ({"smoothing_pairs": 3}, "smoothing_pairs says nothing without smoothing: set that to"),
        ({"smoothing_sigma": 0.1, "sam_rho": 0.1}, "smoothing_sigma says nothing without smoo"),
        ({"edac_weight": 0.3, "method": "noise"}, "edac_weight is about attacks .* 'noise'"),
        ({"edac_weight": 0.3, "method": "standard"}, "edac_weight is about attacks in the ball"),
        ({"average_from": 1, "average_decay": 0.9, "select": "best"}, "set select = last"),
    ],
)
def test_combinations_that_make_no_sense(given, message):
    with pytest.raises(UserError, match=message) as caught:
        settings(**given)
    assert "\n" not in str(caught.value)
