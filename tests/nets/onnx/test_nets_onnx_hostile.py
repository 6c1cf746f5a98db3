"""Files made to do harm are refused in one line, quickly and without much memory."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import node, random_array, save_model
from onnx_refusals import FLOATS, LIMIT, changed, ints, refused
from patience import memory, within

from tightrope.certification.verifying import verify_file
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.errors import UserError
from tightrope.nets.onnx.importing import read_onnx

LONG = np.array([2**33])
BOMBS = {
    "pads": ([node("Pad", "x p")], {"p": ints([0, 0, 0, 2**33])}, LIMIT),
    "pads beyond 64 bits": (
        [node("Pad", "x p")],
        {"p": ints([0, 2**62, 0, 2**62 + 2**61])},
        "Pad (Pad_y: ",
    ),
    "doubling": (
        [node("Concat", f"v{i} v{i}" if i else "x x", f"v{i + 1}", axis=1) for i in range(30)]
        + [node("Relu", "v30")],
        {},
        LIMIT,
    ),
    "filled": (
        [node("ConstantOfShape", "s", "c"), node("Add", "x c")],
        {"s": ints([2**17, 2**17])},
        LIMIT,
    ),
    "filled often": (
        [
            *(node("ConstantOfShape", "s", f"c{i}") for i in range(4)),
            *(node("Gather", f"c{i} i", f"d{i}") for i in range(4)),
            *(node("Add", f"{a} d{i}", b) for i, (a, b) in enumerate(["xa", "ab", "bc", "cy"])),
        ],
        {"s": ints([2**27]), "i": ints(0)},
        "exceeds the limit of 268435456 elements",
    ),
    "expanded": ([node("Expand", "c s", "d"), node("Add", "x d")], {"c": FLOATS, "s": LONG}, LIMIT),
    "tiled": ([node("Tile", "c s", "d"), node("Add", "x d")], {"c": FLOATS, "s": LONG}, LIMIT),
    "range": (
        [node("Range", "a b c", "d"), node("Cast", "d", "e", to=1), node("Add", "x e")],
        {"a": ints(0), "b": ints(2**40), "c": ints(1)},
        LIMIT,
    ),
    "padded constant": (
        [node("Pad", "c p", "d"), node("Add", "x d")],
        {"c": FLOATS, "p": ints([0, 2**40])},
        LIMIT,
    ),
    "product of constants": (
        [
            node("Expand", "c s", "d"),
            node("Transpose", "d", "e"),
            node("MatMul", "d e", "f"),
            node("Gather", "f i", "g", axis=1),
            node("Add", "x g"),
        ],
        {"c": FLOATS, "s": ints([5000, 4000]), "i": ints([0, 1, 2, 3, 4])},
        "exceeds the limit of 68719476736 products",
    ),
    "many elements": (
        [node("ConstantOfShape", "s", "c"), node("Gather", "x c", "y", axis=1)],
        {"s": ints([2**24])},
        "indices of type float32",
    ),
    "many copies": (
        [node("Tile", "x r")],
        {"r": ints([1, 2**22])},
        "copies to 20971520 places, more than 8388608",
    ),
    "many pixels": (
        [node("Reshape", "x s", "z"), node("Resize", "z - f")],
        {"s": ints([1, 1, 1, 5]), "f": np.array([1, 1, 3000, 3000], np.float32)},
        "copies to 45000000 places",
    ),
    "copies by a sum": (
        [node("ConstantOfShape", "s", "c"), node("Reshape", "x t", "z"), node("Add", "z c")],
        {"s": ints([2**22, 1]), "t": ints([1, 5])},
        "copies to 20971520 places",
    ),
    "a long shape": (
        [node("ConstantOfShape", "s", "c"), node("Reshape", "x c")],
        {"s": ints([2**24])},
        "a list of 16777216 numbers",
    ),
    "many dimensions": (
        [node("Unsqueeze", "x s")],
        {"s": ints(range(2, 32))},
        "32 dimensions",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_of_large_values(name, tmp_path):
    nodes, constants, fragment = BOMBS[name]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), constants)
    assert path.stat().st_size < 4000
    refused(path, fragment)


def test_a_huge_input(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 2**31))
    assert path.stat().st_size < 200
    refused(path, LIMIT)
    refused(save_model(path, [node("Relu", "x")], (2**40, 2**40)), LIMIT)
    refused(save_model(path, [node("Relu", "x")], (1,) * 40), "40 dimensions")


IMAGE = (1, 1, 256, 256)
WINDOWS = {
    "pads of a convolution": node("Conv", "x w", pads=[2**40, 0, 2**40, 0]),
    "pads of a pool": node("MaxPool", "x", kernel_shape=[1, 1], pads=[0, 0, 0, 2**62]),
    "strides": node("Conv", "x w", strides=[2**62, 2**62], pads=[2**61] * 4),
    "dilations": node("Conv", "x w", dilations=[2**62, 2**62]),
    "no stride": node("Conv", "x w", strides=[0, 1]),
    "a kernel": node("AveragePool", "x", kernel_shape=[2**40, 2**40]),
    "three numbers": node("AveragePool", "x", kernel_shape=[2, 2, 2]),
    "groups": node("Conv", "x w", group=0),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_without_end(name, tmp_path):
    constants = {"w": random_array(1, 1, 3, 3)}
    refused(save_model(tmp_path / "net.onnx", [WINDOWS[name]], IMAGE, constants))


def test_windows_that_hold_too_much(tmp_path):
    """The values are small, but a convolution takes its windows apart."""
    constants = {"w": np.zeros((1, 1, 128, 128), np.float32)}
    path = save_model(tmp_path / "net.onnx", [node("Conv", "x w", pads=[64] * 4)], IMAGE, constants)
    refused(path, "what the windows of Conv_y hold exceeds the limit")


def test_limits_can_be_raised_and_lowered(tmp_path, monkeypatch):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 500))
    read_onnx(path)
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_TENSOR_ELEMENTS", "499")
    refused(path, "exceeds the limit of 499 elements", "TIGHTROPE_LIMIT_ONNX_TENSOR_ELEMENTS")
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_TENSOR_ELEMENTS", "500")
    read_onnx(path)
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_NODES", "0")
    with pytest.raises(UserError, match="must lie between"):
        read_onnx(path)


def test_many_nodes(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_NODES", "3")
    nodes = [node("Relu", a, b) for a, b in zip("xabc", "abcy", strict=True)]
    refused(save_model(tmp_path / "net.onnx", nodes, (1, 5)), "exceeds the limit of 3 nodes")


# --- bytes ----------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    rest, last = number >> 7, number & 127
    return bytes([last | 128]) + varint(rest) if rest else bytes([last])


def field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message that holds bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


MESSAGES = {
    "nodes": field(7, field(1, b"") * 3_000_000),
    "attributes": field(7, field(1, field(5, b"") * 3_000_000)),
    "inputs": field(7, field(1, field(1, b"") * 3_000_000)),
    "functions": field(25, b"") * 3_000_000,
    "sizes": field(7, field(5, field(1, b"\x01" * 100_000_000))),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_small_files_of_many_messages(name, tmp_path):
    """Each of a few bytes takes a hundred times as much in memory."""
    path = tmp_path / "net.onnx.gz"
    path.write_bytes(gzip.compress(MESSAGES[name], 1))
    assert path.stat().st_size < 1_000_000
    refused(path, "exceeds the limit of 1073741824 bytes")


def test_compressed_bombs(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_BYTES", str(2**25))
    path = tmp_path / "net.onnx.gz"
    path.write_bytes(gzip.compress(bytes(2**28), 1))
    refused(path, "decompressed", "exceeds the limit of 33554432 bytes")


@pytest.mark.parametrize("content", [b"\x3b", b"\x0a", b"\x0a\xff\xff\xff\xff\x7f", b"\xff" * 30])
def test_broken_messages(content, tmp_path):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    refused(path, "is not an ONNX file")


# --- time and quiet -------------------------------------------------------------------------


def test_reading_ends_with_the_deadline(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    read_onnx(path, Deadline.after(100))
    with pytest.raises(OutOfTimeError):
        read_onnx(path, Deadline.after(0))


def property_of(path: Path, inputs: int, outputs: int) -> Path:
    """Write a property of all inputs in [-1, 1]: the first output is not below -1000."""
    lines = [f"(declare-const X_{i} Real)" for i in range(inputs)]
    lines += [f"(declare-const Y_{i} Real)" for i in range(outputs)]
    lines += [f"(assert (<= X_{i} 1.0))\n(assert (>= X_{i} -1.0))" for i in range(inputs)]
    path.write_text("\n".join([*lines, "(assert (<= Y_0 -1000.0))"]))
    return path


def answers_in_time(onnx: Path, vnnlib: Path) -> None:
    """Within the limit, a tenth of it and two seconds; here ten times that, for busy machines."""
    with within(31):
        found = verify_file(onnx, vnnlib, timeout=1.0)
    assert found or found.reason.startswith("time")


def test_deep_networks_answer_in_time(tmp_path):
    """Thousands of layers, each of which every later one is bounded through."""
    random = np.random.default_rng(0)
    nodes, constants = [], {}
    for i in range(2000):
        constants[f"w{i}"] = np.linalg.qr(random.normal(size=(5, 5)))[0].astype(np.float32)
        nodes.append(node("MatMul", f"{f'v{i - 1}' if i else 'x'} w{i}", f"h{i}"))
        nodes.append(node("Relu", f"h{i}", f"v{i}"))
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), constants, output="v1999")
    answers_in_time(path, property_of(tmp_path / "p.vnnlib", 5, 5))


def test_five_thousand_activations_answer_in_time(tmp_path):
    nodes = [node("Relu", f"v{i - 1}" if i else "x", f"v{i}") for i in range(5000)]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), output="v4999")
    answers_in_time(path, property_of(tmp_path / "p.vnnlib", 5, 5))


def test_pools_of_large_windows_answer_in_time(tmp_path):
    """A maximum of thousands of numbers is not written as thousands of ReLUs."""
    nodes = [node("GlobalMaxPool", "x", "a"), node("Flatten", "a")]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 1, 128, 128))
    answers_in_time(path, property_of(tmp_path / "p.vnnlib", 128 * 128, 1))


def test_onnxruntime_prints_nothing(tmp_path, capfd):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    changed(path, lambda m: setattr(m.graph.node[0], "domain", "\u00e9"))
    with pytest.raises(UserError):
        read_onnx(path)
    save_model(path, [node("Relu", "x", foo=3)], (1, 5))
    with pytest.raises(UserError, match="onnxruntime cannot run the network"):
        read_onnx(path)
    changed(save_model(path, [node("Relu", "x")], (1, 5)), lambda m: setattr(m, "ir_version", 200))
    with pytest.raises(UserError, match="onnxruntime cannot run the network"):
        read_onnx(path)
    found = capfd.readouterr()
    assert found.out == "" and found.err == ""


def test_mutated_files_are_read_or_refused(tmp_path, capfd):
    """Bytes changed at random: no other kind of error, and nothing printed."""
    random = np.random.default_rng(0)
    constants = {"w": random_array(5, 4), "c": random_array(4), "s": ints([1, 2, 2])}
    nodes = [
        node("MatMul", "x w", "a"),
        node("Add", "a c", "b"),
        node("Relu", "b", "d"),
        node("Reshape", "d s"),
    ]
    path = tmp_path / "net.onnx"
    content = save_model(path, nodes, (1, 5), constants).read_bytes()
    outcomes = set()
    for _ in range(400):
        mutated = bytearray(content)
        for _ in range(random.integers(1, 4)):
            mutated[random.integers(len(mutated))] = random.integers(256)
        path.write_bytes(bytes(mutated))
        try:
            with memory(400):
                read_onnx(path)
            outcomes.add("read")
        except UserError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
    found = capfd.readouterr()
    assert found.out == "" and found.err == ""


def test_numbers_stored_as_lists(tmp_path):
    """Old files hold numbers in fields of their type; those are read as ever."""
    path = save_model(tmp_path / "net.onnx", [node("Add", "x c")], (1, 5), {"c": random_array(5)})
    numbers = numpy_helper.to_array(onnx.load(path).graph.initializer[0])

    def unpack(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.float_data.extend(numbers.tolist())

    assert read_onnx(changed(path, unpack)).graph.nodes[1].op.offset.tolist() == numbers.tolist()
