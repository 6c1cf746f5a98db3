"""`history.jsonl`: one line per epoch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tightrope.errors import UserError
from tightrope.reading import MADE_WITH, parse_json
from tightrope.runs.found import Found, damaged_lines, mapping, read_lines

Record = dict[str, Any]


def read_history(path: Path) -> Found[list[Record]]:
    """Read the epochs trained so far, up to the first line that is of none.

    Values that are no numbers are left out; their lines count as damaged, too.
    """
    records: list[Record] = []
    bad: list[int] = []
    try:
        lines = read_lines(path, appended=False)
    except UserError as error:
        return Found(records, str(error))
    for number, line in enumerate(lines):
        try:
            record = mapping(parse_json(line))
        except ValueError:
            record = {}
        if type(record.get("epoch")) is not int or record["epoch"] != number:
            bad.append(number + 1)
            break
        records.append({name: value for name, value in record.items() if _is_known(name, value)})
        if len(records[-1]) < len(record):
            bad.append(number + 1)
    return Found(records, damaged_lines(path, bad))


def total(records: Iterable[Record], name: str) -> float:
    """Return the sum of a number over epochs, as far as they have it."""
    return float(sum(record.get(name) or 0.0 for record in records))


def _is_known(name: str, value: Any) -> bool:
    if name == MADE_WITH:
        return isinstance(value, dict)
    return value is None or type(value) in (int, float)
