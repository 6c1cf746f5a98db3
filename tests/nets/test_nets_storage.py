"""A network comes back from its folder bit for bit, or with one line that says why not."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from patience import within

import tightrope
from tightrope import nets
from tightrope.errors import UserError
from tightrope.nets import Architecture
from tightrope.version import versions

SMALL = {"width": 2}
LYING_HEADER = b'{"1.weight":{"dtype":"F32","shape":[9999999],"data_offsets":[0,4]}}'


@pytest.fixture
def stored(tmp_path) -> Path:
    """A folder with a small network in it."""
    architecture = Architecture("cnn3", (1, 8, 8), 3, ((0.5,), (0.25,)), SMALL)
    nets.save(architecture.build(), architecture, tmp_path)
    return tmp_path


def refused(folder: Path, *parts: str) -> str:
    """Load must fail with one line that holds all parts."""
    with pytest.raises(UserError) as caught, within(60):
        nets.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def change_json(folder: Path, **changes) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, path)


@pytest.mark.parametrize("name", nets.net_names())
@pytest.mark.parametrize("batch_norm", [True, False])
def test_round_trip_is_bit_exact(name, batch_norm, tmp_path):
    normalize = ((0.1307, 0.2), (0.3081, 1 / 3))
    known = "batch_norm" in nets.find(name).arguments
    arguments = {"width": 3, "batch_norm": batch_norm} if known else {"width": 3}
    architecture = Architecture(name, (2, 12, 12), 5, normalize, arguments)
    module = architecture.build()
    module(torch.rand(4, 2, 12, 12))  # running statistics that are not the initial ones
    nets.save(module, architecture, tmp_path / "run")
    state = torch.get_rng_state()
    loaded, again = nets.load(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), state)
    assert again == architecture
    assert not loaded.training
    expected, found = module.state_dict(), loaded.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert all(expected[key].dtype == found[key].dtype for key in expected)
    counters = [value for key, value in found.items() if key.endswith("num_batches_tracked")]
    assert bool(counters) == (known and batch_norm) and all(counter == 1 for counter in counters)
    x = torch.rand(3, 2, 12, 12)
    assert torch.equal(loaded(x), module.eval()(x))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_normalisation_is_restored_from_the_json(stored):
    loaded, architecture = nets.load(stored)
    assert architecture.normalize == ((0.5,), (0.25,))
    assert loaded[0].mean.flatten().tolist() == [0.5]
    tensors = safetensors.torch.load_file(stored / "model.safetensors")
    assert not any("mean" in key and "running" not in key for key in tensors)


def test_json_holds_every_setting(stored):
    assert json.loads((stored / "model.json").read_text()) == {
        "format": 1,
        "architecture": "cnn3",
        "arguments": {"width": 2, "batch_norm": True},
        "input_shape": [1, 8, 8],
        "num_classes": 3,
        "normalize": {"mean": [0.5], "std": [0.25]},
        "made_with": versions(),
    }


def test_a_json_of_an_earlier_version_is_read(stored):
    expected = nets.load_architecture(stored)
    path = stored / "model.json"
    content = json.loads(path.read_text())
    assert content.pop("made_with") == {
        "tightrope": tightrope.__version__,
        "torch": str(torch.__version__),
    }
    path.write_text(json.dumps(content))
    assert nets.load_architecture(stored) == expected


def test_architecture_fills_in_defaults_and_survives_json():
    architecture = Architecture("cnn7", [3, 32, 32], 10, arguments={"width": None})
    assert architecture.input_shape == (3, 32, 32)
    assert architecture.arguments == {"width": 64, "hidden": 512, "batch_norm": True}
    assert architecture.to_json()["normalize"] is None
    assert Architecture.from_json(json.loads(json.dumps(architecture.to_json()))) == architecture
    numbers = Architecture("mlp", (4,), 2, (0.1, [1 / 3, 2 / 3, 1.0, 1e-3]))
    assert numbers.normalize == ((0.1,), (1 / 3, 2 / 3, 1.0, 1e-3))
    assert Architecture.from_json(json.loads(json.dumps(numbers.to_json()))) == numbers


def test_architecture_refuses_what_it_cannot_build():
    with pytest.raises(UserError, match="takes no 'depth'"):
        Architecture("cnn3", (1, 8, 8), 3, arguments={"depth": 3})
    with pytest.raises(UserError, match="a mean and a standard deviation"):
        Architecture("cnn3", (1, 8, 8), 3, ())


def test_saving_replaces_and_leaves_nothing_else(stored):
    architecture = Architecture("mlp", (4,), 2, None, SMALL)
    nets.save(architecture.build(), architecture, stored)
    assert nets.load(stored)[1] == architecture
    modes = {file.stat().st_mode for file in stored.iterdir()}
    assert len(modes) == 1  # who can read the one file can read the other
    assert sorted(file.name for file in stored.iterdir()) == ["model.json", "model.safetensors"]


def test_load_architecture_needs_no_weights(stored):
    (stored / "model.safetensors").unlink()
    assert nets.load_architecture(stored).name == "cnn3"


def test_missing_files(stored, tmp_path):
    refused(tmp_path / "nowhere", "model.json is missing")
    (stored / "model.safetensors").unlink()
    refused(stored, "model.safetensors is missing")


def test_folders_in_the_place_of_files(stored):
    (stored / "model.safetensors").unlink()
    (stored / "model.safetensors").mkdir()
    refused(stored, "model.safetensors")
    (stored / "model.json").unlink()
    (stored / "model.json").mkdir()
    refused(stored, "cannot read", "model.json")


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1])
def test_truncated_weights(stored, keep):
    path = stored / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(stored, "model.safetensors is damaged")


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", len(LYING_HEADER)) + LYING_HEADER + bytes(4),
    ],
)
def test_corrupt_weights(stored, content):
    (stored / "model.safetensors").write_bytes(content)
    refused(stored, "model.safetensors is damaged")


@pytest.mark.parametrize("write", ["pickle", "torch"])
def test_pickles_are_refused_and_not_executed(stored, tmp_path, write):
    trap = tmp_path / "executed"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (trap,))

    path = stored / "model.safetensors"
    if write == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        torch.save({"1.weight": Trap()}, path)
    refused(stored, "model.safetensors is damaged")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Trap()))
    assert trap.exists()  # the trap does work


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"format": 1', "\x00", "[1, 2]", "null", "{}", '{"format": "1"}', "[" * 100_000],
)
def test_damaged_json(stored, text):
    (stored / "model.json").write_text(text)
    refused(stored, "model.json")


def test_json_that_is_not_text(stored):
    (stored / "model.json").write_bytes(b"\xff\xfe\x00\x80")
    refused(stored, "model.json is damaged")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "written by a newer Tightrope (format 2, this one reads 1)"),
        ({"format": True}, "not the description of a network"),
        ({"architecture": "cnn33"}, "unknown network 'cnn33'; did you mean 'cnn3'?"),
        ({"architecture": ["cnn3"]}, "architecture must be a name"),
        ({"architecture": "os.system"}, "unknown network"),
        ({"arguments": {"width": "2"}}, "width of 'cnn3' must be a whole number"),
        ({"arguments": {"builder": 1}}, "takes no 'builder'"),
        ({"arguments": [2]}, "arguments must be"),
        ({"input_shape": [1, 8.5, 8]}, "input shape must be"),
        ({"input_shape": "188"}, "input shape must be"),
        ({"input_shape": [1, 1, 1]}, "too small"),
        ({"num_classes": -3}, "number of classes"),
        ({"normalize": [0.5, 0.5]}, "normalize must hold mean and std"),
        ({"normalize": False}, "normalize must hold mean and std"),
        ({"normalize": {"mean": [0.5], "std": [0]}}, "std must be positive"),
        ({"normalize": {"mean": [float("nan")], "std": [1]}}, "must be finite"),
        ({"normalize": {"mean": ["0.5"], "std": [1]}}, "must be finite"),
        ({"surprise": 1}, "unknown 'surprise'"),
        ({"arguments": {"width": 2000}}, "has shape (2,"),
        ({"arguments": {"width": 60000}}, "cnn3 exceeds the limit of 268435456 weights"),
        ({"arguments": {"width": 65536}, "input_shape": [1, 32768, 65536]}, "NET_INPUTS"),
        ({"architecture": "mlp", "arguments": {"depth": 65536}}, "depth of 'mlp' must be a whole"),
        ({"architecture": "resnet", "arguments": {"blocks": 10**6}}, "blocks of 'resnet' must"),
        ({"input_shape": [1] * 10**6}, "input shape must be"),
        ({"input_shape": [2**60] * 8}, "NET_INPUTS"),
        ({"num_classes": 10**19}, "number of classes must be a whole number from 1 to 65536"),
        ({"num_classes": 10**100}, "more than 64 bits"),
        ({"surprise\x1b[2J": 1}, r"unknown 'surprise\x1b[2J'"),
        ({f"surprise{i}": i for i in range(10**5)}, "unknown 'surprise0', 'surprise1'"),
        ({"normalize": {"mean": [0.5] * 10**5, "std": [1]}}, "100000 values, expected 1 or 1"),
        ({"normalize": {"mean": [[0.5] * 10**5], "std": [1]}}, "must be finite"),
    ],
)
def test_json_with_wrong_content(stored, changes, message):
    change_json(stored, **changes)
    assert len(refused(stored, message)) < 700


@pytest.mark.parametrize("depth", [200, 10**5])
def test_json_nested_deep(stored, depth):
    (stored / "model.json").write_text('{"format": ' + "[" * depth + "]" * depth + "}")
    refused(stored, "model.json", "nested more than 100 levels deep")


def test_json_with_a_number_of_many_digits(stored):
    (stored / "model.json").write_text('{"format": ' + "9" * 5000 + "}")
    refused(stored, "model.json")


def test_json_beyond_the_limit(stored):
    (stored / "model.json").write_text(" " * (1 << 24) + "{}")
    refused(stored, "model.json", "exceeds the limit of 16777216 bytes", "JSON_BYTES")


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file(stored, name):
    (stored / name).unlink()
    os.mkfifo(stored / name)
    refused(stored, f"{name}: it is a pipe, not a file")


@pytest.mark.parametrize(
    "header",
    [
        b"{" * 50_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"1.weight": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}}',
        b'{"1.weight": {"dtype": "F32", "shape": [0, 9223372036854775808], "data_offsets": [0,0]}}',
        b'{"1.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
        b'{"1.weight": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"1.weight": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}',
        b'{"__metadata__": {"a": "\\u0000"}}',
    ],
)
def test_headers_of_weights_that_lie(stored, header):
    content = len(header).to_bytes(8, "little") + header
    (stored / "model.safetensors").write_bytes(content)
    assert len(refused(stored, "model.safetensors")) < 700


@pytest.mark.parametrize("length", [2**22 + 1, 10**8, 2**63, 2**64 - 1])
def test_headers_of_weights_that_are_too_long(stored, length):
    (stored / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    refused(stored, "model.safetensors is damaged", "it has no header")


def test_many_tensors(stored):
    change_tensors(stored, lambda t: t.update({f"{i}": torch.zeros(0) for i in range(30_000)}))
    refused(stored, "unexpected 0")


def test_json_without_a_key(stored):
    path = stored / "model.json"
    content = json.loads(path.read_text())
    del content["input_shape"]
    path.write_text(json.dumps(content))
    refused(stored, "model.json", "missing 'input_shape'")


def test_tensors_of_another_network(stored):
    change_tensors(stored, lambda tensors: tensors.update({"1.weight": torch.zeros(2, 1, 3, 3)}))
    refused(
        stored,
        f"the weights in {stored / 'model.safetensors'} do not belong to cnn3: ",
        "1.weight has shape (2, 1, 3, 3), expected (2, 1, 5, 5)",
    )


def test_missing_and_unexpected_tensors(stored):
    change_tensors(stored, lambda tensors: tensors.update(extra=torch.zeros(1)))
    refused(stored, "do not belong to cnn3", "unexpected extra")
    change_tensors(stored, lambda tensors: tensors.pop("8.bias"))
    refused(stored, "do not belong to cnn3", "8.bias is missing")


def test_tensors_of_another_type(stored):
    change_tensors(stored, lambda t: t.update({"1.weight": t["1.weight"].double()}))
    refused(stored, "1.weight has type torch.float64, expected torch.float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["8.weight", "2.running_var"])
def test_weights_that_are_not_finite(stored, key, value):
    change_tensors(stored, lambda tensors: tensors[key].view(-1)[-1:].fill_(value))
    refused(stored, "model.safetensors", f"{key} holds NaN or infinity")


def test_save_refuses_what_load_would_refuse(stored):
    before = (stored / "model.safetensors").read_bytes()
    architecture = Architecture("cnn3", (1, 8, 8), 3, None, SMALL)
    with pytest.raises(UserError, match="do not belong to cnn3"):
        nets.save(Architecture("mlp", (4,), 2).build(), architecture, stored)
    broken = architecture.build()
    torch.nn.init.constant_(broken[-1].bias, float("nan"))
    with pytest.raises(UserError, match="holds NaN or infinity"):
        nets.save(broken, architecture, stored)
    assert (stored / "model.safetensors").read_bytes() == before


def test_save_where_there_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    architecture = Architecture("cnn3", (1, 8, 8), 3, None, SMALL)
    with pytest.raises(OSError):
        nets.save(architecture.build(), architecture, tmp_path / "file" / "run")


def test_weights_in_another_memory_layout(tmp_path):
    architecture = Architecture("cnn3", (2, 8, 8), 3, None, SMALL)
    module = architecture.build().to(memory_format=torch.channels_last)
    nets.save(module, architecture, tmp_path)
    loaded, _ = nets.load(tmp_path)
    assert torch.equal(loaded[3].weight, module[3].weight)
