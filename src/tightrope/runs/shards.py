"""Parts of a certification that are made on machines which know nothing of each other.

A sample's verdict may depend on the randomness of its batch, so a shard runs the common stages on
all samples of its batches, and goes on alone with those of its own: what shards find together is
what one process finds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightrope.errors import UserError, shorten
from tightrope.files import refuse_links

FOLDER = "shards"
MOST_SHARDS = 1_000_000
_TEXT = re.compile(r"([0-9]{1,7})/([0-9]{1,7})")
_NAME = re.compile(r"[0-9]{1,7}-of-[0-9]{1,7}")


@dataclass(frozen=True)
class Portion:
    """What a shard has of a batch: all samples of that, and those that it is to decide."""

    batch: list[int]
    own: frozenset[int]


@dataclass(frozen=True)
class Shard:
    """One of `count` parts, the first is number 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str | Shard) -> Shard:
        """Read `3/16`."""
        if isinstance(text, Shard):
            return text
        found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        number, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= count <= MOST_SHARDS:
            raise UserError(
                f"shard must be K/N with 1 <= K <= N <= {MOST_SHARDS}, such as 3/16, got "
                f"{shorten(text)}"
            )
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, run: Path) -> Path:
        """Return where the shard's journal is, in a run folder; links on the way are refused."""
        refuse_links(run, (FOLDER,))
        place = run / FOLDER / f"{self.number}-of-{self.count}"
        refuse_links(place.parent, (place.name,))
        return place

    def of(self, batches: Sequence[Sequence[int]]) -> list[Portion]:
        """Return what is this shard's of all batches."""
        total = sum(map(len, batches))
        first, stop = (k * total // self.count for k in (self.number - 1, self.number))
        if first == stop:
            raise UserError(f"shard {self} has no samples: there are only {total}; use fewer")
        portions, seen = [], 0
        for batch in batches:
            own = frozenset(batch[max(first - seen, 0) : max(stop - seen, 0)])
            seen += len(batch)
            if own:
                portions.append(Portion([*batch], own))
        return portions


def found_shards(run: Path) -> list[Path]:
    """Return the folders of the shards in a run folder."""
    place = run / FOLDER
    if not place.is_dir():
        return []
    refuse_links(run, (FOLDER,))
    refuse_links(place)
    names = sorted(p.name for p in place.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())
    return [place / name for name in names]
