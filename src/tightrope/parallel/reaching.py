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
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/]+):(?P<port>[0-9]{1,5})")
# What every client of the head's server begins with, and the kind of what it is answered.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HEADER, _SETTINGS = 9, 4


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
        answer = _greet(place)
    except OSError as error:
        raise _silent(address, error.strerror or "no answer") from None
    if len(answer) < _HEADER or answer[3] != _SETTINGS:
        raise _silent(address, "what answers is not Ray" if answer else "no answer")


def _greet(place: tuple[str, int]) -> bytes:
    """Say hello; return the beginning of the answer, nothing if there is none in time.

    To look up a name, and to try all of its machines, may take longer than anybody waits.
    """
    heard: queue.SimpleQueue[bytes | OSError] = queue.SimpleQueue()

    def call() -> None:
        try:
            heard.put(_answer(place, time.monotonic() + SECONDS))
        except OSError as error:
            heard.put(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        answer = heard.get(timeout=SECONDS)
    except queue.Empty:
        return b""
    if isinstance(answer, OSError):
        raise answer
    return answer


def _answer(place: tuple[str, int], end: float) -> bytes:
    """Call, and return what is heard until the end."""
    with socket.create_connection(place, timeout=SECONDS) as connection:
        connection.sendall(_GREETING)
        answer = b""
        while len(answer) < _HEADER and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                piece = connection.recv(_HEADER - len(answer))
            except TimeoutError:
                break
            if not piece:
                break
            answer += piece
        return answer


def _silent(address: str, why: str) -> UserError:
    return UserError(
        f"no Ray cluster answers at {address} ({why}); see `ray status` there, or leave out "
        "--address to use this machine alone"
    )
