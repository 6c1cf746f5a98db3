"""How large files may be: every limit, in one place.

A file that is damaged or made to do harm must not fill the memory or keep the machine busy.
What is beyond a limit is refused in one line that names the limit. The defaults lie far above
what is in use; each can be changed by an environment variable, `TIGHTROPE_LIMIT_<NAME>`, which
holds for commands, for Python and for the processes they start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tightrope.errors import UserError, shorten, unknown_name

PREFIX = "TIGHTROPE_LIMIT_"
LARGEST = 2**63 - 1
_MOST_DIGITS = 25  # of a value, underscores included


@dataclass(frozen=True)
class Limit:
    """One limit: the largest count of `unit` that is accepted."""

    name: str
    default: int
    unit: str
    meaning: str

    @property
    def variable(self) -> str:
        """The environment variable that changes the limit."""
        return PREFIX + self.name

    @property
    def value(self) -> int:
        """The limit in force: the environment's, or the default."""
        text = os.environ.get(self.variable)
        return self.default if text is None else _parse(self.variable, text)

    def check(self, found: int, what: str) -> int:
        """Return `found` if it is within the limit; `what` begins the message if it is not."""
        if found > self.value:
            raise self.exceeded(what)
        return found

    def exceeded(self, what: str) -> UserError:
        """Return the error for `what`, which is beyond the limit."""
        return UserError(
            f"{what} exceeds the limit of {self.value} {self.unit}; "
            f"if it is meant to, set {self.variable} to a larger number"
        )


ONNX_BYTES = Limit("ONNX_BYTES", 2**30, "bytes", "an ONNX file, decompressed, with external data")
ONNX_NODES = Limit("ONNX_NODES", 20_000, "nodes", "the operators of an ONNX graph")
ONNX_TENSOR_ELEMENTS = Limit(
    "ONNX_TENSOR_ELEMENTS", 2**27, "elements", "one constant or one value of an ONNX graph"
)
ONNX_TOTAL_ELEMENTS = Limit(
    "ONNX_TOTAL_ELEMENTS", 2**28, "elements", "all constants and values of an ONNX graph"
)
ONNX_PRODUCTS = Limit(
    "ONNX_PRODUCTS", 2**36, "products", "one evaluation of an ONNX network: numbers multiplied"
)

VNNLIB_BYTES = Limit("VNNLIB_BYTES", 2**28, "bytes", "a VNN-LIB file, decompressed")
VNNLIB_DEPTH = Limit("VNNLIB_DEPTH", 200, "levels", "brackets of a VNN-LIB file in each other")
VNNLIB_ALTERNATIVES = Limit(
    "VNNLIB_ALTERNATIVES", 100_000, "alternatives", "the disjunctions of a VNN-LIB file"
)
VNNLIB_TERMS = Limit(
    "VNNLIB_TERMS", 2_000_000, "inequalities", "the alternatives of a VNN-LIB file, in all"
)
VNNLIB_BOUNDS = Limit(
    "VNNLIB_BOUNDS", 10_000_000, "bounds", "the input boxes of a VNN-LIB file, multiplied out"
)
VNNLIB_ROWS = Limit(
    "VNNLIB_ROWS", 20_000, "rows", "the constraints on outputs that go with one input box"
)
VNNLIB_COEFFICIENTS = Limit(
    "VNNLIB_COEFFICIENTS",
    2**26,
    "coefficients",
    "the constraints on the outputs of a VNN-LIB file: rows times outputs",
)

SPEC_ROWS = Limit("SPEC_ROWS", 20_000, "rows", "what a spec of `tr.verify` forbids, multiplied out")
SPEC_COEFFICIENTS = Limit(
    "SPEC_COEFFICIENTS", 2**26, "coefficients", "a spec of `tr.verify`: rows times outputs"
)

INSTANCES_BYTES = Limit("INSTANCES_BYTES", 2**26, "bytes", "a list of instances, or their results")
INSTANCES = Limit("INSTANCES", 100_000, "lines", "a list of instances for `verify --instances`")

TOML_BYTES = Limit("TOML_BYTES", 2**18, "bytes", "a file of settings: config.toml")
JSON_BYTES = Limit("JSON_BYTES", 2**24, "bytes", "model.json, or a file of results")
JOURNAL_BYTES = Limit(
    "JOURNAL_BYTES", 2**26, "bytes", "certification.jsonl and history.jsonl, one record a line"
)
TEXT_DEPTH = Limit("TEXT_DEPTH", 100, "levels", "lists and tables in each other, in JSON and TOML")
DIGITS = Limit("DIGITS", 3000, "digits", "one number in a VNN-LIB file")

WEIGHTS_BYTES = Limit("WEIGHTS_BYTES", 2**31, "bytes", "model.safetensors")
CHECKPOINT_BYTES = Limit("CHECKPOINT_BYTES", 2**33, "bytes", "checkpoint.pt")
NET_ARGUMENT = Limit(
    "NET_ARGUMENT", 65536, "", "`width` or `hidden` of a network by name; the number of classes"
)
NET_PARAMETERS = Limit("NET_PARAMETERS", 2**28, "weights", "a network by name")
NET_INPUTS = Limit("NET_INPUTS", 2**22, "numbers", "one input of a network by name")
NET_LAYERS = Limit("NET_LAYERS", 1000, "layers", "`depth` or `blocks` of a network by name")

DATA_BYTES = Limit("DATA_BYTES", 2**32, "bytes", "the samples of a data set, in memory")
DATA_FILES = Limit("DATA_FILES", 2_000_000, "files", "a data set that is a folder of images")
IMAGE_BYTES = Limit("IMAGE_BYTES", 2**28, "bytes", "the file of one image")
IMAGE_PIXELS = Limit("IMAGE_PIXELS", 2**24, "pixels", "one image")
IMAGE_SCANS = Limit("IMAGE_SCANS", 100, "scans", "one JPEG image, which may refine itself")
LIST_BYTES = Limit("LIST_BYTES", 2**24, "bytes", "a list of classes or labels of TinyImageNet")
BATCH_BYTES = Limit("BATCH_BYTES", 2**26, "bytes", "one of CIFAR-10's batches")
BATCH_STEPS = Limit("BATCH_STEPS", 500_000, "steps", "unpickling one of CIFAR-10's batches")
ARCHIVE_BYTES = Limit("ARCHIVE_BYTES", 2**30, "bytes", "CIFAR-10's archive, decompressed")

MEMORY_BYTES = Limit(
    "MEMORY_BYTES",
    2**62,
    "bytes",
    "what bounds and searches hold at a time; where it is not set, half of what is free",
)

LIMITS = {found.name: found for found in list(globals().values()) if isinstance(found, Limit)}


def check_environment() -> None:
    """Refuse variables that are no limits, and values that are no numbers."""
    for variable in os.environ:
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX)
            if name not in LIMITS:
                raise unknown_name("limit", name, LIMITS)
            _ = LIMITS[name].value


def _parse(variable: str, text: str) -> int:
    digits = text.strip().replace("_", "")
    if len(digits) > _MOST_DIGITS or not (digits.isascii() and digits.isdigit()):
        raise UserError(f"{variable} must be a whole number, got {shorten(text)}")
    number = int(digits)
    if not 1 <= number <= LARGEST:
        raise UserError(f"{variable} must lie between 1 and {LARGEST}, got {shorten(text)}")
    return number
