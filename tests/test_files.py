"""Files are written whole or not at all, never through a link, and read only if they are files."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tightrope import files
from tightrope.errors import UserError
from tightrope.limits import JSON_BYTES
from tightrope.reading import read_bytes

PRECIOUS = b"the work of weeks"
ANY = re.compile(".+")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file elsewhere that must not be touched."""
    path = tmp_path / "elsewhere" / "precious"
    path.parent.mkdir()
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir()
    return path


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [True, False], ids=["to a file", "dangling"])
def test_predictable_names_are_not_written_through(
    place: Path, precious: Path, exists: bool
) -> None:
    """Whoever guesses the name of a temporary file could redirect what is written to it."""
    if not exists:
        precious.unlink()
    for name in ("a.json", "a.json.tmp", f".a.json.{os.getpid()}.tmp"):
        if name != "a.json":
            (place / name).symlink_to(precious)
    files.write_json(place / "a.json", {"a": 1})
    assert files.read_json(place / "a.json", "a test") == {"a": 1}
    assert precious.exists() == exists
    assert not exists or precious.read_bytes() == PRECIOUS


def test_temporary_names_are_random_and_kept_from_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    original = os.open

    def spy(path: str, flags: int, *rest: int, **options: int) -> int:
        if str(path).endswith(".tmp"):
            seen.append((path, flags))
        return original(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", spy)
    for _ in range(3):
        files.write_text(place / "a.txt", "a")
    assert len({name for name, _ in seen}) == 3
    for name, flags in seen:
        assert flags & os.O_EXCL and flags & os.O_NOFOLLOW and flags & os.O_CREAT
        assert re.fullmatch(rf"\.a\.txt\.[0-9a-f]{{16}}\.{os.getpid()}\.tmp", name)
    assert [path.name for path in place.iterdir()] == ["a.txt"]


def test_a_link_is_refused_and_left(place: Path, precious: Path) -> None:
    link = place / "a.txt"
    link.symlink_to(precious)
    for write in (lambda: files.write_text(link, "new"), lambda: files.open_to_append(link)):
        with pytest.raises(UserError, match=r"a\.txt is a link") as caught:
            write()
        assert "\n" not in str(caught.value)
    assert link.is_symlink() and precious.read_bytes() == PRECIOUS
    assert [path.name for path in place.iterdir()] == ["a.txt"]


def test_a_linked_folder_is_the_users_choice_unless_it_is_ours(tmp_path: Path, place: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(place)
    files.write_text(link / "a.txt", "through the user's link")
    assert (place / "a.txt").read_text() == "through the user's link"
    with pytest.raises(UserError, match="link is a link"):
        files.write_text(link / "b.txt", "ours", own_folder=True)
    with pytest.raises(UserError, match="link is a link"):
        files.remove_leftovers(link, ANY, own_folder=True)
    assert [path.name for path in place.iterdir()] == ["a.txt"]


def test_a_dangling_link_in_place_of_our_folder(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link is a link"):
        files.write_text(link / "b.txt", "ours", own_folder=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_swapped_for_a_link_meanwhile(tmp_path: Path, place: Path, precious: Path) -> None:
    """The file is finished in the folder in which it was begun."""

    def write(file: object) -> None:
        place.rename(tmp_path / "moved")
        place.symlink_to(precious.parent)

    files.write_atomically(place / "precious", write, own_folder=True)
    assert precious.read_bytes() == PRECIOUS and len(list(precious.parent.iterdir())) == 1
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["precious"]


def test_a_link_swapped_in_meanwhile(place: Path, precious: Path) -> None:
    target = place / "a.txt"

    def write(file: object) -> None:
        target.symlink_to(precious)

    with pytest.raises(UserError, match="link"):
        files.write_atomically(target, write)
    assert precious.read_bytes() == PRECIOUS and len(list(place.iterdir())) == 1


def test_a_temporary_file_swapped_for_a_link_meanwhile(place: Path, precious: Path) -> None:
    """What is written goes into the file that was opened, whatever has its name now."""

    def write(file: object) -> None:
        (temporary,) = place.glob(".a.txt.*.tmp")
        temporary.unlink()
        temporary.symlink_to(precious)
        os.write(file.fileno(), b"new")  # type: ignore[attr-defined]

    files.write_atomically(place / "a.txt", write)
    assert precious.read_bytes() == PRECIOUS


# --- other things that are not files --------------------------------------------------------------


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_folder(path: Path) -> None:
    path.mkdir()


IRREGULAR = pytest.mark.parametrize("make", [make_pipe, make_socket, make_folder])


@IRREGULAR
def test_what_is_not_a_file_is_not_replaced(
    place: Path, make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)  # the names of sockets are short
    make(Path("a"))  # type: ignore[operator]
    kind = Path("a").lstat().st_mode
    with pytest.raises(UserError, match="not a file"):
        files.write_text(Path("a"), "new")
    with pytest.raises((UserError, OSError)):
        files.open_to_append(Path("a"))
    assert Path("a").lstat().st_mode == kind and len(list(Path().iterdir())) == 1


@IRREGULAR
def test_what_is_not_a_file_is_not_waited_for(
    place: Path, make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    make(Path("a"))  # type: ignore[operator]
    with pytest.raises((UserError, OSError)):
        read_bytes(Path("a"), JSON_BYTES)
    with pytest.raises((UserError, OSError)):
        files.read_json(Path("a"), "a test")


def test_a_device_is_not_read() -> None:
    with pytest.raises(UserError, match="device"):
        read_bytes(Path("/dev/zero"), JSON_BYTES)


def test_a_file_with_two_names_is_not_added_to(place: Path, precious: Path) -> None:
    (place / "a.jsonl").hardlink_to(precious)
    with pytest.raises(UserError, match=r"a\.jsonl has other names"):
        files.open_to_append(place / "a.jsonl")
    files.write_text(place / "a.jsonl", "replaced, not changed")
    assert precious.read_bytes() == PRECIOUS


# --- as before ----------------------------------------------------------------------------------


def test_appending(place: Path) -> None:
    for text in (b"one\n", b"two\n"):
        with files.open_to_append(place / "a") as file:
            file.write(text)
    assert (place / "a").read_bytes() == b"one\ntwo\n"


def test_permissions_are_those_of_any_new_file(place: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_text(place / "a", "a")
        with files.open_to_append(place / "b"):
            pass
    finally:
        os.umask(before)
    assert [(place / name).stat().st_mode & 0o777 for name in "ab"] == [0o640, 0o640]


def test_long_names(place: Path) -> None:
    for name in ("x" * 250, "ä" * 120):
        files.write_text(place / name, "long")
        assert (place / name).read_text() == "long"


def test_a_failed_write_leaves_what_was_there(place: Path) -> None:
    files.write_text(place / "a", "old")

    def fail(file: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(place / "a", fail)
    assert [path.name for path in place.iterdir()] == ["a"]
    assert (place / "a").read_text() == "old"


def test_errors_name_the_whole_path(place: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, files.Folder(place) as folder:
        folder.open("absent", os.O_RDONLY)
    assert caught.value.filename == str(place / "absent")


# --- leftovers ------------------------------------------------------------------------------------


def test_leftovers_of_dead_processes_are_removed(place: Path) -> None:
    """Those of this version and of earlier ones; nothing that we could not have made."""
    dead, token = dead_process(), "0123456789abcdef"
    ours = [f".a.json.{token}.{dead}.tmp", f".a.json.{dead}.tmp", f".b.x.{token}.{dead}.tmp"]
    others = [
        f".c.json.{token}.{dead}.tmp",  # of a file that is not ours
        f".c.json.{dead}.tmp",
        f"a.json.{token}.{dead}.tmp",
        f".a.json.{token}.{os.getppid()}.tmp",  # alive
        f".a.json.{token}.{dead}.tmp2",
        f".a.json.{token[:8]}.{dead}.tmp",
        ".a.json.tmp",
        ".a.json.x.tmp",
        ".a.json.99999999999999999999.tmp",
        "a.json",
    ]
    for name in (*ours, *others):
        (place / name).write_text("half")
    (place / f".a.json.{token[::-1]}.{dead}.tmp").symlink_to(place / "a.json")
    (place / f".b.x.{dead}.tmp").mkdir()
    of = re.compile(r"a\.json|b\.x")
    assert all(files.is_leftover(name, of) for name in ours)
    files.remove_leftovers(place, of)
    links = [f".a.json.{token[::-1]}.{dead}.tmp", f".b.x.{dead}.tmp"]
    assert sorted(p.name for p in place.iterdir()) == sorted([*others, *links])
