"""What people see: tables and progress. With `--json`, none of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from tightrope.errors import printable

if TYPE_CHECKING:
    from tightrope.training.step import StepResult


class _Console(Console):
    """Prints text as text, whoever wrote it: file names and files may hold anything."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print with everything escaped that a terminal would obey."""
        super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **options)


console = _Console()


def print_json(value: Any) -> None:
    """Print a result for machines."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    click.echo(json.dumps(plain, indent=2, default=str))


def tell_waiting(reason: str) -> None:
    """Say why nothing happens; not among the results."""
    click.echo(f"tightrope: waiting: {' '.join(reason.split())}", err=True)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a result for people; columns of numbers are right-aligned."""
    table = _table(title, header, rows)
    if console.is_terminal:
        console.print(table)
    else:  # a file or a pipe has no width that a table would have to fit
        width = max(console.width, _natural_width(table))
        _Console(file=console.file, width=width).print(table)


def fits(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> bool:
    """Return whether a table can be printed without breaking its cells."""
    return not console.is_terminal or _natural_width(_table(title, header, rows)) <= console.width


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(title=printable(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        numeric = all(_is_numeric(row[i]) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    return table


def _natural_width(table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _is_numeric(cell: Any) -> bool:
    text = str(cell).rstrip("%s").replace(".", "", 1).replace(",", "").strip().lstrip("-")
    return text.isdigit() or text == ""


def percent(value: float | None) -> str:
    """Format an accuracy."""
    return "-" if value is None else f"{100 * value:.2f}%"


def _columns(what: str) -> tuple[Any, ...]:
    return (
        TextColumn(what),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )


def _progress(what: str) -> Progress:
    # Into a file or a pipe go results only, no bars.
    disable = not console.is_terminal
    return Progress(*_columns(what), console=console, transient=True, disable=disable)


class TrainingBar:
    """Live progress of a training: a bar over all iterations, a line per epoch."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.bar = _progress("training")
        self.task: TaskID | None = None
        self.iterations = 0
        self.shown = 0.0

    def step(self, epoch: int, iteration: int, result: StepResult, radius: float) -> None:
        """Show the metrics of an iteration, a few times per second."""
        if self.task is None:
            self.task = self.bar.add_task("training", total=None, status="")
        self.iterations = max(self.iterations, iteration + 1)
        now = time.monotonic()
        if now - self.shown < 0.25:
            return
        self.shown = now
        robust = "" if result.robust is None else f" robust {result.robust / result.samples:.3f}"
        status = (
            f"epoch {epoch + 1} radius {radius:.4f} loss {result.loss / result.samples:.3f} "
            f"natural {result.natural / result.samples:.3f}{robust}"
        )
        total = self.epochs * self.iterations if epoch else None
        done = epoch * self.iterations + iteration + 1
        self.bar.update(self.task, completed=done, total=total, status=status)

    def epoch(self, record: dict[str, Any]) -> None:
        """Print the line of an epoch: the training loss, held-out accuracies."""
        validation = ""
        if "validation_natural" in record:
            validation = (
                f"  natural {percent(record['validation_natural'])}"
                f"  robust {percent(record['validation_robust'])}"
            )
        stage = f"  stage {record['stage']}" if "stage" in record else ""
        self.bar.console.print(
            f"epoch {record['epoch'] + 1:>3}/{self.epochs}{stage}  radius {record['radius']:.4f}"
            f"  loss {record['loss']:.4f}{validation}  {record['seconds']:.1f} s"
        )


@contextmanager
def training_bar(epochs: int) -> Iterator[TrainingBar]:
    """Show the progress of a training while the block runs."""
    bar = TrainingBar(epochs)
    with bar.bar:
        yield bar


@contextmanager
def sample_bar(what: str, quiet: bool) -> Iterator[Any]:
    """Show progress over samples; yields `update(done, total, status)`."""
    if quiet:
        yield lambda done, total, status="": None
        return
    with _progress(what) as bar:
        task = bar.add_task(what, total=None, status="")
        yield lambda done, total, status="": bar.update(
            task, completed=done, total=total, status=status
        )


class RunBars:
    """A line per run that is at work, and one that stays when it has ended."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            TextColumn("{task.fields[part]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
        )
        # Into a file or a pipe go results only, no bars.
        disable = not console.is_terminal
        self.bars = Progress(*columns, console=console, transient=True, disable=disable)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> RunBars:
        self.bars.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bars.stop()

    def start(self, name: str) -> None:
        """Add a line."""
        self.tasks[name] = self.bars.add_task(name, total=None, part="")

    def update(self, name: str, part: str, done: int, total: int) -> None:
        """Move a bar."""
        self.bars.update(self.tasks[name], completed=done, total=total, part=part)

    def end(self, name: str, outcome: str) -> None:
        """Replace a line by what came of the run."""
        if name in self.tasks:
            self.bars.remove_task(self.tasks.pop(name))
        word = outcome if outcome in ("finished", "reused") else f"failed: {outcome}"
        self.bars.console.print(f"run {name}: {word}", markup=False)
