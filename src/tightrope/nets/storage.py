"""A network in a folder: `model.safetensors` (weights) and `model.json` (architecture).

Neither file can carry code: weights are read by safetensors, and the architecture is a name and
numbers from which our own builders make the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from tightrope.errors import UserError, shorten
from tightrope.files import read_json, write_bytes, write_json
from tightrope.limits import WEIGHTS_BYTES
from tightrope.nets import registry
from tightrope.nets.messages import one_line
from tightrope.nets.normalize import Statistics, check_statistics
from tightrope.reading import MADE_WITH, open_regular, read_bytes
from tightrope.version import versions

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"
ARCHITECTURE_FILE = "model.json"
MOST_HEADER_BYTES = 1 << 22  # a name, a shape and a place for each of a few thousand tensors


@dataclass(frozen=True)
class Architecture:
    """Everything about a network but its weights.

    Settings that are not given are filled in with their present defaults, so that a stored
    network does not change when a default does.
    """

    name: str
    input_shape: tuple[int, ...]
    num_classes: int
    normalize: Statistics | None = None
    arguments: Mapping[str, int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = registry.check_shape(self.input_shape)
        values: dict[str, Any] = {
            "input_shape": shape,
            "num_classes": registry.check_count("number of classes", self.num_classes),
            "arguments": registry.find(self.name).resolve(self.arguments),
        }
        if self.normalize is not None:
            values["normalize"] = check_statistics(self.normalize, shape)
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def build(self) -> nn.Sequential:
        """Build the network with fresh weights."""
        arguments: dict[str, Any] = dict(self.arguments)
        return registry.build(
            self.name, self.input_shape, self.num_classes, normalize=self.normalize, **arguments
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of `model.json`."""
        mean, std = self.normalize or ((), ())
        return {
            "format": FORMAT,
            "architecture": self.name,
            "arguments": dict(self.arguments),
            "input_shape": list(self.input_shape),
            "num_classes": self.num_classes,
            "normalize": {"mean": list(mean), "std": list(std)} if self.normalize else None,
        }

    @classmethod
    def from_json(cls, value: Any) -> Architecture:
        """Return the architecture that `to_json` described."""
        _check_format(value)
        normalize, arguments = value["normalize"], value["arguments"]
        if not isinstance(value["architecture"], str):
            raise UserError(f"architecture must be a name, got {shorten(value['architecture'])}")
        if not isinstance(arguments, dict):
            raise UserError(f"arguments must be a table of settings, got {shorten(arguments)}")
        if normalize is not None:
            if not isinstance(normalize, dict) or set(normalize) != {"mean", "std"}:
                raise UserError(
                    f"normalize must hold mean and std or be null, got {shorten(normalize)}"
                )
            normalize = (normalize["mean"], normalize["std"])
        shape, classes = value["input_shape"], value["num_classes"]
        return cls(value["architecture"], shape, classes, normalize, arguments)


def save(module: nn.Module, architecture: Architecture, folder: str | Path) -> None:
    """Write a network into a folder, which is made if need be.

    Refuses what `load` would refuse: weights of another architecture, or ones that are not finite.
    """
    folder = Path(folder)
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()
    }
    _check_tensors(tensors, architecture, "of the network to save")
    # Not save_file: it makes files that only their owner can read, whatever the umask.
    content = safetensors.torch.save(tensors)
    write_bytes(folder / WEIGHTS_FILE, content)
    write_json(folder / ARCHITECTURE_FILE, {**architecture.to_json(), MADE_WITH: versions()})


def load(folder: str | Path) -> tuple[nn.Sequential, Architecture]:
    """Read a network from a folder; it comes on the CPU and in evaluation mode.

    The global random state is left as it was.
    """
    folder = Path(folder)
    architecture = load_architecture(folder)
    path = folder / WEIGHTS_FILE
    tensors = _read_tensors(path)
    _check_tensors(tensors, architecture, f"in {path}")
    with torch.random.fork_rng(devices=[]):  # building draws initial weights
        module = architecture.build()
    module.load_state_dict(tensors)
    return module.eval(), architecture


def load_architecture(folder: str | Path) -> Architecture:
    """Read only the architecture of the network in a folder."""
    path = Path(folder) / ARCHITECTURE_FILE
    try:
        content = read_json(path, "the architecture of the network")
    except OSError as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error
    try:
        return Architecture.from_json(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_format(value: Any) -> None:
    """Refuse JSON that is not an architecture in the present format."""
    if not isinstance(value, dict) or type(value.get("format")) is not int:
        raise UserError("damaged: this is not the description of a network")
    if value["format"] > FORMAT:
        raise UserError(
            f"written by a newer Tightrope (format {value['format']}, this one reads {FORMAT}); "
            f"upgrade Tightrope to read it"
        )
    expected = {"format", "architecture", "arguments", "input_shape", "num_classes", "normalize"}
    unknown = set(value) - expected - {MADE_WITH}
    for problem, keys in (("missing", expected - set(value)), ("unknown", unknown)):
        if keys:
            raise UserError(f"damaged: {problem} {', '.join(map(shorten, sorted(keys)[:5]))}")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:
            start = file.read(9)
        if int.from_bytes(start[:8], "little") > MOST_HEADER_BYTES or start[8:] != b"{":
            raise UserError(f"{path} is damaged: not safetensors (it has no header)")
        return safetensors.torch.load(read_bytes(path, WEIGHTS_BYTES))
    except FileNotFoundError:
        raise UserError(f"{path} is missing (the weights of the network)") from None
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged: not safetensors ({one_line(error)})") from error
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in any way at all
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def _check_tensors(found: dict[str, Tensor], architecture: Architecture, where: str) -> None:
    """Refuse tensors that are not finite weights of the architecture."""
    try:
        with torch.device("meta"):  # only its shapes are needed
            expected = architecture.build().state_dict()
    except UserError as error:
        raise UserError(f"the network of the weights {where} cannot be built: {error}") from None
    problem = _first_mismatch(found, expected)
    if problem:
        raise UserError(f"the weights {where} do not belong to {architecture.name}: {problem}")
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"the weights {where} are unusable: {name} holds NaN or infinity")


def _first_mismatch(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """Say what is wrong with the first tensor that is missing, different or too much."""
    for name, tensor in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name].shape != tensor.shape:
            have, want = tuple(found[name].shape), tuple(tensor.shape)
            return f"{name} has shape {have}, expected {want}"
        if found[name].dtype != tensor.dtype:
            return f"{name} has type {found[name].dtype}, expected {tensor.dtype}"
    unexpected = sorted(set(found) - set(expected))
    return f"unexpected {unexpected[0]}" if unexpected else None
