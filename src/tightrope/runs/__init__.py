"""The run folder: where each file of it is, who may write to it, and how they are read."""

from tightrope.runs.folder import Run, open_run

__all__ = ["Run", "open_run"]
