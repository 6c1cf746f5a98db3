"""The journal of a certification: one line per decided sample, written as it is decided."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from tightrope.answer import Verdict
from tightrope.errors import UserError
from tightrope.files import open_to_append
from tightrope.limits import JOURNAL_BYTES
from tightrope.radius import parse_radius
from tightrope.reading import parse_json
from tightrope.runs.found import Found, damaged_lines, mapping, read_lines


@dataclass(frozen=True)
class Record:
    """One sample's outcome.

    `stage` is the one that decided, or the last one tried. `times` are seconds per stage, each
    an equal share of its batch. `reason` says why a sample stayed unknown; `domains` is how many
    parts branch and bound looked at. `fingerprint` is that of the image and the label; records of
    earlier versions have none. `eps` is the radius, None for the folder's own.
    """

    index: int
    label: int
    prediction: int
    verdict: Verdict
    stage: str
    margin: float | None
    seconds: float
    times: dict[str, float] = field(default_factory=dict)
    counterexample: str | None = None
    reason: str | None = None
    domains: int | None = None
    fingerprint: str | None = None
    eps: str | None = None

    @property
    def correct(self) -> bool:
        """Whether the network classifies the sample itself correctly."""
        return self.prediction == self.label

    def to_line(self) -> str:
        """Return the journal line."""
        values = asdict(self)
        for name in ("counterexample", "reason", "domains", "fingerprint", "eps"):
            if values[name] is None:
                del values[name]
        return json.dumps(values) + "\n"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        """Read what a line says; raises ValueError, TypeError or KeyError if it is damaged."""
        record = cls(**{**values, "verdict": Verdict(values["verdict"])})
        record._check()
        return record

    def _check(self) -> None:
        whole = [self.index, self.label, self.prediction]
        whole += [] if self.domains is None else [self.domains]
        numbers = [self.seconds, *self.times.values()]
        numbers += [] if self.margin is None else [self.margin]
        texts = [self.stage, self.counterexample, self.reason, self.fingerprint, self.eps]
        texts = [t for t in texts if t is not None]
        if not all(type(n) is int for n in whole):
            raise TypeError("a whole number is expected")
        if not all(type(n) in (int, float) and abs(n) < math.inf for n in numbers):
            raise TypeError("a number is expected")
        if self.stage is None or not all(type(t) is str for t in texts):
            raise TypeError("text is expected")
        if self.eps is not None:
            parse_radius(self.eps, largest=None)


FIELDS = frozenset(field.name for field in fields(Record))


def read_journal(path: Path) -> Found[list[Record]]:
    """Read the records so far, leaving the file as it is: a certification may be running.

    A line that a kill left torn is none. Damaged ones, and a second one of a sample at one radius,
    are left out; so are fields that a newer version has written.
    """
    try:
        lines = read_lines(path, appended=True)
    except UserError as error:
        return Found([], f"{path} is damaged: {error}")
    records: dict[tuple[int, str | None], Record] = {}
    bad: list[int] = []
    strange: set[str] = set()
    for number, line in enumerate(lines, start=1):
        try:
            values = mapping(parse_json(line))
            known = {name: value for name, value in values.items() if name in FIELDS}
            record = Record.from_json(known)
            if (record.index, record.eps) in records:
                raise ValueError("two records of one sample")
        except (ValueError, TypeError, KeyError, AttributeError):
            bad.append(number)
            continue
        strange |= values.keys() - FIELDS
        records[record.index, record.eps] = record
    names = ", ".join(sorted(strange)[:5])
    newer = f"{path} has fields that this version does not know ({names}): a newer version wrote it"
    return Found(list(records.values()), damaged_lines(path, bad), newer if strange else None)


class Journal:
    """Appends records to a file; what is in it survives a kill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def read(self, indices: Collection[int]) -> list[Record]:
        """Return the records so far, without a line that a kill left torn.

        Samples other than `indices`, and a sample with two records of a radius, mean damage.
        """
        if not self.path.exists():
            return []
        with open_to_append(self.path):  # refuses now what could not be added to
            records = read_journal(self.path).whole("start over with --force")
        for number, record in enumerate(records, start=1):
            if record.index not in indices:
                where = damaged_lines(self.path, [number])
                raise UserError(f"{where}; start over with --force")
        return records

    def __enter__(self) -> Self:
        """Open the file to append to it, cutting off a line that a kill left torn."""
        self._file = open_to_append(self.path)
        length = len(_whole_lines(self._file, self.path))
        if length < self._file.tell():
            self._file.truncate(length)
        return self

    def append(self, record: Record) -> None:
        """Write one record to disk, in one system call so that no reader sees half of it."""
        assert self._file is not None
        self._file.write(record.to_line().encode())
        self._file.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None


def _whole_lines(file: BinaryIO, path: Path) -> bytes:
    JOURNAL_BYTES.check(file.seek(0, os.SEEK_END), str(path))
    file.seek(0)
    content = file.read()
    return content[: content.rfind(b"\n") + 1]
