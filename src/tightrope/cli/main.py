"""The `tightrope` command: its group, and what happens when something goes wrong.

Exit codes: 0 success, 1 the answer is no, 2 bad input, 130 interrupted. Bad input prints one
line and never a traceback.
"""

from __future__ import annotations

import errno
import sys

import click

from tightrope.errors import UserError, unknown_name
from tightrope.version import __version__


class _Group(click.Group):
    """A group that suggests the nearest command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise unknown_name("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


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
    sys.exit(_run(arguments))


def _add_commands() -> None:
    # Imported late: this takes seconds, and an interrupt must be caught here, too.
    from tightrope.cli import compare, evaluate, lists, train

    for command in (
        train.train,
        compare.compare,
        evaluate.attack,
        evaluate.estimate,
        evaluate.certify,
        evaluate.export,
        lists.nets,
        lists.methods,
        lists.presets,
        lists.data,
    ):
        cli.add_command(command)


def _run(arguments: list[str] | None) -> int:
    try:
        _add_commands()
        result = cli.main(arguments, prog_name="tightrope", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        return 0
    except UserError as error:
        return _fail(str(error))
    except click.ClickException as error:
        return _fail(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        click.echo("tightrope: interrupted; what is finished is saved", err=True)
        return 130
    except OSError as error:
        return _fail(_explain(error))


def _fail(message: str) -> int:
    click.echo(f"tightrope: {' '.join(message.split())}", err=True)
    return 2


def _explain(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free some, then run the command again (train: with --resume)"
        return f"no space left to write{where}; {advice}"
    return f"{error.strerror or error}{where}"
