"""The command line: thin commands around `tightrope.api`."""

from tightrope.cli.main import main

__all__ = ["main"]
