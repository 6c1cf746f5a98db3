"""The experiments are all there, and what they train exists, agrees and is named by what it is."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from tightrope import errors
from tightrope.study import families
from tightrope.study.experiment import SCALES
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.plans import Plan, adjust, vary
from tightrope.training.presets import load_preset, preset_names
from tightrope.training.settings import Settings

NAMES = (
    *("precision", "main", "weight", "split", "connector", "estimators", "attack-strength"),
    *("bound-gap", "proxy", "trainability", "repeatability", "cost"),
)
CASES = [(name, scale) for name in NAMES for scale in SCALES]


def test_every_experiment_is_there() -> None:
    assert tuple(EXPERIMENTS) == NAMES


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_experiments_say_what_they_are(name: str, scale: str) -> None:
    experiment = EXPERIMENTS[name]
    assert experiment.name == name and experiment.minutes(scale) >= 1
    assert experiment.claim.endswith(".") and experiment.claim.count(".") <= 2
    assert any(word in experiment.where for word in ("Figure", "Table"))


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_plans_can_be_trained(name: str, scale: str) -> None:
    plans = EXPERIMENTS[name].plans(scale)
    assert bool(plans) == (name not in ("proxy", "cost"))
    assert len({plan.name for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.preset in preset_names()
        settings = Settings.parse(plan.wanted())
        assert settings.seed == plan.seed and settings.method == plan.method
        assert pickle.loads(pickle.dumps(plan)) == plan  # for the process that makes it


@pytest.mark.parametrize("scale", SCALES)
def test_runs_of_one_name_are_the_same_run(scale: str) -> None:
    known: dict[str, Plan] = {}
    owners: dict[str, str] = {}
    for experiment in EXPERIMENTS.values():
        for plan in experiment.plans(scale):
            # What is measured in addition may differ: it lies in files of its own.
            same = replace(plan, estimate={}, exact={}, splits={}, minutes=0)
            assert known.setdefault(plan.name, same) == same
            settings = str(Settings.parse(plan.wanted()).to_table())
            assert owners.setdefault(settings, plan.name) == plan.name


def test_the_committed_results_fit_into_five_hours() -> None:
    chosen: dict[str, float] = {}
    for name in ("precision", "connector", "estimators", "attack-strength", "weight", "bound-gap"):
        for plan in EXPERIMENTS[name].plans("laptop"):
            chosen[plan.name] = max(plan.minutes, chosen.get(plan.name, 0.0))
    for plan in EXPERIMENTS["main"].plans("laptop"):
        known = plan.method in (*families.CERTIFIED, "pgd", "mtl-ibp")
        if known and plan.name.startswith("mnist-0.1-cnn3-"):
            chosen[plan.name] = plan.minutes
    assert sum(chosen.values()) / 2 <= 300
    precision = EXPERIMENTS["precision"]
    assert precision.minutes("laptop") <= 150


def test_the_main_table_fits_into_a_day() -> None:
    assert EXPERIMENTS["main"].minutes("laptop") <= 24 * 60


def test_main_takes_every_method_that_has_a_preset() -> None:
    """Those with a guarantee and those without in one table, votes in another."""
    for scale in SCALES:
        for setting in families.SETTINGS:
            for found in families.trained(setting, scale).values():
                assert {plan.method for plan in found.values()} == {*found}
    plans = {plan.preset: plan for plan in EXPERIMENTS["main"].plans("laptop")}
    laptop = {name for name in preset_names() if name.startswith("laptop/")}
    assert {*plans} == {name for name in laptop if load_preset(name)["method"] != "standard"}
    (votes,) = (plan for plan in plans.values() if plan.method == "noise")
    assert votes.smooth and not votes.certify and not votes.estimate
    assert "smooth" in votes.commands(Path("run"))[1] and len(votes.commands(Path("run"))) == 2


def test_each_helper_stands_once_beside_taps() -> None:
    plans = {p.name: p for p in EXPERIMENTS["main"].plans("laptop") if p.name.startswith("helped-")}
    assert {*plans} == {f"helped-{key}" for key in families.HELPERS}
    plain = families.laptop("mnist-0.1", "cnn3", "taps")
    every = ("smoothing", "average_from", "sam_rho", "tightness_weight", "edac_weight")
    seen = set()
    for plan in plans.values():
        assert (plan.preset, plan.certify) == (plain.preset, plain.certify)
        settings = Settings.parse(plan.wanted()).resolve(normalize=False, network={})
        (used,) = (name for name in every if getattr(settings, name))
        assert {*plan.settings} & {*every} == {used}
        seen.add(used)
    assert seen == {*every}
    assert not any(p.name.startswith("helped") for p in EXPERIMENTS["main"].plans("paper"))


def test_precision_is_full_size() -> None:
    for plan in EXPERIMENTS["precision"].plans("laptop"):
        settings = Settings.parse(plan.wanted())
        assert (settings.net, settings.width, settings.epochs) == ("cnn3", 1, 70)
        assert plan.certify["samples"] == 10_000
        assert plan.certify["eps"] == "0.05" and "milp" not in plan.certify.get("stages", ())
        if plan.seed == 0:
            assert plan.estimate["samples"] == 10_000
            assert (plan.exact["samples"], plan.exact["milp"]) == (2000, 500)


def test_names_say_what_differs() -> None:
    base = families.paper("mnist-0.3", "taps")
    assert base.name == "mnist-0.3-taps" and base.settings == {}
    # The preset's own values change nothing.
    assert vary(base, classifier_relus=1, connector=0.5, restarts=1, estimators="multi") == base
    other = vary(
        base, 2, classifier_relus=3, connector=0.25, estimators="single", weight=float("inf")
    )
    assert other.name == "mnist-0.3-taps-relus3-connector0.25-single-weightinf-seed2"
    assert other.settings["taps.connector"] == 0.25 and other.seed == 2
    # Where the published split is another one, that one is the plain run.
    assert families.paper("mnist-0.1", "taps", classifier_relus=3).name == "mnist-0.1-taps"


def test_wishes_reach_the_runs_they_concern() -> None:
    plans = [families.tiny("ibp", exact=2000, milp=500), families.tiny("taps")]
    given = {"epochs": "2", "taps.steps": "3"}
    ibp, taps = adjust(plans, given, samples=7, timeout=2.5)
    assert ibp.settings == {"epochs": "2"} and taps.settings == given
    assert ibp.certify["samples"] == ibp.estimate["samples"] == ibp.exact["milp"] == 7
    assert ibp.certify["timeout"] == taps.certify["timeout"] == 2.5
    assert adjust(plans, {}) == plans


@pytest.mark.parametrize(
    ("setting", "message"),
    [("seed", "sets seed itself"), ("method", "sets method itself"), ("sabr.ratio", "none of")],
)
def test_wishes_that_make_no_sense_are_refused(setting: str, message: str) -> None:
    with pytest.raises(errors.UserError, match=message):
        adjust([families.tiny("taps")], {setting: "1"})


def test_commands_repeat_a_run() -> None:
    plan = families.short(connector=0.0)
    train, certify, estimate = plan.commands(Path("runs/x"))
    assert train == (
        "tightrope train --preset paper/tiny-taps --seed 0 --set epochs=25 "
        "--set annealing_epochs=7 --set decay_epochs=18,21 --set taps.connector=0 --out runs/x"
    )
    assert certify == (
        "tightrope certify runs/x --eps 0.1 --samples 10000 --timeout 10 "
        "--stages ibp,crown-ibp,attack,alpha,bab --steps 50 --restarts 2"
    )
    assert estimate == "tightrope estimate runs/x --eps 0.1"
    assert load_preset(plan.preset)["method"] == plan.method == "taps"
