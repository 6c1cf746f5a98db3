"""The laptop presets: equal terms, shortened schedules, a budget."""

from __future__ import annotations

import pytest
from presets_read import NAMED, NAMES, resolved

pytestmark = pytest.mark.usefixtures("one_thread")


# --- laptop -----------------------------------------------------------------------------------

LAPTOP = sorted({f"{m['setting']}-{m['net']}" for m in NAMED.values() if m["net"]})
OF_THE_METHOD = ("method", "initialization", "l1", "options", "regularizer_weight")


@pytest.mark.parametrize("group", LAPTOP)
def test_methods_of_a_laptop_group_differ_in_nothing_else(group):
    members = [resolved(name) for name in NAMES if name.startswith(f"laptop/{group}-")]
    methods = {"ibp", "crown-ibp", "sabr", "taps", "staps", "mtl-ibp", "pgd"}
    assert {member.method for member in members} >= methods
    shared = [
        {k: v for k, v in vars(member).items() if k not in OF_THE_METHOD} for member in members
    ]
    assert all(other == shared[0] for other in shared)
    regularizers = {m.regularizer_weight for m in members if m.objective().propagates_boxes}
    assert regularizers == {0.5}


@pytest.mark.parametrize("group", LAPTOP)
def test_the_schedule_of_a_laptop_group_is_the_papers_shortened(group):
    settings = resolved(f"laptop/{group}-ibp")
    assert settings.annealing_epochs == round(settings.epochs * 2 / 7)
    assert settings.decay_epochs == (round(settings.epochs * 5 / 7), round(settings.epochs * 6 / 7))
    assert settings.clip == 10 and settings.train_eps == settings.eps


# Milliseconds of a step on two cores, estimated: SABR (its annealing) and STAPS, at the radius
# where they take longest.
STEP = {"cnn3": (240, 1300), "cnn7": (770, 1500), "cnn5": (460, 1300)}


@pytest.mark.parametrize("group", LAPTOP)
def test_the_slowest_method_of_a_laptop_group_has_a_budget(group):
    settings = resolved(f"laptop/{group}-staps")
    samples = settings.train_samples or {"mnist": 60_000, "cifar10": 50_000}[settings.data]
    iterations = int(samples * (1 - settings.validation)) // settings.batch_size
    easy, hard = STEP[settings.net]
    ramp = settings.annealing_epochs
    milliseconds = iterations * (ramp * easy + (settings.epochs - ramp) * hard)
    assert milliseconds < 25 * 60 * 1000
