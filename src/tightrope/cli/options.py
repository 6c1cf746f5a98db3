"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tightrope.certification.names import BRANCHING, CUTS, SPLITS

split_option = click.option(
    "--split", default=SPLITS[0], help=f"What a search takes apart: {', '.join(SPLITS)}.  [auto]"
)
branching_option = click.option(
    "--branching",
    default=BRANCHING[0],
    help=f"How it chooses a neuron: {', '.join(BRANCHING)}.  [{BRANCHING[0]}]",
)
cuts_option = click.option(
    "--cuts",
    default=CUTS[0],
    help=f"Multi-neuron constraints: {', '.join(CUTS)}; auto: in long searches.  [auto]",
)


ENGINE_OPTIONS = ("engine", "address", "gpus_per_task")


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say where many tasks run."""
    several = (
        click.option("--engine", default="local", help="local, or ray: a cluster.  [local]"),
        click.option("--address", help="Ray: HOST:PORT of the cluster's head, or auto.  [here]"),
        click.option("--gpus-per-task", type=float, default=0.0, help="Ray: GPUs of each.  [0]"),
    )
    for option in reversed(several):
        command = option(command)
    return command
