"""What a study trains: runs by name, each a preset, what differs from it, and how it is examined.

A run is named by what it is, so that experiments which need the same one share its folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tightrope.errors import UserError
from tightrope.training.objectives import method_options, section
from tightrope.training.presets import load_preset

# Words of a name that need no option in front of them.
_PLAIN = ("single", "multi")


@dataclass(frozen=True)
class Plan:
    """One run and its evaluations; `minutes` are those of one thread of a laptop, roughly.

    `certify` are options of `tightrope.certify`; with `smooth`, options of `tightrope.smooth`,
    votes under noise are counted instead, and nothing else is done. `estimate` says which margins
    to estimate on how many samples (at the radius certified); `exact` how many of them to compute
    exactly, and by a mixed-integer program for comparison; `splits` under which splits to
    measure TAPS accuracy. `teacher` is the name of the run that this one learns from. Where
    `optional` names a data set, the run is left out without it.
    """

    name: str
    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    certify: Mapping[str, Any] = field(default_factory=dict)
    smooth: Mapping[str, Any] = field(default_factory=dict)
    estimate: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, Any] = field(default_factory=dict)
    minutes: float = 1.0
    teacher: str | None = None
    optional: str | None = None

    def __str__(self) -> str:
        return f"run {self.name}"

    @property
    def method(self) -> str:
        """The training method."""
        return str(self.settings.get("method", load_preset(self.preset).get("method", "ibp")))

    def wanted(self) -> dict[str, Any]:
        """Return all settings of the training that are asked for."""
        preset = load_preset(self.preset)
        if "method" in self.settings:
            # As in `train`: another method has no use for the options of the preset's.
            own = f"{section(self.method)}."
            preset = {k: v for k, v in preset.items() if "." not in k or k.startswith(own)}
        return {**preset, **self.settings, "seed": self.seed}

    def commands(self, folder: Path) -> list[str]:
        """Return the commands that make this run by hand."""
        taught = {} if self.teacher is None else {"teacher": str(folder.parent / self.teacher)}
        pairs = [f"{k}={_text(v)}" for k, v in {**self.settings, **taught}.items()]
        sets = [part for pair in pairs for part in ("--set", pair)]
        train = ["train", "--preset", self.preset, "--seed", str(self.seed), *sets]
        options = [
            part
            for name, value in self.certify.items()
            if value is not None
            for part in (f"--{name}", _text(value))
        ]
        radius = ["--eps", str(self.certify["eps"])] if "eps" in self.certify else []
        trained = shlex.join(["tightrope", *train, "--out", str(folder)])
        if self.smooth:
            votes = [part for k, v in self.smooth.items() for part in (f"--{k}", _text(v))]
            return [trained, shlex.join(["tightrope", "smooth", str(folder), *votes])]
        return [
            trained,
            shlex.join(["tightrope", "certify", str(folder), *options]),
            shlex.join(["tightrope", "estimate", str(folder), *radius]),
        ]


def vary(plan: Plan, seed: int = 0, **changes: Any) -> Plan:
    """Return a plan with other options of its method, named by those that differ.

    An option that has the preset's value already changes nothing, and neither the name.
    """
    method = plan.method
    preset = load_preset(plan.preset)
    name, settings = plan.name, dict(plan.settings)
    for option, value in changes.items():
        key = f"{section(method)}.{option}"
        before = preset.get(key, method_options(method)[option].default)
        if value == before:
            continue
        settings[key] = value
        word = option.removeprefix("classifier_")
        name += f"-{value}" if value in _PLAIN else f"-{word}{_text(value)}"
    if seed:
        name += f"-seed{seed}"
    return replace(plan, name=name, settings=settings, seed=seed)


def adjust(
    plans: Sequence[Plan],
    settings: Mapping[str, Any],
    *,
    samples: int | None = None,
    timeout: float | None = None,
) -> list[Plan]:
    """Apply the caller's wishes to all plans; options of a method go to its runs only."""
    sections = {section(plan.method) for plan in plans}
    for name in settings:
        head, dot, _ = name.partition(".")
        if name in ("seed", "method"):
            raise UserError(f"reproduce sets {name} itself: leave it out of --set")
        if dot and plans and head not in sections:
            raise UserError(f"{name} belongs to none of the methods {', '.join(sorted(sections))}")
    return [_adjusted(plan, settings, samples, timeout) for plan in plans]


def _adjusted(
    plan: Plan, settings: Mapping[str, Any], samples: int | None, timeout: float | None
) -> Plan:
    own = f"{section(plan.method)}."
    chosen = {k: v for k, v in settings.items() if "." not in k or k.startswith(own)}
    limited: dict[str, Any] = {
        name: _limited(getattr(plan, name), samples)
        for name in ("certify", "smooth", "estimate", "exact", "splits")
    }
    if timeout is not None and plan.certify:
        limited["certify"] = {**limited["certify"], "timeout": timeout}
    return replace(plan, settings={**plan.settings, **chosen}, **limited)


def _limited(options: Mapping[str, Any], samples: int | None) -> dict[str, Any]:
    counts = ("samples", "milp")
    return {
        name: min(value, samples) if name in counts and samples is not None else value
        for name, value in options.items()
    }


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
