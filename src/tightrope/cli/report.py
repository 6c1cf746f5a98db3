"""`tightrope report`."""

from __future__ import annotations

from pathlib import Path

import click

import tightrope as tr
from tightrope.cli.output import console, print_json


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Page to write.  [RUN/report.html]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def report(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Write one HTML page about runs: accuracies, curves, stages, margins, samples.

    \b
    tightrope report runs/a
    tightrope report runs/* -o report.html
    """
    result = tr.report(runs, out=out)
    if as_json:
        print_json({"report": str(result.page), "runs": result.runs})
        return
    for notice in result.notices:
        console.print(f"note: {notice}", markup=False, soft_wrap=True)
    console.print(str(result.page), markup=False, soft_wrap=True)
