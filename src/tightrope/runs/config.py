"""`config.toml`: the settings of a training as plain values.

What each of them means is for `training` to know, which makes its `Settings` of them. Here is what
everybody else needs: the data, the network, the radius.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tightrope import nets
from tightrope.errors import UserError, shorten, unknown_name
from tightrope.limits import TOML_BYTES
from tightrope.radius import parse_radius
from tightrope.reading import MADE_WITH, flatten, parse_toml, read_text
from tightrope.runs.found import Found

# The names that training knows, in the order of the file; a test compares them.
SETTINGS = (
    *("data", "data_dir", "train_samples", "validation"),
    *("net", "width", "hidden", "depth", "keep", "blocks", "batch_norm", "normalize"),
    *("initialization", "method", "teacher", "teacher_weights"),
    *("eps", "train_eps", "epochs", "warmup_epochs", "annealing_epochs", "annealing"),
    "annealing_middle",
    *("batch_size", "accumulate", "optimizer", "learning_rate", "momentum", "weight_decay"),
    *("beta2", "optimizer_eps", "decay"),
    *("decay_epochs", "decay_factor", "clip", "l1", "regularizer_weight", "natural_weight"),
    *("precise_bn", "average_from", "average_decay"),
    *("smoothing", "smoothing_sigma", "smoothing_pairs", "sam_rho", "edac_weight"),
    *("tightness_weight", "select", "seed", "device", "search_precision"),
    "deterministic",
)
_ATTACK = ("steps", "restarts", "step_size")
_LATENT = (
    *("classifier_relus", "weight", "connector", *_ATTACK, "estimators", "loss", "scale"),
    *("step_decay", "decay_from", "connected", "shrink"),
)
# By method: the table of its own options, and their names.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "standard": ("standard", ()),
    "pgd": ("pgd", _ATTACK),
    "multi-pgd": ("multi-pgd", _ATTACK),
    "ibp": ("ibp", ()),
    "sabr": ("sabr", ("ratio", *_ATTACK, "step_decay", "shrink", "start")),
    "taps": ("taps", _LATENT),
    "staps": (
        "staps",
        (
            *(*_LATENT, "ratio", "attack_steps", "attack_restarts"),
            *("attack_step_size", "attack_step_decay", "attack_start"),
        ),
    ),
    "mtl-ibp": ("mtl", ("alpha", *_ATTACK, "attack_scale")),
    "cc-ibp": ("cc", ("alpha", *_ATTACK, "attack_scale")),
    "exp-ibp": ("exp", ("alpha", *_ATTACK, "attack_scale")),
    "ibp-r": ("ibp-r", ("area_weight", "masked", *_ATTACK)),
    "crown-ibp": ("crown-ibp", ("end_beta", "loss", "bounds", "start_kappa", "end_kappa")),
    "ad-cert": (
        "ad-cert",
        ("alpha", *_ATTACK, "attack_scale", "teacher_input", "imitate", "attack"),
    ),
    "cc-dist": ("cc-dist", ("alpha", *_ATTACK, "attack_scale", "teacher_input", "weight")),
    "arow": ("arow", ("weight", "label_smoothing", *_ATTACK)),
    "mart": ("mart", ("weight", *_ATTACK)),
    "colt": (
        "colt",
        (
            *("layers", "mix", "radius_factor", "rate_factor", "area_weight", "area_factor"),
            *("projections", "steps", "step_size"),
        ),
    ),
    "diffai": (
        "diffai",
        (
            *("domain", "relu", "correlated", "loss", "center", "start_ratio", "end_ratio"),
            *("start_weight", "end_weight", "steps", "delay", "attack_ready"),
        ),
    ),
    "cap": ("cap", ("projections",)),
    "sortnet": (
        "sortnet",
        ("loss", "mixing", "end_mixing", "ramp_start", "ramp_end", "scale_rate"),
    ),
    "noise": ("noise", ("sigma",)),
}
# Settings that have an option of their own on the command line.
OPTIONS = ("data", "data_dir", "net", "method", "eps", "epochs", "seed", "device")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Config:
    """The settings of a run: those that its readers use, checked, and `table` with all of them.

    Any other setting is an attribute, too, as the file has it; `options` are the method's own.
    """

    data: str
    data_dir: str | None
    net: str
    method: str
    eps: Fraction
    epochs: int
    device: str
    options: Mapping[str, Any]
    table: Mapping[str, Any]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Config:
        """Check what `config.toml` says, as far as its readers use it."""
        values = flatten(table)
        unknown = unknown_settings(values)
        if unknown:
            raise unknown_name("setting", unknown[0], known_settings(values))
        net = _text(values, "net")
        nets.find(net)
        return cls(
            data=_text(values, "data"),
            data_dir=None if _is_none(values.get("data_dir")) else _text(values, "data_dir"),
            net=net,
            method=_text(values, "method"),
            eps=parse_radius(_given(values, "eps")),
            epochs=_count(values, "epochs"),
            device=_text(values, "device"),
            options={name.partition(".")[2]: v for name, v in values.items() if "." in name},
            table={name: value for name, value in table.items() if name != MADE_WITH},
        )

    def __getattr__(self, name: str) -> Any:
        if name not in SETTINGS:
            raise AttributeError(f"there is no setting {name!r}")
        value = self.table.get(name)
        return None if _is_none(value) else value

    def to_table(self) -> dict[str, Any]:
        """Return the content of `config.toml`, without what the run was made with."""
        return dict(self.table)


def read_config(path: Path) -> Found[dict[str, Any]]:
    """Read `config.toml`: its table as it is."""
    try:
        return Found(parse_toml(read_text(path, TOML_BYTES)))
    except FileNotFoundError:
        return Found({}, f"{path} is missing (the settings of the run)")
    except OSError as error:
        return Found({}, f"{path} cannot be read: {error.strerror}")
    except UserError as error:
        return Found({}, str(error))
    except ValueError as error:
        return Found({}, f"{path} is damaged: not valid TOML ({error})")


def unknown_settings(values: Mapping[str, Any]) -> list[str]:
    """Return the names that are no settings.

    Of a method that is not ours only that is known: its options are in one table, of its name or
    the beginning of it unless it says otherwise.
    """
    known, method = known_settings(values), str(values.get("method"))
    tables = {name.partition(".")[0] for name in values if "." in name}
    named = {table for table in tables if method.startswith(table)}
    own = set() if method in METHODS else (named or tables) - {*SETTINGS}

    def strange(name: str, value: Any) -> bool:
        table, dot, option = name.partition(".")
        words = dot and _WORD.fullmatch(table) and _WORD.fullmatch(option)
        free = own == {table} and bool(words)
        return (name not in known and not free) or (bool(dot) and isinstance(value, Mapping))

    return sorted(name for name, value in values.items() if strange(name, value))


def known_settings(values: Mapping[str, Any]) -> list[str]:
    """Return the names of all settings, with those of the method's options if it is ours."""
    table, options = METHODS.get(str(values.get("method")), ("", ()))
    return [*SETTINGS, *(f"{table}.{option}" for option in options)]


def train_arguments(values: Mapping[str, Any]) -> list[str]:
    """Return the command that trains with these settings, word by word, but for its `--out`."""
    words = ["tightrope", "train"]
    for name in OPTIONS:
        if name in values:
            words += [f"--{name.replace('_', '-')}", write(values[name])]
    for name, value in values.items():
        if name not in OPTIONS:
            words += ["--set", f"{name}={write(value)}"]
    return words


def write(value: Any) -> str:
    """Return a value as the command line takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(write, value)) or "[]"
    return str(value)


def _given(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise UserError(f"{name} is missing")
    return values[name]


def _text(values: Mapping[str, Any], name: str) -> str:
    value = _given(values, name)
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise UserError(f"{name} must be a name or a path, got {shorten(value)}")
    return value


def _count(values: Mapping[str, Any], name: str) -> int:
    value = _given(values, name)
    if type(value) is not int or value < 1:
        raise UserError(f"{name} must be a whole number from 1 on, got {shorten(value)}")
    return value


def _is_none(value: Any) -> bool:
    return value is None or str(value).lower() == "none"
