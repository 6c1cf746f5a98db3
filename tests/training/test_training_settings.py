"""Settings: reading, refusing, completing, writing."""

import dataclasses
import math
from fractions import Fraction
from importlib import resources

import pytest
from small_trainings import resolve

from tightrope import nets
from tightrope.errors import UserError
from tightrope.training.objectives import IBP, PGD, Standard
from tightrope.training.presets import describe_presets, load_preset, preset_names
from tightrope.training.settings import Settings, describe_settings, flatten
from tightrope.training.training import NETWORK_ARGUMENTS

# --- reading ----------------------------------------------------------------------------------

READ = [
    # name, values as text and typed, result
    ("data", ["cifar10"], "cifar10"),
    ("data_dir", ["/some/where"], "/some/where"),
    ("data_dir", ["none", None], None),
    ("train_samples", ["512", 512], 512),
    ("train_samples", ["none", "None", None], None),
    ("validation", ["0.1", 0.1], 0.1),
    ("validation", ["5000", 5000], 5000),
    ("validation", ["0", 0], 0),
    ("net", ["cnn7"], "cnn7"),
    ("width", ["3", 3], 3),
    ("batch_norm", ["true", "True", "yes", "on", True], True),
    ("batch_norm", ["false", "no", "off", False], False),
    ("batch_norm", ["none", None], None),
    ("normalize", ["true", True], True),
    ("initialization", ["shi"], "shi"),
    ("initialization", ["none", None], None),
    ("eps", ["8/255", Fraction(8, 255)], Fraction(8, 255)),
    ("eps", ["0.3", 0.3], Fraction(3, 10)),
    ("train_eps", ["0.4", 0.4], Fraction(2, 5)),
    ("train_eps", ["none", None], None),
    ("epochs", ["160", 160], 160),
    ("warmup_epochs", ["0", 0], 0),
    ("annealing_epochs", ["0", 0], 0),
    ("annealing_epochs", ["none", None], None),
    ("annealing", ["linear"], "linear"),
    ("annealing_middle", ["0.4", 0.4], 0.4),
    ("batch_size", ["128", 128], 128),
    ("accumulate", ["4", 4], 4),
    ("optimizer", ["radam"], "radam"),
    ("learning_rate", ["5e-4", 5e-4, "0.0005"], 5e-4),
    ("teacher", ["runs/a"], "runs/a"),
    ("teacher", ["none", None], None),
    ("teacher_weights", ["0123abcd"], "0123abcd"),
    ("initialization", ["teacher"], "teacher"),
    ("learning_rate", ["1", 1], 1.0),
    ("momentum", ["0", 0], 0.0),
    ("weight_decay", ["1e-4", 1e-4], 1e-4),
    ("keep", ["70", 70], 70),
    ("beta2", ["0.99", 0.99], 0.99),
    ("optimizer_eps", ["1e-10", 1e-10], 1e-10),
    ("decay", ["cosine"], "cosine"),
    ("decay_epochs", ["50,60", "50, 60", "[50, 60]", "(50, 60)", [50, 60], (50, 60)], (50, 60)),
    ("decay_epochs", ["50", 50, [50]], (50,)),
    ("decay_epochs", ["", "[]", [], ()], ()),
    ("decay_epochs", ["none", None], None),
    ("decay_factor", ["0.2", 0.2], 0.2),
    ("clip", ["10", 10, 10.0], 10.0),
    ("clip", ["none", "None", None], None),
    ("l1", ["1e-6", 1e-6], 1e-6),
    ("regularizer_weight", ["0", 0], 0.0),
    ("natural_weight", ["0.3", 0.3], 0.3),
    ("precise_bn", ["true", True], True),
    ("average_from", ["65", 65], 65),
    ("average_from", ["none", None], None),
    ("average_decay", ["0.999", 0.999], 0.999),
    ("average_decay", ["none", None], None),
    ("smoothing", ["rgs"], "rgs"),
    ("smoothing", ["none", None], None),
    ("smoothing_sigma", ["0.1", 0.1], 0.1),
    ("smoothing_pairs", ["4", 4], 4),
    ("sam_rho", ["0.05", 0.05], 0.05),
    ("edac_weight", ["0.3", 0.3], 0.3),
    ("tightness_weight", ["1e-3", 1e-3], 1e-3),
    ("select", ["last"], "last"),
    ("seed", ["7", 7], 7),
    ("device", ["cpu"], "cpu"),
    ("search_precision", ["bf16"], "bf16"),
    ("deterministic", ["true", True], True),
]


@pytest.mark.parametrize(
    "name,value,expected", [(n, v, e) for n, values, e in READ for v in values], ids=repr
)
def test_text_and_typed_values_mean_the_same(name, value, expected):
    found = getattr(Settings.parse({name: value}), name)
    assert found == expected and type(found) is type(expected)


def test_every_setting_is_covered_here():
    names = {name for name, _, _ in describe_settings()}
    assert {name for name, _, _ in READ} | {"hidden", "depth", "blocks", "method"} == names
    assert names == {f.name for f in dataclasses.fields(Settings)} - {"options", "own_method"}
    assert all(text and "\n" not in text for _, _, text in describe_settings())


def test_nothing_given_means_the_defaults():
    assert Settings.parse({}) == Settings()
    assert Settings().objective() == IBP()


def test_options_of_the_method():
    for steps, size in (("20", "0.5"), (20, 0.5)):
        given = {"method": "pgd", "pgd.steps": steps, "pgd.step_size": size}
        settings = Settings.parse(given)
        assert settings.options == {"steps": 20, "restarts": 1, "step_size": 0.5}
        assert settings.objective() == PGD(steps=20, step_size=0.5)
    assert Settings.parse({"method": "pgd", "pgd.step_size": "none"}).objective() == PGD()
    assert Settings.parse({"method": "standard"}).objective() == Standard()


def test_flatten():
    assert flatten({"eps": 0.1, "pgd": {"steps": 3, "restarts": 2}}) == {
        "eps": 0.1,
        "pgd.steps": 3,
        "pgd.restarts": 2,
    }


# --- refusing ---------------------------------------------------------------------------------

REFUSED = {
    "train_samples": ["0", 0, -1, "x", 1.5, True, "1.0", math.nan],
    "validation": ["-1", -1, -0.1, "1.0", 1.0, 1.5, "1.5", "x", "nan", True, [0.1], "²"],
    "width": [0, "0", "x", 2.5],
    "hidden": [0, "many"],
    "depth": [0, -3],
    "blocks": [0],
    "batch_norm": ["maybe", 1, 0, "1", ""],
    "normalize": ["mean", 0.5],
    "initialization": ["kaiming", "", 3],
    "average_decay": [0, 1, "1.0", -0.1, "x", math.nan, True],
    "smoothing": ["sgd", "", 1],
    "smoothing_sigma": [0, -1, math.nan, math.inf],
    "smoothing_pairs": [0, "x", 1.5],
    "sam_rho": [-0.1, math.inf],
    "edac_weight": [-1, "much", math.nan],
    "tightness_weight": [-1, math.inf],
    "eps": ["0", 0, "2", -0.1, "8/", "abc", math.nan],
    "train_eps": ["0", "256/255", "abc"],
    "epochs": ["0", 0, "ten", 1.5, True, "1e2", ""],
    "warmup_epochs": [-1, "-1", 0.5],
    "annealing_epochs": [-1, "x"],
    "annealing": ["cosine", "", None, 3],
    "annealing_middle": [-0.1, 1.1, "x", math.nan],
    "batch_size": [1, 0, "1", "x"],
    "accumulate": [0, "0"],
    "optimizer": ["lion", "Adam", None],
    "learning_rate": [0, "0", -1e-3, "fast", math.nan, "nan", True, None, math.inf, "inf"],
    "momentum": [-0.1, 1.1, "x"],
    "weight_decay": [-1e-9, "x", math.inf],
    "decay_epochs": ["60,50", [60, 50], "50,50", "a,b", [1.5], "1.5", [-1], [True], "50;60"],
    "decay_factor": [0, -0.2, "x", math.inf],
    "clip": [0, "0", -1, "x", math.nan],
    "l1": [-1e-6, "x", math.nan, "inf"],
    "regularizer_weight": [-1, "x", "inf"],
    "precise_bn": ["x", 1, None],
    "select": ["first", "", True],
    "seed": [-1, "-1", "x", 0.5],
}


@pytest.mark.parametrize(
    "name,value", [(n, v) for n, values in REFUSED.items() for v in values], ids=repr
)
def test_refusals_name_the_setting_in_one_line(name, value):
    with pytest.raises(UserError) as caught:
        Settings.parse({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must ") and "\n" not in message


def test_refusals_quote_the_value():
    with pytest.raises(UserError, match=r"^epochs must be a whole number from 1 on, got 'ten'$"):
        Settings.parse({"epochs": "ten"})
    with pytest.raises(UserError, match=r"^optimizer must be one of adam, .*got 'a\\nb'$"):
        Settings.parse({"optimizer": "a\nb"})


@pytest.mark.parametrize("seed", [2**64, str(2**70)])
def test_seeds_that_torch_cannot_take(seed):
    with pytest.raises(UserError, match="seed"):
        Settings.parse({"seed": seed})


@pytest.mark.parametrize(
    "given,match",
    [
        ({"epoch": 3}, "unknown setting 'epoch'; did you mean 'epochs'"),
        ({"learnin_rate": 3}, "did you mean 'learning_rate'"),
        ({"zzzzzz": 1}, "unknown setting 'zzzzzz'; choose one of: .*epochs"),
        ({"options": {}}, "unknown setting 'options'"),
        ({"method": "ipb"}, "unknown method 'ipb'; did you mean 'ibp'"),
        ({"method": "xyzzy"}, "unknown method 'xyzzy'; choose one of: .*ibp.*standard"),
        ({"method": "pgd", "pgd.step": 1}, "unknown setting 'pgd.step'; did you mean 'pgd.steps'"),
        ({"method": "pgd", "steps": 1}, "unknown setting 'steps'"),
        ({"pgd.steps": 1}, "pgd.steps belongs to method 'pgd', but the method is 'ibp'"),
        ({"method": "standard", "pgd.steps": 1}, "belongs to method 'pgd', but .* 'standard'"),
        ({"ibp.weight": 1}, "method 'ibp' takes no options, got 'ibp.weight'"),
        ({"foo.bar": 1}, "unknown setting 'foo.bar'"),
        ({"method": "pgd", "pgd.steps": "x"}, "^pgd.steps must be a whole number"),
        ({"method": "pgd", "pgd.steps": 0}, "^pgd.steps must be at least 1, got 0"),
        (
            {"method": "pgd", "pgd.step_size": "x"},
            "^pgd.step_size must be a number, got 'x'",
        ),
        ({"method": "pgd", "pgd.step_size": -1}, "^pgd.step_size must be positive, got -1"),
        ({"method": 5}, "method"),
        ({"method": None}, "method"),
    ],
    ids=repr,
)
def test_unknown_names_and_options(given, match):
    with pytest.raises(UserError, match=match) as caught:
        Settings.parse(given)
    assert "\n" not in str(caught.value)


def test_no_message_speaks_of_absurd_limits():
    with pytest.raises(UserError) as caught:
        Settings.parse({"method": "pgd", "pgd.steps": "x"})
    assert "1000000000" not in str(caught.value)


# --- completing -------------------------------------------------------------------------------


def test_the_defaults_of_a_run_are_the_papers_mnist_schedule():
    settings = resolve()
    assert settings.epochs == 70 and settings.annealing_epochs == 20
    assert settings.decay_epochs == (50, 60) and settings.decay_factor == 0.2
    assert (settings.learning_rate, settings.clip, settings.batch_size) == (5e-4, 10.0, 256)
    assert settings.regularizer_weight == 0.5 and settings.optimizer == "adam"
    assert settings.train_eps == settings.eps == Fraction(1, 10)
    assert settings.initialization == "shi" and settings.annealing == "smooth"
    assert settings.weight_decay == 0 and settings.warmup_epochs == 0


@pytest.mark.parametrize(
    "epochs,annealing,decay",
    [
        (1, 0, (1,)),
        (2, 1, (1, 2)),
        (3, 1, (2, 3)),
        (7, 2, (5, 6)),
        (10, 3, (7, 9)),
        (70, 20, (50, 60)),
        (160, 46, (114, 137)),
    ],
)
def test_schedules_scale_with_the_number_of_epochs(epochs, annealing, decay):
    settings = resolve(epochs=epochs)
    assert (settings.annealing_epochs, settings.decay_epochs) == (annealing, decay)


@pytest.mark.parametrize("method", ["standard", "pgd"])
def test_methods_without_bounds_do_not_anneal(method):
    settings = resolve(method=method)
    assert settings.annealing_epochs == 0
    assert settings.initialization == "default"
    assert settings.decay_epochs == (50, 60)


def test_resolving_fills_what_is_open_and_keeps_what_is_given():
    given = {
        "train_eps": "0.2",
        "annealing_epochs": 5,
        "decay_epochs": [],
        "initialization": "default",
        "normalize": False,
        "width": 3,
    }
    network = {"width": 16, "batch_norm": True}
    settings = resolve(data_default=True, network=network, **given)
    assert settings.train_eps == Fraction(1, 5) and settings.eps == Fraction(1, 10)
    assert settings.annealing_epochs == 5 and settings.decay_epochs == ()
    assert settings.initialization == "default" and settings.normalize is False
    assert (settings.width, settings.batch_norm, settings.hidden) == (3, True, None)
    assert resolve(data_default=True).normalize is True
    assert resolve(data_default=False).normalize is False
    assert resolve(eps="2/255").train_eps == Fraction(2, 255)
    options = resolve(method="pgd", **{"pgd.steps": 3}).options
    assert options == {"steps": 3, "restarts": 1, "step_size": None}


@pytest.mark.parametrize(
    "given,names",
    [
        ({"epochs": 5, "annealing_epochs": 5}, ["warmup_epochs", "annealing_epochs", "epochs = 5"]),
        ({"epochs": 5, "warmup_epochs": 2, "annealing_epochs": 3}, ["warmup_epochs", "= 5"]),
        ({"epochs": 1, "warmup_epochs": 1}, ["warmup_epochs"]),
        ({"validation": 0}, ["select", "validation"]),
        ({"validation": 0.0, "select": "best"}, ["select", "validation"]),
        ({"accumulate": 9, "batch_size": 8}, ["accumulate", "batch_size"]),
    ],
)
def test_combinations_without_meaning(given, names):
    with pytest.raises(UserError) as caught:
        resolve(**given)
    message = str(caught.value)
    assert "\n" not in message and all(name in message for name in names)


@pytest.mark.parametrize(
    "given",
    [
        {"epochs": 5, "warmup_epochs": 2, "annealing_epochs": 2},
        {"validation": 0, "select": "last"},
        {"validation": 0, "select": "test"},
        {"accumulate": 8, "batch_size": 8},
    ],
)
def test_combinations_at_the_limit(given):
    resolve(**given)


# --- presets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_presets_parse_and_resolve(name):
    settings = Settings.parse(load_preset(name))
    given = {k: getattr(settings, k) for k in NETWORK_ARGUMENTS}
    network = nets.find(settings.net).resolve({k: v for k, v in given.items() if v is not None})
    resolved = settings.resolve(normalize=False, network=network)
    assert resolved.train_eps >= resolved.eps
    assert all(epoch < resolved.epochs for epoch in resolved.decay_epochs)
    for option, value in network.items():
        assert getattr(resolved, option) == value


def test_every_preset_begins_with_a_comment():
    folder = resources.files("tightrope.training.presets")
    files = {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}
    for inner in folder.iterdir():
        if inner.is_dir() and not inner.name.startswith("__"):
            files |= {f"{inner.name}/{f.name.removesuffix('.toml')}": f for f in inner.iterdir()}
    assert set(files) == set(preset_names()) and len(files) >= 3
    described = dict(describe_presets())
    assert set(described) == set(files)
    for name, file in files.items():
        first = file.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# ") and len(first) > 10, name
        assert described[name] == first[2:]


@pytest.mark.parametrize("name,method", [("paper/tiny-ibp", IBP()), ("paper/tiny-pgd", PGD())])
def test_presets_of_the_precision_figure(name, method):
    # CNN3 of width 1 without BatchNorm, normalised, on the MNIST schedule.
    settings = Settings.parse(load_preset(name)).resolve(normalize=False, network={})
    assert settings.objective() == method
    assert (settings.data, settings.net, settings.width) == ("mnist", "cnn3", 1)
    assert settings.batch_norm is False and settings.normalize is True
    assert (settings.epochs, settings.annealing_epochs) == (70, 20)
    assert settings.decay_epochs == (50, 60) and settings.decay_factor == 0.2
    assert (settings.learning_rate, settings.clip, settings.batch_size) == (5e-4, 10.0, 256)
    assert (settings.eps, settings.train_eps) == (Fraction(1, 20), Fraction(1, 10))
    assert settings.initialization == "shi" and settings.select == "best"


def test_unknown_presets():
    with pytest.raises(UserError, match="unknown preset 'paper/tiny-ipb'; did you mean"):
        load_preset("paper/tiny-ipb")
