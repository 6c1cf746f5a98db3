"""Changes of any file: of its bytes, of its text, and of what kind of thing it is."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

ESCAPES = (
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m",
    "a\x00b",
    "\u202egnp.exe",
    "\udcff",
    "\r\nok",
    "\b\b",
)
NUMBERS = (
    *("0", "-1", "-0", "1e999", "-1e999", "1e-999", "nan", "NaN", "Infinity", "-inf", "1e308"),
    *(str(2**31), str(2**63), str(2**64), str(-(2**63)), "9" * 400, "9" * 5000, "0." + "3" * 5000),
    *("1e99999999999", "0x" + "f" * 5000, "1_000", "٣", "0b1", "1/0", "true", "null", "1.5"),
)
TEXTS = (
    *ESCAPES,
    *("", " ", "../../outside/a.txt", "/etc/passwd", "a" * 100_000, "😀" * 50, "None", "none"),
    *("/dev/zero", "/dev/stdin", "~", "$(touch x)", "%s%s%n", "{0}", "[red]", "<script>", "\\"),
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9.-]*")


def encode(text: str) -> bytes:
    """Write text, halves of characters as the bytes they came from."""
    return text.encode("utf-8", "surrogateescape")


# --- bytes --------------------------------------------------------------------------------------


def flip_bits(content: bytes, random: Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(random.choice((1, 1, 2, 5, 30))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def set_bytes(content: bytes, random: Random) -> bytes:
    changed = bytearray(content or b"\0")
    start = random.randrange(len(changed))
    length = random.choice((1, 2, 4, 8))
    changed[start : start + length] = bytes([random.choice((0, 1, 0x7F, 0x80, 0xFF))]) * length
    return bytes(changed)


def cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def remove_part(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content) + 1)
    return content[:start] + content[start + random.choice((1, 4, 64, 1024)) :]


def repeat_part(content: bytes, random: Random) -> bytes:
    start = random.randrange(len(content) + 1)
    part = content[start : start + random.choice((1, 8, 100, 1000))]
    return content[:start] + part * random.choice((2, 10, 1000)) + content[start:]


def append(content: bytes, random: Random) -> bytes:
    return content + random.choice((b"\0" * 1000, b"\n", random.randbytes(100), content))


def replace_all(content: bytes, random: Random) -> bytes:
    return random.choice(
        (b"", b"\0", b"\xff\xfe", random.randbytes(500), b"PK\x03\x04", b"\x1f\x8b", b"\n" * 1000)
    )


BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(flip_bits, set_bytes, cut, remove_part, repeat_part, append, replace_all),
)


# --- text ---------------------------------------------------------------------------------------


def change_number(text: str, random: Random) -> str:
    return _replace_one(_NUMBER, random.choice(NUMBERS), text, random)


def change_word(text: str, random: Random) -> str:
    return _replace_one(_WORD, random.choice(TEXTS), text, random)


def insert(text: str, random: Random) -> str:
    place = random.randrange(len(text) + 1)
    return text[:place] + random.choice((*TEXTS, *NUMBERS, '"', "'", "\n", "\ufeff")) + text[place:]


def nest(text: str, random: Random) -> str:
    depth = random.choice((150, 3000, 200_000))
    opening, closing = random.choice(("[]", "{}", "()", ("{a=", "}"), ('{"a":', "}"), ("a.", "")))
    inner = opening * depth + random.choice(("", "1")) + closing * random.choice((depth, 0))
    found = list(_NUMBER.finditer(text))
    if not found:
        return inner
    where = random.choice(found)
    return text[: where.start()] + inner + text[where.end() :]


def repeat_line(text: str, random: Random) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    where = random.randrange(len(lines))
    lines[where:where] = [lines[where]] * random.choice((1, 1, 5, 10_000))
    return "".join(lines)


def remove_line(text: str, random: Random) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    del lines[random.randrange(len(lines))]
    return "".join(lines)


def shuffle_lines(text: str, random: Random) -> str:
    lines = text.splitlines(keepends=True)
    random.shuffle(lines)
    return "".join(lines)


def change_line_ends(text: str, random: Random) -> str:
    return text.replace("\n", random.choice(("\r\n", "\r", "\u2028", "\x0b", "")))


TEXT: tuple[Callable[[str, Random], str], ...] = (
    *(change_number, change_number, change_word, change_word, insert, nest),
    *(repeat_line, remove_line, shuffle_lines, change_line_ends),
)


def _replace_one(pattern: re.Pattern[str], new: str, text: str, random: Random) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return new
    where = random.choice(found)
    return text[: where.start()] + new + text[where.end() :]


# --- what kind of thing it is -------------------------------------------------------------------


def _link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def _socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")  # the names of sockets are short
    finally:
        os.close(folder)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole, which needs no room


def _hard_link(path: Path) -> None:
    os.link(path.parents[_levels(path)] / "outside" / "a.txt", path)


def _outside(path: Path) -> None:
    path.symlink_to(path.parents[_levels(path)] / "outside" / "a.txt")


def _outside_folder(path: Path) -> None:
    path.symlink_to(path.parents[_levels(path)] / "outside")


def _levels(path: Path) -> int:
    """Return how many folders above a file the place is beside which `outside` lies."""
    return next(i for i, parent in enumerate(path.parents) if (parent / "outside").is_dir())


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "zeros": _link("/dev/zero"),
    "nothing": _link("nowhere"),
    "itself": lambda path: path.symlink_to(path.name),
    "outside": _outside,
    "outside folder": _outside_folder,
    "hard link": _hard_link,
    "huge": _huge,
    "missing": lambda path: None,
}
