"""Settings survive being written and read, those of users' methods too."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_trainings import resolve

from tightrope.errors import UserError
from tightrope.training import objectives
from tightrope.training.settings import Settings, flatten, read_toml

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
        again = Settings.parse(read_toml(path))
        assert again.objective() == settings.objective()
        assert dataclasses.replace(again, options={}) == dataclasses.replace(settings, options={})


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


def test_read_toml_refuses_what_it_cannot_read(tmp_path):
    path = tmp_path / "config.toml"
    with pytest.raises(UserError, match="missing"):
        read_toml(path)
    for content in (b"eps = ", b"\xff\xfe", b"[a]\nb=1\n[a]\n"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            read_toml(path)


# --- methods of users -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Custom:
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
