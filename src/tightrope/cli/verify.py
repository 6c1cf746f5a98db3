"""`tightrope verify`: the conventions of the VNN competition."""

from __future__ import annotations

from pathlib import Path

import click

from tightrope.answer import Answer, Cause, Verdict
from tightrope.cli.options import branching_option, cuts_option, split_option
from tightrope.cli.output import print_json
from tightrope.errors import UserError, printable, shorten
from tightrope.files import write_text


@click.command()
@click.argument("networks", nargs=-1, required=True, metavar="ONNX | NAME=ONNX...")
@click.argument("vnnlib", type=click.Path(path_type=Path))
@click.option("--timeout", type=float, default=60.0, help="Seconds.  [60]")
@click.option(
    "--counterexample", type=click.Path(path_type=Path), help="Write a counterexample to this file."
)
@split_option
@branching_option
@cuts_option
@click.option("--seed", type=int, default=0, help="Seed of the attack.  [0]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    networks: tuple[str, ...],
    vnnlib: Path,
    timeout: float,
    counterexample: Path | None,
    seed: int,
    as_json: bool,
    **choices: str,
) -> None:
    """Prove or refute a VNN-LIB property of an ONNX network.

    The first line is unsat (proved: no counterexample exists), sat, timeout or unknown; a
    counterexample follows, or goes to a file. A property of several networks (VNN-LIB 2) needs the
    file of each: f=first.onnx g=second.onnx.
    """
    from tightrope.certification.problem import check_choices
    from tightrope.certification.verifying import verify_and_tell

    found, text = verify_and_tell(
        _files(networks),
        vnnlib,
        timeout=timeout,
        seed=seed,
        choices=check_choices(**choices),
    )
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


def competition_word(found: Answer) -> str:
    """Return the answer in the competition's words."""
    if found.verdict is Verdict.UNKNOWN:
        return "timeout" if found.cause is Cause.TIME else "unknown"
    return "unsat" if found.verdict is Verdict.VERIFIED else "sat"
