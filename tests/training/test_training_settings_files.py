"""Settings survive being written and read, those of users' methods too."""

import dataclasses
import tomllib

import pytest
from hypothesis import example, given
from hypothesis import settings as budget
from hypothesis import strategies as st
from small_trainings import resolve

from tightrope.errors import UserError
from tightrope.runs.config import read_config
from tightrope.training import objectives
from tightrope.training.settings import Settings, describe_settings, flatten

# --- writing ----------------------------------------------------------------------------------

WRITTEN = [
    {},
    {"eps": "8/255", "train_eps": "9/255"},
    {"eps": "1/7"},
    {"eps": 1e-5},
    {"clip": "none"},
    {"clip": 0.5, "l1": 1e-6, "learning_rate": 3.3e-4},
    {"decay_epochs": []},
    {"decay_epochs": "3,8", "validation": 500, "select": "test"},
    {"method": "pgd", "pgd.steps": 3, "pgd.step_size": 0.1},
    {"method": "pgd"},
    {"method": "standard", "data": 'some "odd" \\ name.npz', "data_dir": "/a b/ü"},
    {"batch_norm": False, "width": 3, "precise_bn": True, "accumulate": 4, "seed": 123456789},
]


@pytest.mark.parametrize("given", WRITTEN, ids=repr)
def test_settings_survive_toml(given, tmp_path):
    for settings in (
        Settings.parse(given),
        resolve(data_default=True, network={"width": 16, "batch_norm": True}, **given),
    ):
        path = tmp_path / "config.toml"
        path.write_text(settings.to_toml(), encoding="utf-8")
        again = Settings.parse(flatten(read_config(path).whole()))
        assert again.objective() == settings.objective()
        assert dataclasses.replace(again, options={}) == dataclasses.replace(settings, options={})


# Values of every kind, most of which most settings refuse.
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 9),
    st.floats(),
    st.floats(0, 1),
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.fractions(0, 1),
    st.lists(st.integers(0, 9), max_size=4),
    st.decimals().map(str),
    st.from_regex(r"0\.[0-9]{1,45}(e-[0-9]{1,2})?", fullmatch=True),
    st.sampled_from(
        ["none", "None", "true", "shi", "last", "linear", "sgd", "8/255", " 7 ", "5e3"]
    ),
)
NAMES = [("ibp", name) for name, _, _ in describe_settings() if name != "method"]
NAMES += [
    (method, f"{objectives.section(method)}.{option}")
    for method in objectives.METHODS
    for option in objectives.method_options(method)
]


@pytest.mark.parametrize(("method", "name"), NAMES)
@given(value=ANYTHING)
@budget(max_examples=60)
@example(value="1.2345678901234567890123456789e-20")
@example(value=float("nan"))
@example(value=float("inf"))
@example(value="file-\udcff.npz")  # a name that is not UTF-8
def test_whatever_setting_is_taken_is_read_back(method, name, value):
    try:
        written = Settings.parse({"method": method, name: value})
    except UserError as error:
        assert "\n" not in str(error)
        return
    text = written.to_toml().encode("utf-8").decode("utf-8")
    again = Settings.parse(flatten(tomllib.loads(text)))
    assert again.objective() == written.objective()
    assert dataclasses.replace(again, options={}) == dataclasses.replace(written, options={})
    assert again.to_toml() == written.to_toml()


def test_config_shows_what_people_write():
    table = tomllib.loads(resolve(eps="8/255", train_eps=0.1, clip="none").to_toml())
    assert table["eps"] == "8/255" and table["train_eps"] == 0.1 and table["clip"] == "none"
    assert table["annealing_epochs"] == 20 and table["decay_epochs"] == [50, 60]
    table = tomllib.loads(resolve(method="pgd").to_toml())
    assert {"steps": 10, "restarts": 1}.items() <= table["pgd"].items()


@given(
    st.fixed_dictionaries(
        {
            "eps": st.fractions(0, 1, max_denominator=1000).filter(lambda f: f > 0),
            "learning_rate": st.floats(1e-9, 10),
            "l1": st.floats(0, 1),
            "clip": st.none() | st.floats(1e-6, 1e6),
            "seed": st.integers(0, 2**63 - 1),
            "decay_epochs": st.none() | st.lists(st.integers(0, 500), unique=True).map(sorted),
        }
    )
)
def test_any_settings_survive_toml(given_settings):
    settings = Settings.parse(given_settings)
    assert Settings.parse(flatten(tomllib.loads(settings.to_toml()))) == settings


def test_a_config_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "config.toml"
    with pytest.raises(UserError, match="missing"):
        read_config(path).whole()
    for content in (b"eps = ", b"\xff\xfe", b"[a]\nb=1\n[a]\n"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            read_config(path).whole()


# --- methods of users -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Custom(objectives.Objective):
    """A method as a user writes it: annotations are types here, not text."""

    name = "custom"
    summary = "test"
    propagates_boxes = False
    count: int = 3
    weight: float = 0.5
    deep: bool = False
    limit: float | None = 0.5
    label: str = "a"

    def __call__(self, model, x, y, radius):
        raise AssertionError


@pytest.fixture
def custom(monkeypatch):
    monkeypatch.setitem(objectives.METHODS, "custom", Custom)


@pytest.mark.usefixtures("custom")
def test_options_of_users_methods_keep_their_types():
    given = {"custom.count": "4", "custom.weight": "0.25", "custom.deep": "yes"}
    given |= {"custom.limit": "2", "custom.label": "b"}
    settings = Settings.parse({"method": "custom", **given})
    assert settings.objective() == Custom(4, 0.25, True, 2.0, "b")
    typed = {"custom.count": 4, "custom.weight": 0.25, "custom.deep": True, "custom.limit": 2.0}
    assert Settings.parse({"method": "custom", **typed}).objective() == Custom(4, 0.25, True, 2.0)
    with pytest.raises(UserError, match=r"^custom.count must be a whole number"):
        Settings.parse({"method": "custom", "custom.count": "x"})


@pytest.mark.usefixtures("custom")
def test_an_option_set_to_none_survives_toml():
    settings = resolve(method="custom", **{"custom.limit": "none"})
    assert settings.objective().limit is None
    again = Settings.parse(flatten(tomllib.loads(settings.to_toml())))
    assert again.objective().limit is None
