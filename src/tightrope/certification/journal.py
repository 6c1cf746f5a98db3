"""The journal of a certification: one line per decided sample, written as it is decided."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from tightrope.certification.properties import Verdict
from tightrope.errors import UserError


@dataclass(frozen=True)
class Record:
    """One sample's outcome.

    `stage` is the one that decided, or the last one tried. `times` are seconds per stage, each
    an equal share of its batch. `reason` says why a sample stayed unknown; `domains` is how many
    parts branch and bound looked at.
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

    @property
    def correct(self) -> bool:
        """Whether the network classifies the sample itself correctly."""
        return self.prediction == self.label

    def to_line(self) -> str:
        """Return the journal line."""
        values = asdict(self)
        for name in ("counterexample", "reason", "domains"):
            if values[name] is None:
                del values[name]
        return json.dumps(values) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Record:
        """Read a journal line; raises ValueError, TypeError or KeyError if it is damaged."""
        values: dict[str, Any] = json.loads(line)
        record = cls(**{**values, "verdict": Verdict(values["verdict"])})
        record._check()
        return record

    def _check(self) -> None:
        whole = [self.index, self.label, self.prediction]
        whole += [] if self.domains is None else [self.domains]
        numbers = [self.seconds, *self.times.values()]
        numbers += [] if self.margin is None else [self.margin]
        texts = [t for t in (self.stage, self.counterexample, self.reason) if t is not None]
        if not all(type(n) is int for n in whole):
            raise TypeError("a whole number is expected")
        if not all(type(n) in (int, float) and abs(n) < math.inf for n in numbers):
            raise TypeError("a number is expected")
        if self.stage is None or not all(type(t) is str for t in texts):
            raise TypeError("text is expected")


class Journal:
    """Appends records to a file; what is in it survives a kill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def read(self, indices: Collection[int]) -> dict[int, Record]:
        """Return the records so far by index, cutting off a line that a kill left torn.

        Samples other than `indices`, and one sample with two records, mean damage.
        """
        if not self.path.exists():
            return {}
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        records: dict[int, Record] = {}
        for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), start=1):
            try:
                record = Record.from_line(line)
                if record.index not in indices or record.index in records:
                    raise ValueError("a sample that does not belong here")
            except (ValueError, TypeError, KeyError, AttributeError):
                raise UserError(
                    f"{self.path} is damaged at line {number}; start over with --force"
                ) from None
            records[record.index] = record
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return records

    def __enter__(self) -> Self:
        self._file = self.path.open("ab")
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
