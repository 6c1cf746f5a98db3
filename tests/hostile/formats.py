"""Changes that know the format: they keep it whole, and lie within it."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

from mutations import BYTES, NUMBERS, TEXT, TEXTS, encode

Change = Callable[[bytes, Random], bytes]

_RAW = "\ue000"  # marks what is to be written into JSON as it is
SIZES = (0, 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def change_bytes(content: bytes, random: Random) -> bytes:
    """Change bytes, whatever they mean."""
    return random.choice(BYTES)(content, random)


def change_text(content: bytes, random: Random) -> bytes:
    """Change a text, whatever it says."""
    return encode(random.choice(TEXT)(content.decode("utf-8", "surrogateescape"), random))


# --- JSON ---------------------------------------------------------------------------------------


def change_json(content: bytes, random: Random) -> bytes:
    """Replace, remove or add one of the values, or rename a key."""
    try:
        value = json.loads(content)
    except ValueError:
        return change_text(content, random)
    return _dump(_change_value(value, random))


def change_json_line(content: bytes, random: Random) -> bytes:
    """Change one record of a file that has one a line."""
    lines = content.splitlines(keepends=True) or [b"{}\n"]
    where = random.randrange(len(lines))
    lines[where] = change_json(lines[where], random).rstrip(b"\n") + b"\n"
    return b"".join(lines)


def _dump(value: Any) -> bytes:
    parts = json.dumps(value, ensure_ascii=False).split(_RAW)
    # `"MARK raw MARK"` becomes `raw`.
    for i in range(1, len(parts), 2):
        parts[i - 1], parts[i + 1] = parts[i - 1][:-1], parts[i + 1][1:]
    return encode("".join(parts))


def _raw(text: str) -> str:
    return f"{_RAW}{text}{_RAW}"


def _nasty(random: Random) -> Any:
    depth = random.choice((150, 5000, 100_000))
    return random.choice(
        (
            _raw(random.choice([n for n in NUMBERS if not set(n) & set('"\\')])),
            _raw("[" * depth + "]" * depth),
            _raw('{"a":' * depth + "1" + "}" * depth),
            random.choice(TEXTS),
            *(None, True, [], {}, [[]], [None] * 1000, {"a": 1}, -1, 0.5, 10**18),
            [random.choice(SIZES) for _ in range(random.choice((1, 3, 1000)))],
            {random.choice(TEXTS): 1},
        )
    )


def _change_value(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.95:
        key = random.choice(list(value))
        action = random.random()
        changed = {k: v for k, v in value.items() if k != key or action > 0.1}
        if action > 0.3:
            changed[key] = _change_value(value[key], random)
        elif action > 0.2:
            changed[random.choice((*TEXTS, f"{key}2"))] = value[key]
        return changed
    if isinstance(value, list) and value and random.random() < 0.8:
        where = random.randrange(len(value))
        return [*value[:where], _change_value(value[where], random), *value[where + 1 :]]
    return _nasty(random)


# --- archives, weights, images ------------------------------------------------------------------


def change_safetensors(content: bytes, random: Random) -> bytes:
    """Change the header of weights, or its length."""
    length = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + length], content[8 + length :]
    if random.random() < 0.2:
        return random.choice(SIZES).to_bytes(8, "little") + header + rest
    header = random.choice((change_json, change_json, change_text))(header, random)
    return len(header).to_bytes(8, "little") + header + rest


def change_zip(content: bytes, random: Random) -> bytes:
    """Change one member of an archive (or compress it, or write it twice)."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(members))
    members[name] = random.choice((change_bytes, change_array, lambda c, r: bytes(1 << 27)))(
        members[name], random
    )
    packed = io.BytesIO()
    how = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(packed, "w", how) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        if random.random() < 0.1:
            archive.writestr(random.choice(TEXTS).replace("\0", "") or "x", b"more")
    return packed.getvalue()


def change_array(content: bytes, random: Random) -> bytes:
    """Change what the header of an array says of its shape and type."""
    if not content.startswith(b"\x93NUMPY"):
        return change_bytes(content, random)
    (length,) = struct.unpack("<H", content[8:10])
    text, rest = content[10 : 10 + length].decode("latin-1"), content[10 + length :]
    shapes = ("()", "(-1,)", "(2.5,)", "(0,)", "(10**9,)", "'a'", f"({2**40},)", f"({2**62}, 8)")
    kinds = ("|O", "|S0", "<f8", "<f2", "|V9", "<U3", "<M8[D]", ">c16", "|b1", "<f99", "[('a',2)]")
    if random.random() < 0.5:
        start = text.index("'shape':") + 8
        text = f"{text[:start]} {random.choice(shapes)}, }}\n"
    else:
        start = text.index("'descr':") + 8
        text = f"{text[:start]} '{random.choice(kinds)}'{text[text.index(',', start) :]}"
    return content[:8] + struct.pack("<H", len(text)) + text.encode("latin-1") + rest


def change_png(content: bytes, random: Random) -> bytes:
    """Change the header of an image, with the right checksum."""
    if not content.startswith(b"\x89PNG"):
        return change_bytes(content, random)
    header = bytearray(content[16:29])
    if random.random() < 0.6:
        size = random.choice((0, 7, 5000, 20_000, 2**31 - 1, 2**32 - 1))
        header[:4] = struct.pack(">I", size)
        header[4:8] = struct.pack(">I", random.choice((size, 6)))
    else:
        header[random.randrange(8, 13)] = random.randrange(256)
    checksum = struct.pack(">I", zlib.crc32(b"IHDR" + bytes(header)))
    return content[:16] + bytes(header) + checksum + content[33:]


def change_compressed(inner: Change) -> Change:
    """Return a change of a compressed file: of what is in it, of itself, or into a bomb."""

    def change(content: bytes, random: Random) -> bytes:
        chance = random.random()
        if chance < 0.2:
            return change_bytes(content, random)
        plain = gzip.decompress(content)
        if chance < 0.3:
            filler = random.choice((b" ", b"(", b"\0", b";", b"(assert (<= Y_0 0))\n"))
            return gzip.compress(plain, 1) + gzip.compress(filler * ((1 << 28) // len(filler)), 1)
        return gzip.compress(inner(plain, random), 1)

    return change


# --- VNN-LIB ------------------------------------------------------------------------------------

_PIECES = (
    *("(", ")", "(and", "(or", "(assert", "(<= X_0", "(+", "(* 1e999", "(/ 1", "(-", "Y_0", "X_99"),
    *("(declare-const X_3 Real)", "(declare-const Y_4 Real)", "(check-sat)", "; ", "X_00", "Y_-1"),
    *("(assert (<= (* 1e-300 X_0) 1e30))", "(assert (<= (* 1e-300 Y_0) 1e30))", "(assert false)"),
    *("(assert (or (<= Y_0 0) (<= Y_1 0)))\n" * 16, "(assert (>= X_0 X_1))", "(push 1)"),
    *("(assert (<= " + "(* 2 " * 150 + "Y_0" + ")" * 150 + " 1))", "(assert (= Y_0 1))"),
    "(assert (<= (+" + " (/ 1 7919)" * 1000 + ") Y_0))",
    "(assert (or " + "(and (<= X_0 0.3) (<= Y_0 0))" * 3000 + "))",
    "".join(f"(assert (<= Y_{i % 4} {i}))" for i in range(5000)),
)


def change_vnnlib(content: bytes, random: Random) -> bytes:
    """Put pieces of VNN-LIB where others were."""
    text = content.decode("utf-8", "surrogateescape")
    if random.random() < 0.4:
        return change_text(content, random)
    for _ in range(random.choice((1, 1, 2, 5))):
        start = random.randrange(len(text) + 1)
        end = start + random.choice((0, 0, 1, 10))
        if random.random() < 0.5:  # between lines, where it is more often legal
            start = end = text.find("\n", start) + 1
        text = text[:start] + random.choice(_PIECES) + text[end:]
    return encode(text)
