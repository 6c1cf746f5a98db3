"""Options that several commands have."""

from __future__ import annotations

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
