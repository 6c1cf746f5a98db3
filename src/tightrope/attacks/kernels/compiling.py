"""How the inner loops of attacks are compiled, and kept for later processes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tightrope.compiling import compiled as compiled
from tightrope.errors import UserError
from tightrope.files import write_text

# The compiled loops and the tuples that they are called with.
SOURCES = ("*_kernel.py", "compiling.py", "stability.py", "windows.py")


def discard_stale(folder: Path) -> None:
    """Remove what was compiled from other versions of the sources in a folder.

    The compiler compares the date of a function's own file only, not of those that it uses; and
    it stumbles over tuples that have moved to another file.
    """
    sources = sorted({path for pattern in SOURCES for path in folder.glob(pattern)})
    dates = "".join(f"{path.name} {path.stat().st_mtime_ns}\n" for path in sources)
    cache = folder / "__pycache__"
    noted = cache / "compiled.txt"
    # Where we may not write, nothing is kept there either.
    with contextlib.suppress(OSError, UserError):
        if not noted.exists() or noted.read_text(encoding="utf-8") != dates:
            cache.mkdir(exist_ok=True)
            for old in cache.glob("*.nb[ic]"):
                old.unlink(missing_ok=True)
            write_text(noted, dates)


discard_stale(Path(__file__).parent)
