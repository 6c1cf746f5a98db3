"""The command line: thin commands around Python calls."""

from tightrope.cli.main import main

__all__ = ["main"]
