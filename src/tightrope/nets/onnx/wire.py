"""How much memory a file's messages will take, before protobuf allocates it.

Two bytes of a file can become a message of two hundred bytes in memory, so a small file (or a tiny
compressed one) could fill it. The fields are counted on the file's bytes.
"""

from __future__ import annotations

from typing import Any

from tightrope.limits import Limit

# What a field takes at most, and what one byte of a packed list of integers does.
FIELD_BYTES = 1024
PACKED_FACTOR = 16

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}


class DamagedError(ValueError):
    """The bytes are no protobuf message."""


def check_memory(content: bytes, message: Any, limit: Limit, what: str) -> None:
    """Raise an error if parsing `content` as a message of that type would exceed the limit."""
    most = limit.value
    total = len(content)
    open_ones = [(message.DESCRIPTOR, 0, len(content))]
    while open_ones:
        descriptor, position, end = open_ones.pop()
        fields = descriptor.fields_by_number
        while position < end:
            total += FIELD_BYTES
            if total > most:
                raise limit.exceeded(f"{what}, unpacked,")
            tag, position = _varint(content, position, end)
            kind, field = tag & 7, fields.get(tag >> 3)
            if kind == _VARINT:
                _, position = _varint(content, position, end)
            elif kind in _WIDTHS:
                position += _WIDTHS[kind]
            elif kind == _BYTES:
                length, position = _varint(content, position, end)
                if length > end - position:
                    raise DamagedError("truncated")
                if field is not None and field.message_type is not None:
                    open_ones.append((field.message_type, position, position + length))
                elif field is not None and field.cpp_type in _integers(field):
                    total += PACKED_FACTOR * length
                    if total > most:
                        raise limit.exceeded(f"{what}, unpacked,")
                position += length
            else:
                raise DamagedError("an unknown kind of field")
        if position != end:
            raise DamagedError("truncated")


def _integers(field: Any) -> tuple[int, ...]:
    return (
        field.CPPTYPE_INT32,
        field.CPPTYPE_INT64,
        field.CPPTYPE_UINT32,
        field.CPPTYPE_UINT64,
        field.CPPTYPE_ENUM,
    )


def _varint(content: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise DamagedError("truncated")
