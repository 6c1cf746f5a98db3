"""The `tightrope` command: its group, and what happens when something goes wrong.

Exit codes: 0 success, 1 the answer is no, 2 bad input, 130 interrupted. Bad input prints one
line and never a traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import NamedTuple

import click

from tightrope.errors import UserError, printable, unknown_name
from tightrope.launched import place, speaks
from tightrope.limits import check_environment
from tightrope.version import __version__
from tightrope.waiting import sleep_while_waiting

LONGEST_MESSAGE = 2000  # paths can be long, but what somebody typed into a number cannot


class Home(NamedTuple):
    """Where a command lives, and the line that `tightrope --help` shows of it."""

    module: str
    attribute: str
    help: str


# Commands are imported when they are called: torch takes seconds, and help should not.
COMMANDS = {
    "attack": Home(
        "evaluate",
        "attack",
        "Attack the test samples of a run with PGD, or with AutoAttack's suite.",
    ),
    "certify": Home(
        "evaluate",
        "certify",
        "Certify the test samples of a run; interrupted, it continues when called again.",
    ),
    "compare": Home(
        "compare",
        "compare",
        "Train and certify several methods on equal data, schedule and seeds.",
    ),
    "data": Home("lists", "data", "List data sets, or download one."),
    "estimate": Home(
        "evaluate",
        "estimate",
        "Estimate robust accuracy by the training approximations (no proofs).",
    ),
    "export": Home(
        "evaluate", "export", "Write the network of a run as ONNX, checked by onnxruntime."
    ),
    "merge": Home(
        "evaluate", "merge", "Join parts of a certification, made on several machines, into one."
    ),
    "methods": Home("lists", "methods", "List the training methods and their options."),
    "nets": Home("lists", "nets", "List the architectures."),
    "presets": Home("lists", "presets", "List the presets for `tightrope train --preset`."),
    "report": Home(
        "report",
        "report",
        "Write one HTML page about runs: accuracies, curves, stages, margins, samples.",
    ),
    "reproduce": Home(
        "reproduce",
        "reproduce",
        "Make a table or figure of the paper, with a verdict on each of its claims.",
    ),
    "smooth": Home(
        "smooth",
        "smooth",
        "Certify a run's network under Gaussian noise, with high probability.",
    ),
    "train": Home("train", "train", "Train a network into a run folder."),
    "verify": Home("verify", "verify", "Prove or refute a VNN-LIB property of an ONNX network."),
}


class _Group(click.Group):
    """A group that imports a command when it is called, and suggests the nearest one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = COMMANDS.get(cmd_name)
        if home is None:
            return None
        command = getattr(importlib.import_module(f"tightrope.cli.{home.module}"), home.attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise unknown_name("command", args[0], COMMANDS)
        if args and args[0] != "train" and place() is not None:
            raise UserError("several processes of torchrun make one `train`, and nothing else")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # As click does it, from the table instead of the commands themselves.
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        rows = [
            (name, click.Command(name, help=COMMANDS[name].help).get_short_help_str(limit))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=_Group, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="tightrope")
def cli() -> None:
    """Train, attack and certify neural networks that are provably robust.

    Start with:  tightrope train --preset demo --out runs/demo
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    sleep_while_waiting()  # no command is imported yet, so neither is torch
    code = _run(arguments)
    if "WORLD_SIZE" in os.environ:
        # Of several processes some have gone by now. What talks to them runs in threads that C++
        # may not find an end for; everything is written, so this process just leaves.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _run(arguments: list[str] | None) -> int:
    try:
        check_environment()
        result = cli.main(arguments, prog_name="tightrope", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        return 0
    except UserError as error:
        return _fail(str(error), error)
    except click.ClickException as error:
        return _fail(error.format_message(), error)
    except (KeyboardInterrupt, click.Abort) as error:
        if speaks(error):
            click.echo("tightrope: interrupted; what is finished is saved", err=True)
        return 130
    except OSError as error:
        return _fail(_explain(error), error)


def _fail(message: str, error: Exception) -> int:
    if not speaks(error):  # another of several processes does
        return 2
    line = printable(" ".join(message.split()))
    if len(line) > LONGEST_MESSAGE:
        line = f"{line[:LONGEST_MESSAGE]}..."
    click.echo(f"tightrope: {line}", err=True)
    return 2


def _explain(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free some, then run the command again (train: with --resume)"
        return f"no space left to write{where}; {advice}"
    return f"{error.strerror or error}{where}"
