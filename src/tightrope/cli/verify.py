"""`tightrope verify`: the conventions of the VNN competition."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from tightrope.answer import WORDS, Answer, competition_word
from tightrope.cli.alarm import last_word
from tightrope.cli.options import (
    ENGINE_OPTIONS,
    branching_option,
    cuts_option,
    engine_options,
    split_option,
)
from tightrope.cli.output import print_json
from tightrope.deadline import process_start
from tightrope.errors import UserError, printable, shorten
from tightrope.files import write_text

_CHOICES = ("split", "branching", "cuts")


@click.command()
@click.argument("files", nargs=-1, metavar="[NAME=]ONNX... VNNLIB")
@click.option(
    "--instances",
    type=click.Path(path_type=Path),
    help="Instead: a list of instances, onnx,vnnlib,seconds in each line.",
)
@click.option("--timeout", type=float, help="Seconds.  [60; instances: their own]")
@click.option(
    "--counterexample", type=click.Path(path_type=Path), help="Write a counterexample to this file."
)
@split_option
@branching_option
@cuts_option
@click.option("--seed", type=int, default=0, help="Seed of the attack.  [0]")
@click.option("--device", default="cpu", help="cpu, cuda or auto.  [cpu]")
@click.option("--jobs", type=int, help="Instances at a time.  [1; Ray: as many as fit]")
@engine_options
@click.option("--out", type=click.Path(path_type=Path), help="Their results.  [results.csv]")
@click.option("--only", help="Instances with this text in their line.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    files: tuple[str, ...],
    instances: Path | None,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Prove or refute a VNN-LIB property of an ONNX network.

    The first line is unsat (proved: no counterexample exists), sat, timeout or unknown; a
    counterexample follows, or goes to a file. A property of several networks (VNN-LIB 2) needs the
    file of each: f=first.onnx g=second.onnx.

    With --instances each line of the list is decided within its limit, and the results go to a file
    as they come; interrupted, it continues when called again. Exit code 1 if an answer is not the
    one in the column `verdict` of the list.

    \b
    tightrope verify net.onnx property.vnnlib --timeout 60
    tightrope verify --instances instances.csv --jobs 2 --out results.csv
    """
    listed = {name: options.pop(name) for name in ("jobs", "out", "only")}
    where = {name: options.pop(name) for name in ENGINE_OPTIONS}
    counterexample = options.pop("counterexample")
    if instances is not None:
        if files or counterexample is not None:
            raise UserError("--instances goes without other files")
        run_list(instances, listed, timeout, as_json, **where, **_checked(timeout, options))
        return
    if any(value is not None for value in listed.values()):
        raise UserError("--jobs, --out and --only go with --instances")
    if where != {"engine": "local", "address": None, "gpus_per_task": 0.0}:
        raise UserError("--engine, --address and --gpus-per-task go with --instances")
    if len(files) < 2:
        raise UserError("give an ONNX file and a VNN-LIB file, or --instances FILE")
    limit, started = 60.0 if timeout is None else timeout, process_start()
    with last_word(started, limit if 0 < limit < math.inf else 60.0, _out_of_time(as_json)):
        options = _checked(timeout, options)
        from tightrope.certification.verifying import verify_and_tell

        found, text = verify_and_tell(
            _files(files[:-1]), Path(files[-1]), timeout=limit, started=started, **options
        )
    _tell(found, text, counterexample, as_json)


def _checked(timeout: float | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a search after a look at them."""
    from tightrope.certification.problem import check_choices, check_timeout

    if timeout is not None:
        check_timeout(timeout)
    chosen = check_choices(*(options[name] for name in _CHOICES))
    rest = {name: value for name, value in options.items() if name not in _CHOICES}
    return {**rest, "choices": chosen}


def _out_of_time(as_json: bool) -> str:
    """Return what is said if nothing else can be said in time."""
    unknown = dict.fromkeys(("seconds", "domains", "bound", "note", "counterexample"))
    nothing = {"result": "timeout", "stage": "input", "reason": "the time was up", **unknown}
    return json.dumps(nothing, indent=2) if as_json else "timeout"


def _tell(found: Answer, text: str | None, counterexample: Path | None, as_json: bool) -> None:
    """Print an answer; the counterexample goes to a file if one is named."""
    if text is not None and counterexample is not None:
        write_text(counterexample, text + "\n")
    if as_json:
        print_json(
            {
                "result": competition_word(found),
                "stage": found.stage,
                "seconds": found.seconds,
                "domains": found.subproblems,
                "bound": found.bound,
                "reason": found.reason,
                "note": found.note,
                "counterexample": text if counterexample is None else str(counterexample),
            }
        )
        return
    click.echo(competition_word(found))
    if text is not None and counterexample is None:
        click.echo(text)
    for text in filter(None, (found.reason, found.note)):
        click.echo(printable(text), err=True)


def run_list(
    path: Path, listed: dict[str, Any], timeout: float | None, as_json: bool, **options: Any
) -> None:
    """Decide a list of instances; a wrong answer is exit code 1."""
    from tightrope.certification.instances import Outcome, read_instances, verify_instances

    def show(outcome: Outcome, done: int, total: int) -> None:
        if not as_json:
            why = "" if outcome.decided else f"  {outcome.reason}"
            flags = " WRONG" * outcome.wrong + " LATE" * outcome.late
            line = f"{done}/{total} {outcome.onnx} {outcome.vnnlib} {outcome.result} "
            click.echo(printable(f"{line}{outcome.seconds:.2f} s{flags}{why}"))

    instances = read_instances(path, timeout, listed["only"] or "")
    out = listed["out"] or Path("results.csv")
    found = verify_instances(
        instances,
        out,
        jobs=listed["jobs"],
        progress=show,
        **options,
    )
    counts = {
        "instances": len(found),
        **{word: sum(o.result == word for o in found) for word in WORDS},
        "wrong": sum(o.wrong for o in found),
        "late": sum(o.late for o in found),
        "seconds": round(sum(o.seconds for o in found), 3),
    }
    if as_json:
        print_json({**counts, "results": str(out)})
    else:
        decided = counts["sat"] + counts["unsat"]
        click.echo(
            f"{decided} of {len(found)} decided ({counts['unsat']} unsat, {counts['sat']} sat), "
            f"{counts['wrong']} wrong, {counts['late']} late, {counts['seconds']:.1f} s: {out}"
        )
    if counts["wrong"]:
        raise SystemExit(1)


def _files(networks: tuple[str, ...]) -> Path | dict[str, Path | str]:
    """Return the file of the one network, or those of several by name."""
    if len(networks) == 1 and ("=" not in networks[0] or Path(networks[0]).exists()):
        return Path(networks[0])
    files: dict[str, Path | str] = {}
    for word in networks:
        name, sign, path = word.partition("=")
        if not (name and sign and path) or name in files:
            raise UserError(
                f"expected one ONNX file, or NAME=FILE once for each network, got {shorten(word)}"
            )
        files[name] = Path(path)
    return files
