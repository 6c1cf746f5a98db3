"""`tightrope attack`, `certify`, `merge` and `export`: commands on a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tightrope as tr
from tightrope.certification.names import DEFAULT_STAGES, DISTANCE_STAGES, SUITES
from tightrope.cli.options import branching_option, cuts_option, engine_options, split_option
from tightrope.cli.output import (
    console,
    percent,
    print_json,
    print_table,
    sample_bar,
    tell_waiting,
)
from tightrope.errors import UserError, shorten

if TYPE_CHECKING:
    from tightrope.runs.summary import Certification

_run = click.argument("run", type=click.Path(path_type=Path))
_eps = click.option("--eps", help="Radius: 0.1 or 8/255.  [the run's own]")
_norm = click.option("--norm", help="Norm of the radius: linf, l2 or l1.  [linf]", default="linf")
_samples = click.option("--samples", type=int, help="How many test samples.  [all]")
_start = click.option("--start", type=int, default=0, help="First test sample.  [0]")
_steps = click.option("--steps", type=int, default=200, help="Attack steps.  [200]")
_restarts = click.option("--restarts", type=int, default=5, help="Attack restarts.  [5]")
_seed = click.option("--seed", type=int, default=0, help="Seed of the attack.  [0]")
_device = click.option("--device", help="cpu, cuda, mps or auto.  [the run's own]")
_usual = f"[{','.join(DEFAULT_STAGES)}; of distance layers {','.join(DISTANCE_STAGES)}]"
_wait = click.option("--wait", is_flag=True, help="Wait while another command uses the run.")
_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.command()
@_run
@_eps
@_norm
@_samples
@_start
@_steps
@_restarts
@click.option("--suite", default="pgd", help=f"What to attack with: {', '.join(SUITES)}.  [pgd]")
@_seed
@_device
@_wait
@_json
def attack(run: Path, wait: bool, as_json: bool, **options: Any) -> None:
    """Attack the test samples of a run with PGD, or with AutoAttack's suite.

    The suite is APGD on the cross-entropy, targeted APGD, FAB-T and Square with their published
    parameters, each on the samples that are left; --steps and --restarts are PGD's.
    """
    with sample_bar("attacking", quiet=as_json) as update:
        result = tr.attack(run, wait=wait and tell_waiting, progress=update, **options)
    if as_json:
        print_json(result)
        return
    if result.after:
        print_table(
            f"{run} at eps {result.settings['eps']}: accuracy after each attack",
            ("natural", *result.after),
            [tuple(map(percent, (result.natural, *result.after.values())))],
        )
    print_table(
        f"{run} at eps {_radius(result.settings)}",
        ("samples", "natural", "adversarial", "seconds"),
        [
            (
                result.samples,
                *map(percent, (result.natural, result.adversarial)),
                f"{result.seconds:.1f}",
            )
        ],
    )


@click.command()
@click.argument("run", metavar="RUN | ONNX", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="With ONNX: .npz of x_test, y_test.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="With ONNX or --shard: folder of the results."
)
@click.option("--domain", help="With ONNX: values of inputs, LOW,HIGH or none.  [0,1]")
@click.option("--eps", help="Radius, or several: 0.1, 8/255 or 0.05,0.1.  [the run's own]")
@_norm
@_samples
@_start
@click.option("--stages", help=f"Stages in order.  {_usual}")
@click.option("--timeout", type=float, default=60.0, help="Seconds per sample.  [60]")
@_steps
@_restarts
@split_option
@branching_option
@cuts_option
@_seed
@click.option("--jobs", type=int, help="Processes that share the samples.  [1, with Ray: all]")
@engine_options
@click.option("--shard", metavar="K/N", help="One of N parts of the samples, see `merge`.  [all]")
@_device
@click.option("--force", is_flag=True, help="Discard an earlier certification.")
@_wait
@_json
def certify(
    run: Path,
    out: Path | None,
    domain: str | None,
    stages: str | None,
    wait: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Certify the test samples of a run; interrupted, it continues when called again.

    More samples and other radii are added to those in the folder. A network that was trained
    elsewhere comes as an ONNX file, with samples and a folder for the results:

    \b
    tightrope certify runs/a --eps 0.05,0.1,0.15 --samples 200
    tightrope certify net.onnx --data samples.npz --norm l2 --eps 0.5 --out l2
    tightrope certify net.onnx --data samples.npz --eps 2/255 --out results
    """
    if run.name.endswith((".onnx", ".onnx.gz")) and not run.is_dir() and out is None:
        raise UserError("--out is missing: the folder for the results of an ONNX network")
    if domain is not None:
        options["domain"] = parse_domain_option(domain)
    with sample_bar("certifying", quiet=as_json) as update:

        def progress(summary: Certification) -> None:
            done = summary.verified + summary.falsified + summary.unknown
            update(done, summary.samples, f"certified {percent(summary.certified)}")

        names = stages and tuple(name.strip() for name in stages.split(","))
        queue = wait and tell_waiting
        summary = tr.certify(run, out=out, stages=names, wait=queue, progress=progress, **options)
    if as_json:
        print_json(summary.to_json())
        return
    print_summary(out or run, summary)


@click.command()
@_run
@click.argument("parts", nargs=-1, metavar="[PART]...", type=click.Path(path_type=Path))
@_wait
@_json
def merge(run: Path, parts: tuple[Path, ...], wait: bool, as_json: bool) -> None:
    """Join parts of a certification, made on several machines, into one.

    A part is a folder that `certify` has written to; by default they are the shards in RUN. Parts
    of other networks or settings are refused, and so are verdicts that contradict each other.

    \b
    tightrope certify runs/a --shard 1/2     # on one machine
    tightrope certify runs/a --shard 2/2     # on another one
    tightrope merge runs/a
    """
    summary = tr.merge(run, parts, wait=wait and tell_waiting)
    if as_json:
        print_json(summary.to_json())
        return
    print_summary(run, summary)
    if summary.open:
        console.print(f"{summary.open} of {summary.samples} samples are not decided yet")


def parse_domain_option(text: str) -> tuple[float, float] | None:
    """Read the range of values that inputs can have; `none` is no range."""
    if text.strip().lower() == "none":
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--domain must be LOW,HIGH or none, got {shorten(text)}") from None
    return low, high


def _radius(settings: Mapping[str, Any]) -> str:
    norm = settings.get("norm")
    return f"{settings['eps']} ({norm})" if norm else str(settings["eps"])


def print_summary(run: Path, summary: Certification) -> None:
    """Print a certification for people."""
    print_table(
        f"{run} at eps {_radius(summary.settings)}, {summary.samples} samples",
        ("stage", "verified", "falsified", "seconds"),
        [
            (name, counts["verified"], counts["falsified"], f"{counts['seconds']:.1f}")
            for name, counts in summary.stages.items()
        ],
    )
    reasons = ", ".join(f"{count} {reason}" for reason, count in summary.reasons.items())
    console.print(
        f"natural {percent(summary.natural)}   adversarial {percent(summary.adversarial)}   "
        f"certified {percent(summary.certified)}   "
        f"({summary.unknown} unknown{': ' if reasons else ''}{reasons})"
    )
    if summary.curve:
        print_curve(summary.curve)


def print_curve(curve: Sequence[Mapping[str, Any]]) -> None:
    """Print the accuracies of several radii."""
    columns = ("verified", "falsified", "unknown")
    print_table(
        "by radius",
        ("eps", "samples", *columns, "natural", "adversarial", "certified"),
        [
            (
                point["eps"],
                point["samples"] - point["open"],
                *(point[name] for name in columns),
                *(percent(point[name]) for name in ("natural", "adversarial", "certified")),
            )
            for point in curve
        ],
    )


@click.command()
@_run
@_eps
@_samples
@_start
@click.option("--classifier-relus", type=int, help="Where TAPS splits.  [as trained, or least]")
@click.option("--steps", type=int, default=20, help="Steps of the latent attack.  [20]")
@click.option("--restarts", type=int, default=1, help="Restarts of the latent attack.  [1]")
@click.option("--ratio", type=float, default=0.4, help="Size of SABR's box.  [0.4]")
@_seed
@_device
@_wait
@_json
def estimate(run: Path, wait: bool, as_json: bool, **options: Any) -> None:
    """Estimate robust accuracy by the training approximations (no proofs)."""
    with sample_bar("estimating", quiet=as_json) as update:
        result = tr.estimate(run, wait=wait and tell_waiting, progress=update, **options)
    if as_json:
        print_json(result)
        return
    columns = (result.natural, result.pgd, result.sabr, result.taps, result.ibp)
    print_table(
        f"{run} at eps {result.settings['eps']}, {result.samples} samples: estimates, not proofs",
        ("natural", "PGD", "SABR box", "TAPS", "IBP", "seconds"),
        [(*map(percent, columns), f"{result.seconds:.1f}")],
    )


@click.command()
@_run
@click.option("--onnx", required=True, type=click.Path(path_type=Path), help="File to write.")
@_json
def export(run: Path, onnx: Path, as_json: bool) -> None:
    """Write the network of a run as ONNX, checked by onnxruntime."""
    difference = tr.export(run, onnx=onnx)
    if as_json:
        print_json({"onnx": str(onnx), "largest_difference": difference})
    else:
        console.print(f"{onnx}: agrees with onnxruntime to {difference:.1e}")
