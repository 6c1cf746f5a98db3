"""Bad uses of engines, each told in one line before anything is computed or written."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hangs import PATIENCE

import tightrope as tr
from tightrope.cli.main import main
from tightrope.parallel import on_ray, reaching
from tightrope.parallel.reaching import check_address
from tightrope.runs import Run


def frame(kind: int, stream: int, content: bytes = b"") -> bytes:
    """Return a message of HTTP/2."""
    return bytes((0, 0, len(content), kind, 0, 0, 0, 0, stream)) + content


SETTINGS = frame(4, 0)  # what a server of Ray's kind begins with
UPDATE, RESET, GOODBYE = frame(8, 0, bytes(4)), frame(3, 1, bytes(4)), frame(7, 0, bytes(8))
CLUSTER = SETTINGS + UPDATE + frame(1, 1, b"\x88")  # status 200
OTHER = SETTINGS + frame(1, 1, b"\x88\x40\x0bgrpc-status\x0212")  # it knows no such call
WEBSITE = SETTINGS + frame(1, 1, b"\x8d")  # status 404


def error_of(run: Run, **options: Any) -> str:
    """Return the error of `certify`, which must be one line and leave nothing behind."""
    before = sorted(run.folder.rglob("*"))
    with pytest.raises(tr.UserError) as caught:
        tr.certify(run, **options)
    assert sorted(run.folder.rglob("*")) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def exit_code(*arguments: str) -> object:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return caught.value.code


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, as far as it is looked at before an address is."""
    monkeypatch.setattr(on_ray, "load_ray", lambda: None)


@contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """Answer whoever calls; None is silence. Gives the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ended = threading.Event()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                if answer is not None:
                    connection.sendall(answer)
                else:
                    ended.wait()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


# --- Ray is missing -------------------------------------------------------------------------------


def test_without_ray_it_is_said_how_to_get_it(
    certifiable: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    message = error_of(certifiable, engine="ray")
    assert message == "Ray is not installed: pip install 'tightrope[ray]'"


@pytest.mark.parametrize("command", [["compare", "--methods", "ibp"], ["reproduce", "precision"]])
def test_without_ray_the_other_commands_say_so_too(
    command: list[str],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    out = tmp_path / "out"
    assert exit_code(*command, "--engine", "ray", "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert error.strip() == "tightrope: Ray is not installed: pip install 'tightrope[ray]'"
    assert not list(out.glob("*"))


# --- options that make no sense -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "slurm"}, "unknown engine 'slurm'"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
        ({"address": "auto"}, "address and gpus per task go with engine ray"),
        ({"gpus_per_task": 1.0}, "address and gpus per task go with engine ray"),
        ({"engine": "ray", "shard": "1/2"}, "give either shard or engine ray"),
        ({"engine": "ray", "gpus_per_task": -1.0}, "gpus per task must be 0 or more"),
        ({"engine": "ray", "gpus_per_task": float("nan")}, "gpus per task must be 0 or more"),
        ({"engine": "ray", "gpus_per_task": 1.5}, "gpus per task must be whole, or a share"),
        ({"engine": "ray", "address": "nowhere"}, "address must be HOST:PORT"),
        ({"shard": "3/2"}, "shard must be K/N with 1 <= K <= N"),
    ],
)
@pytest.mark.usefixtures("pretended")
def test_bad_options_are_refused(certifiable: Run, options: dict[str, Any], message: str) -> None:
    assert message in error_of(certifiable, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "5/4"], "shard must be K/N with 1 <= K <= N <= 1000000, such as 3/16, got"),
        (["--shard", "1/2", "--engine", "ray"], "give either shard or engine ray"),
        (["--shard", "1/11"], "shard 1/11 has no samples: there are only 10"),
    ],
)
@pytest.mark.usefixtures("pretended")
def test_the_command_says_so_in_one_line(
    certifiable: Run, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("certify", str(certifiable.folder), *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not certifiable.journal.exists()


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "ray://h:1", "a b:1", "h:1\n"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(tr.UserError, match="address must be HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize("address", ["auto", "local"])
def test_names_that_ray_knows_are_left_to_it(address: str) -> None:
    check_address(address)


def test_a_cluster_that_answers_is_fine() -> None:
    with server(CLUSTER) as address:
        check_address(address)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers is not Ray"),
        (SETTINGS[:4], "what answers is not Ray"),
        (WEBSITE, "what answers is not Ray"),
        (SETTINGS + RESET, "what answers is not Ray"),
        (SETTINGS + GOODBYE, "what answers is not Ray"),
        (OTHER, "what answers is not the head of a cluster"),
        (SETTINGS, "no answer"),
        (b"", "no answer"),
        (None, "no answer"),
    ],
)
def test_whoever_is_no_cluster_is_refused(
    answer: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "SECONDS", 0.5)
    with server(answer) as address, pytest.raises(tr.UserError) as caught:
        check_address(address)
    assert str(caught.value).startswith(f"no Ray cluster answers at {address} ({why})")


def test_names_that_are_looked_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(reaching, "SECONDS", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: asked.wait(PATIENCE) and [])
    try:
        with pytest.raises(tr.UserError, match=r"answers at nowhere:6379 \(no answer\)"):
            check_address("nowhere:6379")
    finally:
        asked.set()


def test_a_cluster_that_ray_has_noted_may_be_gone(
    certifiable: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = ["127.0.0.1:1"]
    services = SimpleNamespace(canonicalize_bootstrap_address=lambda address: noted[0])
    ray = SimpleNamespace(_private=SimpleNamespace(services=services))
    monkeypatch.setattr(on_ray, "load_ray", lambda: ray)
    message = error_of(certifiable, engine="ray", address="auto")
    assert message.startswith("no Ray cluster answers at 127.0.0.1:1 (")
    with server(CLUSTER) as noted[0]:
        on_ray.RayCluster("auto").check()


@pytest.mark.usefixtures("pretended")
def test_an_address_at_which_nobody_listens(certifiable: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    address = f"127.0.0.1:{port}"
    message = error_of(certifiable, engine="ray", address=address)
    assert message.startswith(f"no Ray cluster answers at {address} (")
