"""Changes to the code that the tests must notice, declared in `planted/*.toml`.

Each file there is about one file of the package and holds a list of mutants:

    file = "domains/reduced/replay.py"

    [[mutant]]
    name = "alpha-not-clamped"          # with the name of the list: replay/alpha-not-clamped
    old = ".clamp(0.0, 1.0)"            # a fragment that occurs exactly once in the file
    new = ""
    tests = ["tests/domains/reduced/test_replay.py::test_alpha"]    # files, or single tests of them
    reason = "..."                      # only if no test can notice: why it changes nothing
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tightrope"
LISTS = Path(__file__).parent / "planted"


class RottenError(Exception):
    """A mutant that no longer fits the code."""


@dataclass(frozen=True)
class Mutant:
    """One change; with a `reason` it is expected to survive its tests."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str = ""

    def applied(self, source: str) -> str:
        """Return the source with the change, or say why it does not fit any more."""
        count = source.count(self.old)
        if count != 1:
            raise RottenError(
                f"{self.name}: the fragment occurs {count} times in {self.file}, not once: "
                f"{self.old!r}"
            )
        changed = source.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise RottenError(
                f"{self.name}: {self.file} does not compile with it: {error}"
            ) from None
        return changed


def read_mutants() -> list[Mutant]:
    """Return all mutants, list by list."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        for entry in content["mutant"]:
            values = {**entry, "name": f"{path.stem}/{entry['name']}"}
            values["tests"] = tuple(entry["tests"])
            found.append(Mutant(file=content["file"], **values))
    return found
