"""`tightrope smooth`: randomised smoothing of a run's network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

import tightrope as tr
from tightrope.cli.output import percent, print_json, print_table, sample_bar, tell_waiting
from tightrope.errors import UserError, shorten


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--sigma", type=float, default=0.25, help="Deviation of the noise.  [0.25]")
@click.option("--draws", type=int, default=1000, help="Votes for each radius.  [1000]")
@click.option("--selection", type=int, default=100, help="Votes that choose a class.  [100]")
@click.option("--alpha", type=float, default=0.001, help="Risk of each radius.  [0.001]")
@click.option("--radii", default="0.25,0.5,0.75,1", help="Radii to report.  [0.25,0.5,0.75,1]")
@click.option("--samples", type=int, help="How many test samples.  [all]")
@click.option("--start", type=int, default=0, help="First test sample.  [0]")
@click.option("--seed", type=int, default=0, help="Seed of the noise.  [0]")
@click.option("--device", help="cpu, cuda, mps or auto.  [the run's own]")
@click.option("--wait", is_flag=True, help="Wait while another command uses the run.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def smooth(run: Path, radii: str, wait: bool, as_json: bool, **options: Any) -> None:
    """Certify a run's network under Gaussian noise, with high probability.

    The certificates are about the majority vote of the network on noisy copies of an input, in the
    l2 norm, and each of them is wrong with probability at most alpha: they are not comparable with
    those of `tightrope certify`. Train the network by `--method noise`.
    """
    with sample_bar("voting", quiet=as_json) as update:
        result = tr.smooth(
            run, radii=_radii(radii), wait=wait and tell_waiting, progress=update, **options
        )
    if as_json:
        print_json(result)
        return
    said = result.settings
    print_table(
        f"{run}, majority vote under noise of {said['sigma']:g}: l2 radii, each with a risk of "
        f"{said['alpha']:g}; {said['draws']} draws say {_below(said['largest'])} at most",
        ("samples", "accuracy", "abstained", *(f"at {r}" for r in result.certified), "seconds"),
        [
            (
                result.samples,
                *map(percent, (result.accuracy, result.abstained, *result.certified.values())),
                f"{result.seconds:.1f}",
            )
        ],
    )


def _below(radius: float) -> str:
    """Return three digits after the point, rounded down: certificates are never more than said."""
    return f"{math.floor(1000 * radius) / 1000:g}"


def _radii(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--radii takes numbers such as 0.25,0.5, got {shorten(text)}") from None
