"""Whether a Ray cluster answers at an address, found out before Ray itself waits for minutes."""

from __future__ import annotations

import queue
import re
import socket
import threading
import time

from tightrope.errors import UserError, shorten

SECONDS = 10.0
HERE = ("auto", "local")
NOT_RAY, NO_HEAD = "what answers is not Ray", "what answers is not the head of a cluster"
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/]+):(?P<port>[0-9]{1,5})")
# A call by HTTP/2, as Ray's clients make it: which cluster are you? Any server of Ray's kind
# answers with status 200, and a head does not say that it knows no such call. Ray itself would
# repeat the call for half a minute, and write a line each time.
_METHOD = b"/ray.rpc.NodeInfoGcsService/GetClusterId"
_OK, _UNKNOWN = 0x88, b"grpc-status\x0212"
_HEADER, _LARGEST = 9, 1 << 14
_DATA, _HEADERS, _RESET, _SETTINGS, _GOODBYE = 0, 1, 3, 4, 7
_LAST, _WHOLE = 1, 4  # flags: nothing follows, neither frames nor headers


def check_address(address: str) -> None:
    """Refuse an address at which no cluster answers within seconds."""
    if address in HERE:
        return
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise UserError(
            f"address must be HOST:PORT of a cluster's head, auto or local, got {shorten(address)}"
        )
    place = found["host"].strip("[]"), int(found["port"])
    try:
        why = _ask(place)
    except OSError as error:
        why = error.strerror or "no answer"
    if why:
        raise UserError(
            f"no Ray cluster answers at {address} ({why}); see `ray status` there, or leave out "
            "--address to use this machine alone"
        )


def _ask(place: tuple[str, int]) -> str:
    """Call; return what is wrong with the answer, nothing if that is a cluster's.

    To look up a name, and to try all of its machines, may take longer than anybody waits.
    """
    heard: queue.SimpleQueue[str | OSError] = queue.SimpleQueue()

    def call() -> None:
        try:
            heard.put(_judge(place, time.monotonic() + SECONDS))
        except OSError as error:
            heard.put(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        answer = heard.get(timeout=SECONDS)
    except queue.Empty:
        return "no answer"
    if isinstance(answer, OSError):
        raise answer
    return answer


def _judge(place: tuple[str, int], end: float) -> str:
    """Call, and judge what is heard until the end."""
    with socket.create_connection(place, timeout=SECONDS) as connection:
        connection.sendall(_call())
        kind, _ = _frame(connection, end)
        if kind is None:
            return "no answer"
        if kind != _SETTINGS:
            return NOT_RAY
        while kind not in (None, _HEADERS, _RESET, _GOODBYE):
            kind, content = _frame(connection, end)
        if kind is None:
            return "no answer"
        if kind != _HEADERS or content[:1] != bytes((_OK,)):
            return NOT_RAY
        return NO_HEAD if _UNKNOWN in content else ""


def _frame(connection: socket.socket, end: float) -> tuple[int | None, bytes]:
    """Return the kind and the content of the next frame; no kind if there is none in time."""
    header = _read(connection, _HEADER, end)
    if not header:
        return None, b""
    length = int.from_bytes(header[:3], "big")
    if len(header) < _HEADER or length > _LARGEST:
        return _GOODBYE, b""
    return header[3], _read(connection, length, end)


def _read(connection: socket.socket, length: int, end: float) -> bytes:
    """Return so many bytes, or as many as come before the end."""
    answer = b""
    while len(answer) < length and (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            piece = connection.recv(length - len(answer))
        except TimeoutError:
            break
        if not piece:
            break
        answer += piece
    return answer


def _call() -> bytes:
    """Return everything that a client says."""

    def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
        return len(content).to_bytes(3, "big") + bytes((kind, flags, 0, 0, 0, stream)) + content

    def text(value: bytes) -> bytes:
        return bytes((len(value),)) + value

    # POST, http, then names by their place in the table of HTTP/2: path, authority, content-type.
    headers = b"\x83\x86\x04" + text(_METHOD) + b"\x01" + text(b"ray")
    headers += b"\x0f\x10" + text(b"application/grpc") + b"\0" + text(b"te") + text(b"trailers")
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(_SETTINGS, 0, 0)
        + frame(_HEADERS, _WHOLE, 1, headers)
        + frame(_DATA, _LAST, 1, bytes(5))  # no arguments
    )
