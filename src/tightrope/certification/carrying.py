"""Instances that travel: their files go with them, to machines that do not see this one's disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tightrope.deadline import Deadline
from tightrope.errors import UserError
from tightrope.files import write_bytes
from tightrope.limits import VNNLIB_BYTES
from tightrope.reading import read_bytes


@dataclass(frozen=True)
class Carried:
    """A network and a property as files; or why they cannot be read."""

    network: bytes = b""
    specification: bytes = b""
    error: str = ""


def pack(network: Path, specification: Path) -> Carried:
    """Read the files of an instance, with what lies beside the network."""
    from tightrope.nets.onnx.file import load

    try:
        content = load(network, Deadline()).SerializeToString()
        return Carried(content, read_bytes(specification, VNNLIB_BYTES))
    except UserError as error:
        return Carried(error=str(error))
    except OSError as error:
        return Carried(error=f"cannot read {specification}: {error.strerror or error}")


@contextmanager
def unpacked(carried: Carried) -> Iterator[tuple[Path, Path]]:
    """Write the files into a folder that is gone afterwards; say where they are."""
    if carried.error:
        raise UserError(carried.error)
    with tempfile.TemporaryDirectory(prefix="tightrope-") as scratch:
        network, specification = (Path(scratch) / n for n in ("net.onnx", "property.vnnlib"))
        write_bytes(network, carried.network)
        write_bytes(specification, carried.specification)
        yield network, specification
