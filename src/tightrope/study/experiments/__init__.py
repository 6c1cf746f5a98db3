"""The experiments: one short file each, found by name."""

from __future__ import annotations

from tightrope.study.experiment import Experiment
from tightrope.study.experiments import (
    attack_strength,
    bound_gap,
    connector,
    estimators,
    everything,
    main,
    precision,
    repeatability,
    splits,
    weight,
)

_ALL = (
    precision.EXPERIMENT,
    main.EXPERIMENT,
    weight.EXPERIMENT,
    splits.SPLIT,
    connector.EXPERIMENT,
    estimators.EXPERIMENT,
    attack_strength.EXPERIMENT,
    bound_gap.EXPERIMENT,
    everything.PROXY,
    splits.TRAINABILITY,
    repeatability.EXPERIMENT,
    everything.COST,
)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ALL}
