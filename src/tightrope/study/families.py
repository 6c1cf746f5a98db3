"""The families of runs that the experiments draw from, with how each is examined.

Sample counts and time limits are part of the family: a run is certified once, whoever needs it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tightrope.study.plans import Plan, vary
from tightrope.training.objectives import METHODS, Guarantee
from tightrope.training.presets import preset_names

ALL = 10_000
CERTIFIED = ("ibp", "sabr", "taps", "staps")
# Estimates that cost little; attacks on the whole network are part of the certification.
CHEAP = ("natural", "ibp", "taps")
EVERY = ("natural", "ibp", "pgd", "sabr", "taps", "staps")

# Linear bounds before the attack: each sample that they prove saves all its steps.
STAGES = ("ibp", "crown-ibp", "attack", "alpha", "bab")
# Tiny networks are decided in full, whatever the attack finds, so a short one will do.
COMPLETE = {"stages": STAGES, "steps": 50, "restarts": 2}

# Minutes of one thread, training only, measured or estimated from single steps.
_TINY = {"ibp": 4, "pgd": 8, "sabr": 11, "taps": 10, "staps": 17}
_CNN3 = {"ibp": 4, "pgd": 10, "sabr": 12, "mtl-ibp": 6, "taps": 28, "staps": 32}
_CNN3 |= {"cc-ibp": 6, "exp-ibp": 6, "ibp-r": 10, "crown-ibp": 15, "noise": 5}
_CNN3 |= {"ad-cert": 7, "cc-dist": 7, "arow": 10, "mart": 10}
_CNN7 = {"ibp": 8, "pgd": 20, "sabr": 25, "mtl-ibp": 15, "taps": 40, "staps": 50}
# By ReLUs in the classifier, with certification.
_NARROW = (3, 4, 6, 7, 9, 14, 16)

# Helpers as rows, by key: how they are written, settings, and minutes as for the others. What is
# published is the weight of EDAC, of CTBench's scripts for MNIST at 0.1.
HELPERS: dict[str, tuple[str, dict[str, Any], float]] = {
    "rgs": ("RGS", {"smoothing": "rgs", "smoothing_pairs": 1}, 56),
    "pgpe": ("PGPE", {"smoothing": "pgpe", "smoothing_pairs": 1}, 56),
    "swa": ("SWA", {"select": "last", "average_from": 4}, 28),
    "ema": ("EMA", {"select": "last", "average_from": 4, "average_decay": 0.999}, 28),
    "sam": ("SAM", {"sam_rho": 0.05}, 56),
    "tightness": ("tightness", {"tightness_weight": 1e-5}, 45),
    "edac": ("EDAC", {"edac_weight": 0.1}, 45),
}

SETTINGS = ("mnist-0.1", "mnist-0.3", "cifar10-2-255", "cifar10-8-255", "tinyimagenet-1-255")
NETS = {"mnist": ("cnn3", "cnn7"), "cifar10": ("cnn5",)}
RADIUS = {
    "mnist-0.1": "0.1",
    "mnist-0.3": "0.3",
    "cifar10-2-255": "2/255",
    "cifar10-8-255": "8/255",
    "tinyimagenet-1-255": "1/255",
}


def tiny(method: str, seed: int = 0, *, exact: int = 0, milp: int = 0) -> Plan:
    """The network of the precision figure on its full schedule, evaluated at 0.05."""
    plan = Plan(
        f"tiny-{method}",
        f"paper/tiny-{method}",
        certify={"eps": "0.05", "samples": ALL, "timeout": 30.0, **COMPLETE},
        estimate={"estimators": EVERY, "samples": ALL},
        exact={"samples": exact, "milp": milp} if exact else {},
        minutes=_TINY[method] + 2 + exact * 0.005,
    )
    return vary(plan, seed)


def short(method: str = "taps", **options: Any) -> Plan:
    """The same network on a third of the schedule, evaluated at the radius of training."""
    plan = Plan(
        f"short-{method}",
        f"paper/tiny-{method}",
        {"epochs": 25, "annealing_epochs": 7, "decay_epochs": (18, 21)},
        certify={"eps": "0.1", "samples": ALL, "timeout": 10.0, **COMPLETE},
        estimate={"estimators": CHEAP, "samples": ALL},
        minutes=2 if method == "ibp" else 4 + _attack_minutes(options, 0.05),
    )
    return vary(plan, **options)


def equal(method: str = "taps", **options: Any) -> Plan:
    """CNN3 on the equal budget: 10,000 images, 15 epochs, radius 0.1."""
    plan = Plan(
        f"equal-{method}",
        f"equal-budget-{method}",
        certify={"eps": "0.1", "samples": 500, "timeout": 3.0, "stages": STAGES},
        estimate={"estimators": CHEAP, "samples": ALL},
        minutes=3 if method == "ibp" else 8 if options.get("classifier_relus") == 2 else 5,
    )
    return vary(plan, **options)


def trained(setting: str, scale: str) -> dict[str, dict[str, Plan]]:
    """Return the runs of a setting by group and method: one for each preset that there is.

    On a laptop a group is a network; methods that have one of their own stand in the first.
    """
    if scale == "paper":
        return {setting: {m: paper(setting, m) for m in METHODS if home(setting, m)}}
    names, groups = {*preset_names()}, dict[str, dict[str, Plan]]()
    for net in NETS.get(setting.partition("-")[0], ()):
        group = f"{setting}-{net}"
        groups[group] = {
            m: laptop(setting, net, m) for m in METHODS if f"laptop/{group}-{m}" in names
        }
    own = {m: laptop(setting, "", m) for m in METHODS if f"laptop/{setting}-{m}" in names}
    for group in [*groups][:1]:
        groups[group] |= own
    return groups


def laptop(setting: str, net: str, method: str, **options: Any) -> Plan:
    """A run of the laptop presets: a smaller network, a shorter schedule."""
    cifar = setting.startswith("cifar10")
    minutes = (_CNN3 if net == "cnn3" else _CNN7).get(method, 30)
    name = "-".join(part for part in (setting, net, method) if part)
    if METHODS[method].guarantee is Guarantee.PROBABILISTIC:
        votes = {"sigma": 0.25, "draws": 1000, "samples": 500}
        return Plan(name, f"laptop/{name}", smooth=votes, minutes=minutes)
    plan = Plan(
        name,
        f"laptop/{name}",
        certify={"eps": RADIUS[setting], "samples": 1000, "timeout": 3.0, "stages": STAGES},
        estimate={"estimators": CHEAP, "samples": 1000} if net else {},
        minutes=minutes + (40 if METHODS[method].guarantee is Guarantee.NONE else 10),
        teacher=f"{setting}-{net}-pgd" if METHODS[method].needs_teacher else None,
        optional="cifar10" if cifar else None,
    )
    return vary(plan, **options)


def helped(key: str) -> Plan:
    """A run of TAPS on MNIST at 0.1 with a helper beside it."""
    plan = laptop("mnist-0.1", "cnn3", "taps")
    _, settings, minutes = HELPERS[key]
    return replace(plan, name=f"helped-{key}", settings=settings, estimate={}, minutes=minutes + 10)


def narrow(relus: int) -> Plan:
    """A CNN7 of half the laptop presets' width, on half their data, with any split.

    The more of the network the latent attack covers, the longer it takes, so it has half their
    steps, twice as long.
    """
    plan = Plan(
        "narrow-taps",
        "laptop/mnist-0.1-cnn7-taps",
        {"train_samples": 10_000, "width": 8, "hidden": 64, "taps.steps": 5},
        certify={"eps": "0.1", "samples": 500, "timeout": 3.0, "stages": STAGES},
        estimate={"estimators": CHEAP, "samples": 1000},
        minutes=_NARROW[relus],
    )
    return vary(plan, classifier_relus=relus)


def home(setting: str, method: str) -> str | None:
    """Return the preset of a method's own publication, or of a later one; None: there is none."""
    names = {*preset_names()}
    families = (f"{family}/{setting}-{method}" for family in ("paper", "expressive", "ctbench"))
    return next((name for name in (*families, f"{method}/{setting}") if name in names), None)


def paper(setting: str, method: str, seed: int = 0, **options: Any) -> Plan:
    """A run of the paper's size; methods that it does not have, as they were published."""
    plan = Plan(
        f"{setting}-{method}",
        home(setting, method) or f"paper/{setting}-{method}",
        certify={"eps": RADIUS[setting], "samples": ALL, "timeout": 1000.0, "stages": STAGES},
        estimate={"estimators": CHEAP, "samples": ALL},
        minutes=1000,
    )
    return vary(plan, seed, **options)


def _attack_minutes(options: dict[str, Any], each: float) -> float:
    """Return what a stronger latent attack costs in addition."""
    return each * max(0, options.get("steps", 20) * options.get("restarts", 1) - 20)
