"""Presets of methods with networks of their own, against the published tables."""

from __future__ import annotations

from fractions import Fraction

import pytest
from presets_read import network_arguments, resolved

pytestmark = pytest.mark.usefixtures("one_thread")

# Of SortNet's repositories: q in percent, the weight of the cross-entropy at first and at last,
# the radius of training over that of the test, the epochs at which p begins and ends to grow, all.
SORTNET = {
    "linf-dist-mnist-0.1": (None, 0.05, 2e-4, 3, (25, 400, 450)),
    "linf-dist-mnist-0.3": (None, 0.05, 2e-4, 1.5, (25, 400, 450)),
    "linf-dist-cifar10-2-255": (None, 0.05, 2e-3, 5, (100, 1250, 1300)),
    "linf-dist-cifar10-8-255": (None, 0.1, 5e-4, 3, (100, 1250, 1300)),
    "mnist-0.1": (70, 0.1, 1e-3, 3, (100, 1450, 1500)),
    "mnist-0.3": (75, 0.02, 2e-4, 1.5, (100, 1450, 1500)),
    "cifar10-2-255": (75, 1, 0.01, 4, (200, 2950, 3000)),
    "cifar10-8-255": (85, 0.2, 2e-3, 3, (200, 2950, 3000)),
    "mlp-cifar10-2-255": (70, 1, 0.01, 1.1, (200, 2950, 3000)),
    "mlp-cifar10-8-255": (60, 1, 0.01, 1.1, (200, 2950, 3000)),
    "mlp-tinyimagenet-1-255": (70, 1, 0.01, 1.1, (100, 980, 1000)),
}


@pytest.mark.parametrize("name", SORTNET)
def test_the_presets_of_sortnet(name):
    keep, first, last, factor, epochs = SORTNET[name]
    settings = resolved(f"sortnet/{name}")
    objective, head = settings.objective(), name.startswith("mlp")
    assert (settings.keep, objective.mixing, objective.end_mixing) == (keep, first, last)
    assert settings.train_eps == Fraction(str(factor)) * settings.eps
    assert (objective.ramp_start, objective.ramp_end, settings.epochs) == epochs
    assert objective.loss == ("head" if head else "mixture")
    assert (settings.width, settings.depth) == (5120, 5 if "mnist" in name else 6)
    assert settings.hidden == (512 if head else None)
    # Only heads have a ramp of the radius: over 500 epochs, curved for 0.4 of them.
    assert settings.warmup_epochs == 0 and settings.annealing_epochs == (500 if head else 0)
    assert settings.annealing_middle == (0.4 if head else 0.25)
    second = name.startswith("linf-dist")
    found = (settings.optimizer, settings.learning_rate, settings.weight_decay)
    assert found == (("adam", 0.03, 0) if second else ("adamw", 0.02, 0.02))
    assert 0.03 * objective.scale_rate == pytest.approx(0.006 if second else 0.03)
    assert (settings.batch_size, settings.beta2, settings.optimizer_eps) == (512, 0.99, 1e-10)
    assert (settings.decay, settings.clip, settings.l1) == ("cosine", None, 0)
    passes_on = second or (name.startswith("mnist"))
    assert (settings.initialization == "identity") == passes_on


def test_the_preset_of_auto_lirpa():
    settings = resolved("crown-ibp/cifar10-8-255")
    assert settings.train_eps == Fraction("8.8") / 255
    schedule = (settings.epochs, settings.warmup_epochs, settings.annealing_epochs)
    assert schedule == (2000, 100, 801) and settings.annealing_middle == 0.4
    assert (settings.batch_size, settings.learning_rate, settings.clip) == (256, 5e-4, 8)
    assert (settings.decay_epochs, settings.decay_factor) == ((1400, 1700), 0.1)
    assert (settings.regularizer_weight, settings.natural_weight, settings.l1) == (0, 0, 0)
    assert settings.initialization == "default"
    objective = settings.objective()
    assert (objective.loss, objective.bounds, objective.end_beta) == ("fused", "crown-ibp", 0)
    assert (objective.start_kappa, objective.end_kappa) == (0, 0)


@pytest.mark.parametrize(
    ("setting", "radius"),
    [("mnist-0.1", "0.2"), ("mnist-0.3", "0.4"), ("cifar10-2-255", "0.01")],
)
def test_the_presets_of_diffai(setting, radius):
    """The schedule by epochs is in `test_training_zonotopes`."""
    settings = resolved(f"diffai/{setting}")
    assert settings.net == "convsmall" and settings.train_eps == Fraction(radius)
    schedule = (settings.epochs, settings.warmup_epochs, settings.annealing_epochs)
    assert schedule == (420, 20, 180) and settings.annealing == "linear"
    found = (settings.batch_size, settings.optimizer, settings.learning_rate, settings.clip)
    assert found == (50, "adam", 1e-3, 1)
    objective = settings.objective()
    assert (objective.domain, objective.relu, objective.loss) == ("box", "box", "outputs")
    assert (objective.center, objective.steps) == ("random", 3)
    assert (objective.start_ratio, objective.end_ratio) == (0, 1)
    assert (objective.start_weight, objective.end_weight) == (0, 0.5)
    assert (objective.delay, objective.attack_ready) == pytest.approx((30 / 180, 100 / 180))


@pytest.mark.parametrize("setting", ["mnist-0.1", "cifar10-2-255", "cifar10-8-255"])
def test_the_presets_of_cap(setting):
    settings = resolved(f"cap/{setting}")
    assert settings.train_eps == settings.eps and settings.objective().projections == 50
    assert network_arguments(f"cap/{setting}") == network_arguments("diffai/mnist-0.1")
    assert (settings.epochs, settings.warmup_epochs, settings.annealing_epochs) == (60, 0, 20)
    assert (settings.annealing, settings.batch_size) == ("linear", 50)
    # Halved every ten epochs after the ramp.
    assert (settings.decay_epochs, settings.decay_factor) == ((30, 40, 50), 0.5)
    found = (settings.optimizer, settings.learning_rate, settings.weight_decay, settings.clip)
    if setting == "mnist-0.1":
        assert found == ("adam", 1e-3, 0, None)
    else:
        assert found == ("sgd", 0.05, 5e-4, 1) and settings.momentum == 0.9


@pytest.mark.parametrize("setting", ["mnist-0.1", "mnist-0.3"])
def test_the_weights_of_arow_and_mart_are_those_of_the_scripts(setting):
    """Their defaults, 7 and 5, are in no script."""
    for method in ("arow", "mart"):
        assert resolved(f"laptop/{setting}-cnn3-{method}").objective().weight == 2
