"""`tightrope reproduce`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.padding import Padding

import tightrope as tr
from tightrope.cli.options import engine_options
from tightrope.cli.output import RunBars, console, fits, print_json, print_table
from tightrope.cli.train import parse_pairs
from tightrope.errors import UserError

if TYPE_CHECKING:
    from tightrope.study.experiment import Result, Table


@click.command()
@click.argument("name", required=False)
@click.option("--list", "listing", is_flag=True, help="List the experiments.")
@click.option("--scale", default="laptop", help="laptop or paper.  [laptop]")
@click.option("--out", type=click.Path(path_type=Path), help="Folder.  [runs/reproduce/SCALE]")
@click.option("--jobs", type=int, help="Runs at a time.  [laptop: one per core, paper: 1]")
@engine_options
@click.option("--only", metavar="PATTERN", help="Make only the runs whose names match.")
@click.option("--samples", type=int, help="At most so many test samples in every evaluation.")
@click.option("--timeout", type=float, help="Seconds per sample of every certification.")
@click.option("--device", help="cpu, cuda, mps or auto, for every run.  [the preset's own]")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting of every run.")
@click.option("--wait", is_flag=True, help="Wait while another command uses a run.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def reproduce(
    name: str | None,
    listing: bool,
    device: str | None,
    pairs: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Make a table or figure of the paper, with a verdict on each of its claims.

    Interrupted, it continues when called again; finished runs are used as they are.

    \b
    tightrope reproduce --list
    tightrope reproduce precision
    tightrope reproduce main --only 'mnist-0.1-cnn3-*'
    """
    from tightrope.study.experiments import EXPERIMENTS
    from tightrope.study.output import to_json

    if listing:
        print_experiments(as_json)
        return
    if name is None:
        raise UserError(f"name an experiment, or use --list: {', '.join(EXPERIMENTS)}")
    options |= parse_pairs(pairs) | ({} if device is None else {"device": device})
    with nullcontext() if as_json else RunBars() as display:
        result = tr.reproduce(name, display=display, **options)
    if as_json:
        print_json({"folder": result.folder, "ok": result.ok, **to_json(result)})
    else:
        print_result(result)
    if not result.ok:
        raise SystemExit(1)


def print_experiments(as_json: bool) -> None:
    """Print what there is to reproduce."""
    from tightrope.study.experiment import SCALES
    from tightrope.study.experiments import EXPERIMENTS

    rows = [
        {
            "name": experiment.name,
            "claim": experiment.claim,
            "where": experiment.where,
            "minutes": {scale: experiment.minutes(scale) for scale in SCALES},
        }
        for experiment in EXPERIMENTS.values()
    ]
    if as_json:
        print_json(rows)
        return
    for row, experiment in zip(rows, EXPERIMENTS.values(), strict=True):
        times = ", ".join(f"{scale} {_duration(experiment.minutes(scale))}" for scale in SCALES)
        console.print(row["name"], style="bold", end="")
        console.print(f"  {row['where']}  ({times})")
        console.print(Padding(experiment.claim, (0, 0, 1, 2)))
    console.print("Times from nothing: laptop on two cores, paper roughly the authors' on one GPU.")


def _duration(minutes: int) -> str:
    return f"{minutes} min" if minutes < 600 else f"{minutes / 60:,.0f} h"


def print_result(result: Result) -> None:
    """Print a result for people."""
    for table in result.tables:
        _print(table)
    for name, reason in result.failures.items():
        console.print(f"failed: run {name}: {reason}", markup=False)
    for problem in result.problems:
        console.print(f"problem: {problem}", markup=False)
    for claim in result.claims:
        console.print(f"{claim.verdict}: {claim.text} ({claim.evidence})", markup=False)
    if not result.record.get("plots"):
        console.print("for figures: pip install 'tightrope[plots]'", markup=False)
    console.print(f"written to {result.folder}", markup=False)


def _print(table: Table) -> None:
    """Print a table; where it is too wide with the paper's numbers, without them."""
    header, cells = [column.title for column in table.columns], table.cells()
    if fits(table.title, header, cells):
        print_table(table.title, header, cells)
        return
    ours = [i for i, column in enumerate(table.columns) if not column.name.startswith("paper")]
    rows = [[row[i] for i in ours] for row in cells]
    print_table(table.title, [header[i] for i in ours], rows)
    if len(ours) < len(header):
        console.print("  beside the paper's numbers: table.md")
