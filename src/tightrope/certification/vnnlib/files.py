"""Reading VNN-LIB files.

A file describes the set of counterexamples by assertions, which are multiplied out into cases.
"""

from __future__ import annotations

from pathlib import Path

from tightrope.certification.vnnlib.cases import Cases
from tightrope.certification.vnnlib.specification import Specification
from tightrope.certification.vnnlib.syntax import File
from tightrope.deadline import Deadline
from tightrope.errors import UserError
from tightrope.limits import VNNLIB_BYTES
from tightrope.reading import read_bytes


def read_vnnlib(path: Path, deadline: Deadline | None = None) -> Specification:
    """Read a VNN-LIB file, plain or compressed (`.gz`).

    `OutOfTimeError` is raised if it is not read by the deadline.
    """
    try:
        text = read_bytes(path, VNNLIB_BYTES, deadline).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        return parse_vnnlib(text, deadline)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_vnnlib(text: str, deadline: Deadline | None = None) -> Specification:
    """Read the text of a VNN-LIB file."""
    deadline = deadline or Deadline()
    file = File(text)
    file.read(deadline)
    inputs, outputs = file.names.count("X"), file.names.count("Y")
    cases = Cases(file.asserted, file.source, file.names)
    return Specification(cases.collect(deadline), inputs, outputs, file.names, cases.places)
