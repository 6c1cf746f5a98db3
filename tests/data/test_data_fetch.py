"""Downloads, from a real server on this machine."""

import contextlib
import hashlib
import http.server
import io
import socket
import tarfile
import threading
import zipfile

import pytest

from tightrope.data import Source, fetch
from tightrope.data.fetch import download
from tightrope.errors import UserError

CONTENT = bytes(range(256)) * 4000


def tar_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Serves one archive; `ranges` and `stop_after` make it a better or worse server."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.stop_after: int | None = None
        self.requested: list[str | None] = []

    def source(self, name, content, folder="tiny", md5=None):
        self.files[f"/{name}"] = content
        url = f"http://127.0.0.1:{self.server_address[1]}/{name}"
        return Source(url, md5 or hashlib.md5(content).hexdigest(), folder)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.requested.append(wanted)
        content = self.server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        start = 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        stop = self.server.stop_after
        self.wfile.write(content[start : None if stop is None else start + stop])
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


ARCHIVES = [
    ("tiny.tar.gz", tar_of({"tiny/a/file": CONTENT, "tiny/other": b"x"})),
    ("tiny.zip", zip_of({"tiny/a/file": CONTENT, "tiny/other": b"x"})),
]


@pytest.mark.parametrize(("name", "content"), ARCHIVES)
def test_download_and_unpack(server, tmp_path, name, content):
    seen = []
    source = server.source(name, content)
    folder = download(source, tmp_path / "new", lambda *step: seen.append(step))
    assert folder == tmp_path / "new" / "tiny"
    assert (folder / "a" / "file").read_bytes() == CONTENT
    assert [entry.name for entry in folder.parent.iterdir()] == ["tiny"], "nothing else is left"
    assert seen[0] == (0, len(content)) and seen[-1] == (len(content), len(content))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_what_is_there_is_not_downloaded_again(server, tmp_path):
    name, content = ARCHIVES[0]
    source = server.source(name, content)
    (tmp_path / name).write_bytes(content)
    download(source, tmp_path)
    download(source, tmp_path)
    assert server.requested == []


def test_a_wrong_archive_that_is_there_is_downloaded(server, tmp_path):
    name, content = ARCHIVES[0]
    (tmp_path / name).write_bytes(b"an error page, saved")
    assert download(server.source(name, content), tmp_path).is_dir()
    assert server.requested == [None]


@pytest.mark.parametrize(("name", "content"), ARCHIVES)
def test_resume(server, tmp_path, name, content):
    source = server.source(name, content)
    server.stop_after = 1000
    with pytest.raises(UserError, match=f"broke off after 1000 of {len(content)} bytes"):
        download(source, tmp_path)
    assert (tmp_path / f"{name}.part").read_bytes() == content[:1000]
    server.stop_after = None
    seen = []
    folder = download(source, tmp_path, lambda *step: seen.append(step))
    assert (folder / "a" / "file").read_bytes() == CONTENT
    assert server.requested == [None, "bytes=1000-"]
    assert seen[0] == (1000, len(content)) and seen[-1] == (len(content), len(content))


def test_a_server_without_ranges_starts_again(server, tmp_path):
    name, content = ARCHIVES[0]
    server.ranges = False
    (tmp_path / f"{name}.part").write_bytes(b"rubbish")
    folder = download(server.source(name, content), tmp_path)
    assert (folder / "a" / "file").read_bytes() == CONTENT
    assert server.requested == ["bytes=7-"]


def test_a_complete_part_is_used(server, tmp_path):
    name, content = ARCHIVES[0]
    (tmp_path / f"{name}.part").write_bytes(content)
    assert download(server.source(name, content), tmp_path).is_dir()


def test_wrong_checksum_removes_the_download(server, tmp_path):
    name, content = ARCHIVES[0]
    source = server.source(name, content, md5="0" * 32)
    with pytest.raises(UserError, match="wrong checksum"):
        download(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rubbish_in_the_part_is_found_out(server, tmp_path):
    name, content = ARCHIVES[0]
    source = server.source(name, content)
    (tmp_path / f"{name}.part").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="wrong checksum"):
        download(source, tmp_path)
    assert download(source, tmp_path).is_dir()


def test_no_network(tmp_path):
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/tiny.zip"
        with pytest.raises(UserError, match=r"cannot download http.*check the network") as caught:
            download(Source(url, "0" * 32, "tiny"), tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_on_the_server(server, tmp_path):
    source = server.source("tiny.zip", b"")
    server.files.clear()
    with pytest.raises(UserError, match="404"):
        download(source, tmp_path)


@pytest.mark.parametrize("name", ["../evil", "tiny/../../evil", "/tmp/tightrope-evil", "C:/evil"])
def test_zip_names_that_leave_the_folder(server, tmp_path, name):
    source = server.source("tiny.zip", zip_of({"tiny/fine": b"", name: b"evil"}))
    with pytest.raises(UserError, match="refused"):
        download(source, tmp_path / "data")
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))
    assert not (tmp_path / "data" / "tiny").exists()


def test_tar_names_that_leave_the_folder(server, tmp_path):
    content = tar_of({"tiny/fine": b"", "tiny/../../evil": b"evil"})
    with pytest.raises(UserError, match="refused"):
        download(server.source("tiny.tar.gz", content), tmp_path / "data")
    assert not any("evil" in path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tiny.tar.gz", b"no archive", "is damaged"),
        ("tiny.zip", b"no archive", "is damaged"),
        ("tiny.tar.gz", ARCHIVES[0][1][:-2000], "is damaged"),
        ("tiny.zip", zip_of({"else/file": b""}), "does not hold the folder tiny"),
    ],
)
def test_archives_of_the_wrong_kind(server, tmp_path, name, content, message):
    with pytest.raises(UserError, match=message):
        download(server.source(name, content), tmp_path)
    assert not (tmp_path / "tiny").exists()


def test_a_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        download(server.source(*ARCHIVES[0]), tmp_path / "file" / "data")


def test_names(tmp_path):
    with pytest.raises(UserError, match="comes with Tightrope"):
        fetch("mnist", tmp_path)
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        fetch("cifar", tmp_path)
