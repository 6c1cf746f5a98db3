"""What a file of a run folder says, as far as it can be read.

A run folder is looked at while a command writes to it, after a kill, years later. So each file has
one reader, which returns what can be read and says what cannot: commands that need all of it ask
for the `whole`, a page shows what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tightrope.errors import UserError
from tightrope.files import read_json
from tightrope.reading import parse_json, read_records

T = TypeVar("T")


@dataclass(frozen=True)
class Found(Generic[T]):
    """What was read; sentences say what could not be, and what only a newer version writes."""

    content: T
    damage: str | None = None
    newer: str | None = None

    def whole(self, advice: str | None = None) -> T:
        """Return the content if that is all of it; the advice is what to do otherwise."""
        problem = self.damage or self.newer
        if problem is not None:
            raise UserError(problem if advice is None else f"{problem}; {advice}")
        return self.content

    @property
    def notices(self) -> list[str]:
        """What to say beside the content."""
        return [text for text in (self.damage, self.newer) if text is not None]


def damaged_lines(path: Path, lines: list[int]) -> str | None:
    """Say which lines of a file are damaged, if any."""
    rest = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"{path} is damaged at line {lines[0]}{rest}" if lines else None


def read_lines(path: Path, *, appended: bool) -> list[str]:
    """Return the lines of a file, none if it is missing; `UserError` if it cannot be read.

    Of a file that is appended to, a last line that a kill left torn is not one.
    """
    try:
        content = read_records(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    whole = content[: content.rfind(b"\n") + 1] if appended else content
    return whole.decode("utf-8", "replace").splitlines()


def read_objects(path: Path) -> Found[list[dict[str, Any]]]:
    """Read a file of one JSON object a line, up to the first that is none."""
    records: list[dict[str, Any]] = []
    try:
        lines = read_lines(path, appended=True)
    except UserError as error:
        return Found(records, str(error))
    for number, line in enumerate(lines, start=1):
        try:
            records.append(mapping(parse_json(line)))
        except ValueError:
            return Found(records, damaged_lines(path, [number]))
    return Found(records)


def read_result(path: Path, what: str) -> Found[dict[str, Any]]:
    """Read the JSON file of a result; `what` names its role."""
    try:
        return Found(mapping(read_json(path, what)))
    except UserError as error:
        return Found({}, str(error))
    except OSError as error:
        return Found({}, f"{path} cannot be read: {error.strerror}")
    except ValueError:
        return Found({}, f"{path} is damaged: not {what}")


def mapping(value: Any) -> dict[str, Any]:
    """Return a value if it is an object of JSON; `ValueError` if not."""
    if not isinstance(value, dict):
        raise ValueError("an object is expected")
    return value
