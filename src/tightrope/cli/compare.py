"""`tightrope compare`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tightrope as tr
from tightrope.cli.options import ENGINE_OPTIONS, engine_options
from tightrope.cli.output import (
    RunBars,
    console,
    percent,
    print_json,
    print_table,
    tell_waiting,
    training_bar,
)
from tightrope.cli.train import parse_pairs, planned_epochs

if TYPE_CHECKING:
    from tightrope.study.comparing import Entry
    from tightrope.training.step import StepResult
    from tightrope.training.trainer import Progress


@click.command()
@click.option("--methods", required=True, help="Methods, separated by commas: ibp,sabr,taps.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the runs.")
@click.option("--seeds", type=int, default=1, help="Runs per method, with seeds 0, 1, ...  [1]")
@click.option("--samples", type=int, default=1000, help="Test samples to certify.  [1000]")
@click.option("--preset", help="Settings by name; {method} in it stands for each method.")
@click.option("--data", help="Data set: a name, an .npz file or an image folder.  [mnist]")
@click.option("--data-dir", help="Where data sets lie.  [$TIGHTROPE_DATA]")
@click.option("--net", help="Architecture, see `tightrope nets`.  [cnn3]")
@click.option("--eps", help="Radius to be robust to: 0.1 or 8/255.  [0.1]")
@click.option("--epochs", help="Passes over the training set.  [70]")
@click.option("--device", help="cpu, cuda, mps or auto.  [auto]")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any other setting.")
@click.option("--jobs", type=int, help="Runs at a time.  [1, with Ray: all]")
@engine_options
@click.option("--wait", is_flag=True, help="Wait while another command uses a run.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def compare(
    *,
    methods: str,
    out: Path,
    seeds: int,
    samples: int,
    preset: str | None,
    pairs: tuple[str, ...],
    jobs: int | None,
    wait: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train and certify several methods on equal data, schedule and seeds.

    Interrupted, it continues when called again; finished runs are used as they are.

    \b
    tightrope compare --methods ibp,taps --eps 0.1 --epochs 10 --out runs/comparison
    tightrope compare --methods ibp,sabr,taps,staps --preset laptop/mnist-0.1-cnn3-{method} \\
        --seeds 3 --out runs/laptop
    """
    where = {name: options.pop(name) for name in ENGINE_OPTIONS}
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    given |= parse_pairs(pairs)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    with ExitStack() as stack:
        several = (jobs or 1) > 1 or where["engine"] == "ray"
        bars = stack.enter_context(RunBars()) if several and not as_json else None

        def watch(method: str, seed: int) -> Progress | None:
            if as_json:
                return None
            own = None if preset is None else preset.replace("{method}", method)
            epochs = planned_epochs(own, given)
            if bars is not None:
                return _Line(bars, f"{method}, seed {seed}", epochs)
            stack.close()
            console.print(f"{method}, seed {seed}")
            return stack.enter_context(training_bar(epochs))

        result = tr.compare(
            names,
            out=out,
            seeds=seeds,
            samples=samples,
            preset=preset,
            jobs=jobs,
            **where,
            wait=wait and tell_waiting,
            watch=watch,
            **given,
        )
    if as_json:
        print_json(result)
    else:
        print_comparison(result)
    if any(entry.errors for entry in result.entries):
        raise SystemExit(1)


class _Line:
    """One of several trainings that run at the same time."""

    def __init__(self, bars: RunBars, name: str, epochs: int) -> None:
        self.bars, self.name, self.epochs = bars, name, epochs
        bars.start(name)

    def step(self, epoch: int, iteration: int, result: StepResult, radius: float) -> None:
        """Show nothing: once per epoch is enough."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Move the bar."""
        self.bars.update(self.name, "train", record["epoch"] + 1, self.epochs)


# What the columns of a table are called; a table for votes has names of its own.
PROVED = {
    "natural": "natural",
    "adversarial": "adversarial",
    "taps": "TAPS accuracy",
    "certified": "certified",
}


def print_comparison(result: tr.Comparison) -> None:
    """Print a comparison for people, by what the methods guarantee."""
    samples = f"{'all' if result.samples is None else result.samples} test samples"
    proved = [e for name in ("deterministic", "none") for e in result.group(name)]
    if proved:
        _print_group(f"{result.folder}, {samples}", proved, PROVED)
    votes = result.group("probabilistic")
    if votes:
        found = dict.fromkeys(c for e in votes for c in e.values if c != "seconds")
        about = "votes under noise, l2 radii that hold with high probability"
        _print_group(f"{result.folder}, {samples}: {about}", votes, {c: c for c in found})
    for entry in result.entries:
        for error in entry.errors:
            console.print(f"failed: {error}")
    if result.picture is not None:
        console.print(f"picture: {result.picture}")
    elif any(entry.runs for entry in proved):
        console.print("for a picture: pip install 'tightrope[plots]'")


def _print_group(title: str, entries: list[Entry], columns: dict[str, str]) -> None:
    """Print the table of some methods; where they differ, with what each guarantees."""
    several = len({entry.guarantee for entry in entries}) > 1
    head = ("guarantee",) if several else ()
    rows = [
        (
            entry.method,
            *((entry.guarantee.value,) if several else ()),
            *(_cell(entry, column) for column in columns),
            _seconds(entry),
        )
        for entry in entries
    ]
    print_table(title, ("method", *head, *columns.values(), "training"), rows)


def _cell(entry: Entry, column: str) -> str:
    deviation = entry.deviation(column)
    return percent(entry.mean(column)) + (f" ± {100 * deviation:.2f}" if deviation else "")


def _seconds(entry: Entry) -> str:
    mean = entry.mean("seconds")
    return "-" if mean is None else f"{mean:.0f} s"
