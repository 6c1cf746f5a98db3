"""Reading files that may be anything: pipes, bombs, endless nesting."""

import gzip
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import memory, within

from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.errors import UserError
from tightrope.limits import JSON_BYTES, VNNLIB_BYTES
from tightrope.reading import check_regular, parse_json, parse_toml, read_bytes


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a pipe"),
    "socket": (make_socket, "a socket"),
    "folder": (Path.mkdir, "a folder"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "link to a pipe": (
        lambda path: (os.mkfifo(path.with_name("p")), path.symlink_to("p")),
        "a pipe",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    make, name = ODD[kind]
    path = tmp_path / "z"
    make(path)
    with pytest.raises(UserError, match=f"it is {name}, not a file"), within(10):
        read_bytes(path, JSON_BYTES)
    with pytest.raises(UserError, match=f"it is {name}, not a file"):
        check_regular(path)


def test_a_name_with_a_nul_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the name of a file"):
        read_bytes(tmp_path / "a\0b", JSON_BYTES)


def test_a_missing_file_is_left_to_the_caller(tmp_path: Path) -> None:
    check_regular(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "missing", JSON_BYTES)


def test_files_are_read_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JSON_BYTES.variable, "1000")
    for suffix, pack in (("", bytes), (".gz", gzip.compress)):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(pack(b"a" * 1000))
        assert read_bytes(path, JSON_BYTES) == b"a" * 1000
        path.write_bytes(pack(b"a" * 1001))
        with pytest.raises(UserError, match="exceeds the limit of 1000 bytes"):
            read_bytes(path, JSON_BYTES)


def test_members_of_a_compressed_file_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"ab") + gzip.compress(b"") + gzip.compress(b"c") + b"\0\0")
    assert read_bytes(path, JSON_BYTES) == b"abc"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not compressed"])
def test_damaged_compression_is_an_error(damage: str, tmp_path: Path) -> None:
    content = bytearray(gzip.compress(bytes(range(256)) * 10))
    if damage == "truncated":
        content = content[:-20]
    elif damage == "flipped":
        content[-6] ^= 1
    elif damage == "not compressed":
        content = bytearray(b"(check-sat)")
    else:
        content = bytearray(b"\x1f")
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot read"):
        read_bytes(path, JSON_BYTES)


def test_a_bomb_needs_no_more_memory_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VNNLIB_BYTES.variable, str(1 << 26))
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(256):
            file.write(b" " * (1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match="decompressed, exceeds the limit"), memory(200):
        read_bytes(path, VNNLIB_BYTES)


def test_decompression_stops_at_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"abc"))
    with pytest.raises(OutOfTimeError):
        read_bytes(path, JSON_BYTES, Deadline.after(-1))
    assert read_bytes(path, JSON_BYTES, Deadline.after(1000)) == b"abc"


@pytest.mark.parametrize("depth", [101, 5000, 1_000_000])
def test_nesting_is_limited(depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            parse_json(text)
    tables = ["a = " + "[" * depth + "]" * depth, "a = " + "{b = " * depth + "1" + "}" * depth]
    for text in [*tables, ".".join("a" * depth) + " = 1", f"[{'.'.join('a' * depth)}]"]:
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            parse_toml(text)


def test_nesting_within_the_limit_is_read() -> None:
    assert parse_json("[" * 99 + "]" * 99) == json.loads("[" * 99 + "]" * 99)
    assert parse_toml("a.b.c = [[1], [2]]") == {"a": {"b": {"c": [[1], [2]]}}}


@pytest.mark.parametrize("digits", [21, 400, 4000, 5000, 1_000_000])
def test_whole_numbers_fit_into_64_bits(digits: int) -> None:
    with pytest.raises(ValueError) as error:
        parse_json(f'{{"a": [{"9" * digits}]}}')
    assert len(str(error.value)) < 200
    for number in ("9" * digits, f"0x{'f' * digits}", f"-{'9' * digits}"):
        with pytest.raises(ValueError) as error:
            parse_toml(f"a = {number}")
        assert len(str(error.value)) < 200
    assert parse_json(str(2**63)) == 2**63
