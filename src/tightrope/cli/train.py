"""`tightrope train`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

import tightrope as tr
from tightrope.cli.output import console, percent, print_json, tell_waiting, training_bar
from tightrope.errors import UserError, shorten, unknown_name
from tightrope.launched import is_first
from tightrope.training.presets import load_preset
from tightrope.training.settings import describe_settings, stored_settings


def _settings_help() -> str:
    lines = [f"  {name:<20} {text}" for name, _, text in describe_settings()]
    return "\b\nSettings for --set:\n" + "\n".join(lines)


@click.command(epilog=_settings_help())
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Run folder to make.")
@click.option("--preset", help="Settings by name, see `tightrope presets`.")
@click.option("--data", help="Data set: a name, an .npz file or an image folder.  [mnist]")
@click.option("--data-dir", help="Where data sets lie.  [$TIGHTROPE_DATA]")
@click.option("--net", help="Architecture, see `tightrope nets`.  [cnn3]")
@click.option("--method", help="Training method, see `tightrope methods`.  [ibp]")
@click.option("--eps", help="Radius to be robust to: 0.1 or 8/255.  [0.1]")
@click.option("--epochs", help="Passes over the training set.  [70]")
@click.option("--seed", help="Seed of everything random.  [0]")
@click.option("--device", help="cpu, cuda, mps or auto.  [auto]")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Any other setting.")
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@click.option("--force", is_flag=True, help="Replace the run in --out.")
@click.option("--wait", is_flag=True, help="Wait while another command uses the folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the last epoch as JSON.")
def train(
    out: Path,
    preset: str | None,
    pairs: tuple[str, ...],
    resume: bool,
    force: bool,
    wait: bool,
    as_json: bool,
    **options: str | None,
) -> None:
    """Train a network into a run folder.

    \b
    tightrope train --data mnist --net cnn3 --method ibp --eps 0.1 --out runs/a
    tightrope train --preset paper/tiny-ibp --out runs/tiny
    torchrun --standalone --nproc-per-node 4 -m tightrope train --net cnn7 --out runs/b

    Processes that torchrun starts, on one machine or several, train one network together: the
    result is that of one process up to rounding, and --resume takes any number of them.
    """
    if resume and force:
        raise UserError("--resume continues a run and --force replaces it: give one of them")
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    given |= parse_pairs(pairs)
    epochs = _epochs(out, preset, given, resume)
    quiet = as_json or not is_first()
    with nullcontext(None) if quiet else training_bar(epochs) as bar:
        run = tr.train(
            out=out,
            preset=preset,
            resume=resume,
            force=force,
            wait=wait and tell_waiting,
            progress=bar,
            **given,
        )
    if not is_first():
        return
    history = run.history()
    if as_json:
        print_json({"run": str(run.folder), **history[-1]})
        return
    validation = run.validation_seconds()
    natural, robust = (percent(history[-1].get(name)) for name in ("natural", "robust"))
    console.print(
        f"{run.folder}: {len(history)} epochs in {run.training_seconds() + validation:.0f} s "
        f"({validation:.0f} s of validation), training accuracy natural {natural}, robust {robust}"
    )
    console.print(f"next: tightrope certify {run.folder}")


def parse_pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    """Read the values of --set."""
    return dict(_pair(text) for text in pairs)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise UserError(f"--set takes KEY=VALUE, got {shorten(text)}")
    known = [setting for setting, _, _ in describe_settings()]
    if "." not in name and name not in known:
        raise unknown_name("setting", name, known)
    return name, value.strip()


def _epochs(out: Path, preset: str | None, given: dict[str, Any], resume: bool) -> int:
    """Return the number of epochs, for the progress bar only."""
    if resume:
        from tightrope.runs import Run  # loads torch, which help and refusals do without

        if Run(out).config.exists():
            return stored_settings(Run(out)).epochs
    return planned_epochs(preset, given)


def planned_epochs(preset: str | None, given: dict[str, Any]) -> int:
    """Return the number of epochs that the settings ask for, for progress bars."""
    chosen = {**(load_preset(preset) if preset is not None else {}), **given}.get("epochs", 70)
    try:
        return int(str(chosen))
    except ValueError:
        return 0  # refused in a moment, by the settings
