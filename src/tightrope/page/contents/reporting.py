"""`tightrope.report`: one page about one or more runs."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tightrope.errors import UserError
from tightrope.files import write_text
from tightrope.page.content import Contents, Skipped
from tightrope.page.contents.gallery import Pictures
from tightrope.page.contents.runs import read_contents
from tightrope.page.document import render
from tightrope.runs import Run, open_run
from tightrope.version import __version__


@dataclass(frozen=True)
class Report:
    """A page that was written: where, about how many runs, and what it had to say of them."""

    page: Path
    runs: int
    notices: tuple[str, ...] = ()


def report(
    runs: Run | str | Path | Sequence[Run | str | Path], out: str | Path | None = None
) -> Report:
    """Write one HTML page about run folders; it needs no network and no other file.

    By default it is `report.html` in the run folder, and in the current folder for several runs.
    What is missing or damaged in a run is said on the page; if nothing at all can be shown, it is
    an error.
    """
    given = [runs] if isinstance(runs, Run | str | Path) else list(runs)
    opened = list({run.folder.resolve(): run for run in map(open_run, given)}.values())
    if not opened:
        raise UserError("report needs at least one run folder")
    for run in opened:
        if not run.folder.exists():
            raise UserError(f"{run.folder} does not exist; give the --out of a training run")
    page = _page(opened, out)
    pictures = Pictures()
    with torch.random.fork_rng(devices=[]):  # building a network draws weights
        parts = [read_contents(run, pictures) for run in opened]
    shown = _distinct([part for part in parts if isinstance(part, Contents)])
    skipped = [part for part in parts if isinstance(part, Skipped)]
    if not shown:
        first = f"{skipped[0].folder}: {skipped[0].reason}"
        more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
        raise UserError(f"there is nothing to report: {first}{more}")
    today = datetime.date.today().isoformat()
    write_text(page, render(shown, skipped, version=__version__, made=today))
    notices = [f"{run.folder}: {notice}" for run in shown for notice in run.notices]
    notices += [f"{part.folder}: {part.reason}" for part in skipped]
    return Report(page, len(shown), tuple(notices))


def _page(runs: Sequence[Run], out: str | Path | None) -> Path:
    if out is None:
        return runs[0].report if len(runs) == 1 else Path(runs[0].report.name)
    if Path(out).is_dir() or not Path(out).name:
        raise UserError(f"--out must be a file to write, got {str(out)!r}")
    return Path(out)


def _distinct(runs: Sequence[Contents]) -> list[Contents]:
    """Call runs by their folder's name, or by its whole path where names are the same."""
    named = [dataclasses.replace(r, name=Path(r.folder).resolve().name or r.name) for r in runs]
    counts = Counter(run.name for run in named)
    return [
        dataclasses.replace(run, name=run.folder) if counts[run.name] > 1 else run for run in named
    ]
