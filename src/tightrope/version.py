"""The package's version, in one place."""

from __future__ import annotations

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions that numbers depend on, for the files of a run."""
    import torch

    return {"tightrope": __version__, "torch": str(torch.__version__)}
