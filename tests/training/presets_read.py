"""All presets, as their files say and as a run would resolve them."""

from __future__ import annotations

import functools
import re

from tightrope import data, nets
from tightrope.training.presets import load_preset, preset_names
from tightrope.training.settings import Settings
from tightrope.training.training import NETWORK_ARGUMENTS

NAMES = preset_names()
SETTINGS = ("mnist-0.1", "mnist-0.3", "cifar10-2-255", "cifar10-8-255", "tinyimagenet-1-255")
# family / setting (- net) (- method); `demo` and the tiny networks' presets have other names.
NAME = re.compile(
    rf"(?P<family>[a-z-]+)/(?P<setting>{'|'.join(map(re.escape, SETTINGS))})"
    r"(-(?P<net>cnn\d))?(-(?P<method>[a-z-]+))?"
)
NAMED = {name: match for name in NAMES if (match := NAME.fullmatch(name))}


@functools.cache
def network_arguments(name: str) -> dict[str, int | bool]:
    settings = Settings.parse(load_preset(name))
    given = {k: getattr(settings, k) for k in NETWORK_ARGUMENTS}
    return nets.find(settings.net).resolve({k: v for k, v in given.items() if v is not None})


@functools.cache
def resolved(name: str) -> Settings:
    """Return a preset's settings as a training run completes them."""
    settings = Settings.parse(load_preset(name))
    normalize = data.is_normalized(settings.data)
    return settings.resolve(normalize=normalize, network=network_arguments(name))
