"""The presets: they load, mean what their names say, and hold the published numbers."""

from __future__ import annotations

import dataclasses
import functools
import re
from fractions import Fraction
from importlib import resources

import pytest
from presets_read import NAMED, NAMES, SETTINGS, network_arguments, resolved

from tightrope import data, nets
from tightrope.graph import Graph, trace
from tightrope.radius import parse_radius
from tightrope.training.objectives import METHODS
from tightrope.training.settings import Settings

pytestmark = pytest.mark.usefixtures("one_thread")
OWN_NETS = ("colt", "sortnet", "diffai", "cap")
SCHEDULES = {  # epochs, epochs at radius 0, ramp, decays, batch
    "mnist": (70, 0, 20, (50, 60), 256),
    "cifar10": (160, 1, 80, (120, 140), 128),
    "tinyimagenet": (80, 1, 20, (60, 70), 128),
}


def text_of(name: str) -> str:
    file = resources.files("tightrope.training.presets").joinpath(*f"{name}.toml".split("/"))
    return file.read_text(encoding="utf-8")


@functools.cache
def input_of(dataset: str) -> tuple[tuple[int, ...], int]:
    described = {d.name: (d.shape, d.classes) for d in data.describe()}
    return described[dataset]


@functools.cache
def narrow_graph(net: str, shape: tuple[int, ...], batch_norm: bool) -> Graph:
    """Return a network with one channel: the splits are those of the wide one."""
    arguments = nets.find(net).arguments
    given = {k: 1 for k in arguments if k in ("width", "hidden")}
    given |= {"batch_norm": batch_norm} if "batch_norm" in arguments else {}
    return trace(nets.build(net, shape, 3, **given), shape)


def radius_of(setting: str) -> Fraction:
    number = setting.partition("-")[2]
    return parse_radius(number.replace("-", "/"))


def named(family: str, *methods: str) -> list[str]:
    return [n for n, m in NAMED.items() if m["family"] == family and m["method"] in methods]


def test_the_families_are_complete():
    everything = {
        f"paper/{s}-{m}" for s in SETTINGS for m in ("ibp", "sabr", "taps", "staps", "pgd")
    }
    everything |= {f"paper/{s}-multi-pgd" for s in SETTINGS[:4]}
    everything |= {f"expressive/{s}-{m}" for s in SETTINGS for m in ("mtl-ibp", "cc-ibp")}
    everything |= {f"expressive/{s}-exp-ibp" for s in SETTINGS[2:]}
    everything |= {"ibp-r/cifar10-2-255", "ibp-r/cifar10-8-255"}
    benchmarked = ("ibp", "crown-ibp", "sabr", "taps", "staps", "mtl-ibp", "pgd")
    everything |= {f"ctbench/{s}-{m}" for s in SETTINGS for m in benchmarked}
    everything |= {
        f"ctbench/{s}-{m}" for s in (SETTINGS[0], SETTINGS[4]) for m in ("cc-ibp", "exp-ibp")
    }
    groups = [f"{s}-{net}" for s in SETTINGS[:2] for net in ("cnn3", "cnn7")]
    groups += [f"{s}-cnn5" for s in SETTINGS[2:4]]
    everything |= {f"laptop/{group}-{m}" for group in groups for m in benchmarked}
    more = ("cc-ibp", "exp-ibp", "ibp-r", "ad-cert", "cc-dist", "arow", "mart")
    everything |= {f"laptop/{s}-cnn3-{m}" for s in SETTINGS[:2] for m in more}
    everything |= {"laptop/mnist-0.1-cnn3-noise", *(f"colt/{s}" for s in SETTINGS[2:4])}
    everything |= {f"sortnet/{s}" for s in SETTINGS[:4]}
    everything |= {f"laptop/{s}-{m}" for s in SETTINGS[:2] for m in OWN_NETS}
    everything |= {f"diffai/{s}" for s in SETTINGS[:3]} | {f"crown-ibp/{SETTINGS[3]}"}
    everything |= {f"cap/{s}" for s in (SETTINGS[0], *SETTINGS[2:4])}
    assert set(NAMED) == everything
    assert {n for n in NAMES if n not in NAMED} == {
        "colt-short",
        "demo",
        "equal-budget-ibp",
        "equal-budget-taps",
        *(f"paper/tiny-{m}" for m in ("ibp", "pgd", "sabr", "taps", "staps")),
        *(f"sortnet/linf-dist-{s}" for s in SETTINGS[:4]),
        *(f"sortnet/mlp-{s}" for s in SETTINGS[2:]),
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is_and_where_its_numbers_come_from(name):
    first, second, *rest = text_of(name).splitlines()
    assert re.fullmatch(r"# \S.{20,}\.", first)
    assert second.startswith("# ") or name == "demo"  # the demonstration needs no source
    assert all(len(line) <= 100 for line in (first, second, *rest))
    assert not re.search(r"/(work|home|root|tmp|mnt)/|[A-Z]:\\", text_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_it_resolves_and_stays_the_same_in_a_run_folder(name):
    settings = resolved(name)
    assert settings.method in METHODS
    assert settings.train_eps is not None and settings.train_eps >= settings.eps
    assert settings.seed == 0 and settings.device == "auto" and settings.data_dir is None
    spread = {k: v for k, v in settings.to_table().items() if not isinstance(v, dict)}
    options = {
        f"{section}.{option}": value
        for section, table in settings.to_table().items()
        if isinstance(table, dict)
        for option, value in table.items()
    }
    again = Settings.parse(spread | options)
    assert dataclasses.replace(again, options={}) == dataclasses.replace(settings, options={})
    assert again.objective() == settings.objective()


@pytest.mark.parametrize("name", sorted(NAMED))
def test_the_name_is_true(name):
    match, settings = NAMED[name], resolved(name)
    assert settings.eps == radius_of(match["setting"])
    assert settings.data.removesuffix("-64") == match["setting"].partition("-")[0]
    assert settings.method == (match["method"] or match["family"])
    if match["net"]:
        assert settings.net == match["net"]
    elif match["family"] not in ("ibp-r", "laptop", *OWN_NETS):
        assert settings.net in ("cnn7", "cnn7-tin")
        assert network_arguments(name) == nets.find(settings.net).arguments
    first = text_of(name).splitlines()[0]
    assert match["setting"].partition("-")[2].replace("-", "/") in first
    assert settings.method.removeprefix("multi-").upper() in first.upper()


@pytest.mark.parametrize("name", NAMES)
def test_the_network_fits_the_data_and_has_the_split(name):
    settings = resolved(name)
    shape, _ = input_of(settings.data)
    graph = narrow_graph(settings.net, shape, bool(settings.batch_norm))
    objective = settings.objective()
    if settings.method in ("taps", "staps"):
        objective.check(graph)
        classifier = graph.split(objective.classifier_relus)[1]
        assert len(classifier.relus) == objective.classifier_relus >= 1


@pytest.mark.parametrize("name", NAMES)
def test_crops_and_normalisation(name):
    settings, family = resolved(name), name.partition("/")[0]
    if settings.data.startswith("tinyimagenet"):
        assert settings.data == ("tinyimagenet" if family == "paper" else "tinyimagenet-64")
    if settings.data != "mnist":
        assert settings.normalize is True
    elif family in ("expressive", "laptop", "cap"):
        assert settings.normalize is (settings.method == "sortnet")
    elif settings.method == "sabr" and not name.startswith("paper/tiny"):
        assert settings.normalize is (family == "ctbench")
    else:
        assert settings.normalize is True


# The paper, Appendix B: ReLUs in the classifier, L1, w; for STAPS also tau / eps.
TAPS = {
    "mnist-0.1": (3, 1e-6, 5),
    "mnist-0.3": (1, 0, 5),
    "cifar10-2-255": (5, 2e-6, 5),
    "cifar10-8-255": (1, 2e-6, 5),
    "tinyimagenet-1-255": (1, 0, 5),
}
STAPS = {
    "mnist-0.1": (1, 2e-5, 5, 0.4),
    "mnist-0.3": (1, 2e-6, 5, 0.6),
    "cifar10-2-255": (1, 2e-6, 2, 0.1),
    "cifar10-8-255": (1, 2e-6, 5, 0.7),
    "tinyimagenet-1-255": (2, 1e-6, 5, 0.6),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_papers_table_of_taps(setting):
    settings = resolved(f"paper/{setting}-taps")
    objective = settings.objective()
    assert (objective.classifier_relus, settings.l1, objective.weight) == TAPS[setting]
    latent_attack_of_the_paper(objective)
    assert objective.shrink == 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_papers_table_of_staps(setting):
    settings = resolved(f"paper/{setting}-staps")
    objective = settings.objective()
    found = (objective.classifier_relus, settings.l1, objective.weight, objective.ratio)
    assert found == STAPS[setting]
    latent_attack_of_the_paper(objective)
    assert (objective.attack_steps, objective.attack_restarts) == (10, 1)
    assert (objective.attack_step_size, objective.attack_step_decay) == (0.2, 1)
    assert objective.shrink == (0.8 if setting == "cifar10-2-255" else 1)


def latent_attack_of_the_paper(objective):
    assert (objective.steps, objective.restarts, objective.step_decay) == (20, 1, 0.1)
    assert objective.step_size is None and objective.connector == 0.5
    assert (objective.estimators, objective.loss, objective.scale) == ("multi", "product", "plain")


@pytest.mark.parametrize("name", named("paper", "ibp", "taps", "staps", "pgd", "multi-pgd"))
def test_the_papers_schedules(name):
    settings, setting = resolved(name), NAMED[name]["setting"]
    epochs, warmup, ramp, decays, batch = SCHEDULES[setting.partition("-")[0]]
    assert (settings.epochs, settings.warmup_epochs) == (epochs, warmup)
    assert (settings.annealing_epochs, settings.annealing) == (ramp, "smooth")
    assert (settings.decay_epochs, settings.decay_factor) == (decays, 0.2)
    assert (settings.batch_size, settings.clip) == (batch, 10)
    assert (settings.optimizer, settings.learning_rate) == ("adam", 5e-4)
    assert (settings.validation, settings.select) == (0.1, "best")
    radius = {"mnist-0.1": Fraction(1, 5), "mnist-0.3": Fraction(2, 5)}.get(setting, settings.eps)
    assert settings.train_eps == radius
    if settings.objective().propagates_boxes:
        weight = 0.2 if setting.startswith("tiny") else 0.5
        assert settings.regularizer_weight == weight and settings.initialization == "shi"


# SABR's repository: lambda, L1, epochs, ramp, decays.
SABR = {
    "mnist-0.1": (0.4, 1e-5, 70, 20, (50, 60)),
    "mnist-0.3": (0.6, 1e-6, 70, 20, (50, 60)),
    "cifar10-2-255": (0.1, 1e-6, 160, 80, (120, 140)),
    "cifar10-8-255": (0.7, 0, 180, 80, (140, 160)),
    "tinyimagenet-1-255": (0.4, 1e-6, 180, 80, (140, 160)),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_presets_of_sabr(setting):
    settings = resolved(f"paper/{setting}-sabr")
    objective = settings.objective()
    found = (objective.ratio, settings.l1, settings.epochs, settings.annealing_epochs)
    assert (*found, settings.decay_epochs) == SABR[setting]
    assert settings.train_eps == settings.eps and settings.clip is None
    assert (objective.steps, objective.step_size, objective.step_decay) == (8, 0.5, 0.1)
    assert objective.shrink == (0.8 if setting == "cifar10-2-255" else 1)


# Expressive losses: alpha, L1.
EXPRESSIVE = {
    "mnist-0.1": {"cc-ibp": (0.1, 2e-6), "mtl-ibp": (1e-2, 1e-5)},
    "mnist-0.3": {"cc-ibp": (0.3, 3e-6), "mtl-ibp": (8e-2, 1e-6)},
    "cifar10-2-255": {
        "cc-ibp": (1e-2, 3e-6),
        "mtl-ibp": (4e-3, 3e-6),
        "exp-ibp": (9.5e-2, 4e-6),
    },
    "cifar10-8-255": {"cc-ibp": (0.5, 0), "mtl-ibp": (0.5, 1e-7), "exp-ibp": (0.5, 0)},
    "tinyimagenet-1-255": {
        "cc-ibp": (1e-2, 5e-5),
        "mtl-ibp": (1e-2, 5e-5),
        "exp-ibp": (4e-2, 5e-5),
    },
}


@pytest.mark.parametrize("name", named("expressive", "cc-ibp", "mtl-ibp", "exp-ibp"))
def test_the_presets_of_the_expressive_losses(name):
    settings, setting = resolved(name), NAMED[name]["setting"]
    objective = settings.objective()
    assert (objective.alpha, settings.l1) == EXPRESSIVE[setting][settings.method]
    attack = (objective.steps, objective.step_size, objective.attack_scale, objective.restarts)
    assert attack == ((8, 0.25, 2.1, 1) if setting == "cifar10-2-255" else (1, 10, 1, 1))
    factor = {"mnist-0.1": Fraction(2), "mnist-0.3": Fraction("1.334")}.get(setting, 1)
    assert settings.train_eps == factor * settings.eps
    assert (settings.select, settings.validation) == ("last", 0)


@pytest.mark.parametrize("setting,factor", [("cifar10-2-255", "2.1"), ("cifar10-8-255", "1.7")])
def test_the_presets_of_ibp_r(setting, factor):
    settings = resolved(f"ibp-r/{setting}")
    assert settings.train_eps == Fraction(factor) * settings.eps
    assert (settings.epochs, settings.annealing_epochs) == (800, 600)
    assert (settings.annealing, settings.optimizer, settings.momentum) == ("linear", "sgd", 0.9)
    assert settings.decay_epochs == tuple(range(601, 800)) and settings.decay_factor == 0.95
    assert settings.batch_norm is False and settings.initialization == "default"


@pytest.mark.parametrize(
    ("setting", "relus", "growth", "rate", "rho", "l1", "radii"),
    [
        ("cifar10-2-255", 3, 1.1, 0.75, 5e-3, 1e-5, (1.398, 1.271, 1.155, 1.05)),
        ("cifar10-8-255", 2, 1.2, 0.5, 3e-3, 5e-6, (1.512, 1.26, 1.05)),
    ],
)
def test_the_presets_of_colt(setting, relus, growth, rate, rho, l1, radii):
    settings = resolved(f"colt/{setting}")
    stages = settings.objective().stages
    assert [s.frozen for s in stages] == list(range(relus + 1))
    assert [float(settings.train_eps / settings.eps) * s.radius for s in stages] == pytest.approx(
        radii, abs=1e-3
    )
    objective = settings.objective()
    found = (objective.radius_factor, objective.rate_factor, objective.area_weight, settings.l1)
    assert found == (growth, rate, rho, l1)
    assert (objective.projections, objective.steps, objective.step_size) == (50, 7, 0.25)
    # 200 epochs each, the first 60 of them mixed, then halved every 10.
    assert settings.epochs == 200 * len(stages) and objective.mix * 200 == 60
    assert settings.decay_epochs == tuple(range(70, 200, 10)) and settings.decay_factor == 0.5
    assert (settings.optimizer, settings.learning_rate, settings.momentum) == ("sgd", 0.03, 0.9)
    objective.check(narrow_graph(settings.net, (3, 32, 32), False))


# CTBench: L1, weight of the clean loss, steps and restarts of the attacks; of all methods.
BENCHMARK = {
    "mnist-0.1": {
        "ibp": (2e-6, 0.3),
        "crown-ibp": (5e-6, 0.3),
        "sabr": (1e-6, 0.3, 10),
        "taps": (2e-6, 0.3, 10),
        "staps": (5e-6, 0.3, 10),
        "mtl-ibp": (1e-5, 0.3, 10),
    },
    "mnist-0.3": {
        "ibp": (2e-6, 0.3),
        "crown-ibp": (1e-6, 0.3),
        "sabr": (2e-6, 0, 5),
        "taps": (0, 0, 5),
        "staps": (1e-5, 0, 10),
        "mtl-ibp": (1e-6, 0, 1),
    },
    "cifar10-2-255": {
        "ibp": (1e-6, 0.2),
        "crown-ibp": (3e-6, 0),
        "sabr": (1e-6, 0, 5),
        "taps": (2e-6, 0, 8),
        "staps": (1e-6, 0, 8),
        "mtl-ibp": (3e-6, 0.1, 1),
    },
    "cifar10-8-255": {
        "ibp": (0, 0),
        "crown-ibp": (0, 0),
        "sabr": (0, 0, 5),
        "taps": (0, 0, 10),
        "staps": (0, 0, 10),
        "mtl-ibp": (0, 0, 1),
    },
    "tinyimagenet-1-255": {
        "ibp": (1e-5, 0),
        "crown-ibp": (2e-5, 0),
        "sabr": (5e-5, 0, 1),
        "taps": (5e-5, 0.3, 1),
        "staps": (5e-5, 0, 1),
        "mtl-ibp": (5e-5, 0.3, 1),
    },
}
SPLITS = {  # ReLUs in the classifier and w of TAPS; of STAPS, and its lambda
    "mnist-0.1": (3, 4, 1, 4, 0.4),
    "mnist-0.3": (2, 4, 1, 4, 0.6),
    "cifar10-2-255": (5, 4, 1, 2, 0.1),
    "cifar10-8-255": (1, 2, 1, 2, 0.9),
    "tinyimagenet-1-255": (1, 8, 1, 4, 0.6),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_presets_of_ctbench(setting):
    for method, (l1, natural, *steps) in BENCHMARK[setting].items():
        settings = resolved(f"ctbench/{setting}-{method}")
        objective = settings.objective()
        assert (settings.l1, settings.natural_weight) == (l1, natural), method
        if steps:
            assert (objective.steps, objective.restarts) == (*steps, 3), method
    taps = resolved(f"ctbench/{setting}-taps").objective()
    staps = resolved(f"ctbench/{setting}-staps").objective()
    splits = (taps.classifier_relus, taps.weight, staps.classifier_relus, staps.weight)
    assert (*splits, staps.ratio) == SPLITS[setting]
    assert (staps.attack_steps, staps.attack_restarts) == (staps.steps, staps.restarts)
    assert taps.step_decay == staps.step_decay == 0.2
    crown = resolved(f"ctbench/{setting}-crown-ibp").objective()
    assert (crown.end_beta, crown.loss, crown.bounds) == (1, "fused", "crown-ibp")


def test_what_ctbench_has_in_common():
    schedules = SCHEDULES | {"tinyimagenet": (160, 1, 80, (120, 140), 128)}
    averaged = {"mnist-0.1": 65, "mnist-0.3": 65, "cifar10-2-255": 150, "cifar10-8-255": 225}
    for name, match in NAMED.items():
        if match["family"] != "ctbench":
            continue
        settings, setting = resolved(name), match["setting"]
        assert settings.precise_bn is (name != "ctbench/cifar10-2-255-staps"), name
        interpolates = settings.method.endswith("-ibp")
        if settings.method == "crown-ibp":  # averaged on TinyImageNet alone
            interpolates = setting == "tinyimagenet-1-255"
        assert settings.select == ("last" if interpolates else "best"), name
        if name == "ctbench/tinyimagenet-1-255-exp-ibp":  # a script of its own
            assert (settings.epochs, settings.average_from) == (80, None)
            continue
        assert settings.average_from == (averaged.get(setting, 150) if interpolates else None)
        schedule = schedules[setting.partition("-")[0]]
        if setting == "cifar10-8-255":
            schedule = (240, 1, 120, (200, 220), 128)
        found = (settings.epochs, settings.warmup_epochs, settings.annealing_epochs)
        assert (*found, settings.decay_epochs, settings.batch_size) == schedule, name
