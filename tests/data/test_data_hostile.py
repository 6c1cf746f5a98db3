"""Data made to do harm: bombs, pipes, files that claim more than they hold."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401 - loaded before memory is limited
from patience import memory, within
from PIL import Image

from tightrope.data import load_dataset
from tightrope.data.cifar10 import TEST_BATCH, TRAIN_BATCHES
from tightrope.errors import UserError

LIMIT = 600  # megabytes; the bombs would need gigabytes


def refused(name: str | Path, message: str, data_dir: Path | None = None) -> None:
    """Loading must fail with one line, soon, and without the memory of the whole."""
    with pytest.raises(UserError, match=message) as caught, within(60), memory(LIMIT):
        load_dataset(name, data_dir)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


# --- image folders ------------------------------------------------------------------------------


def image_folder(root: Path) -> Path:
    for part in ("train", "test"):
        for k, name in enumerate(("ant", "bee")):
            (root / part / name).mkdir(parents=True)
            Image.new("L", (6, 4), 100 * k).save(root / part / name / "a.png")
    return root


def png(width: int, height: int) -> bytes:
    """A grey image that claims a size, with the content of nothing but zeros."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1 << 16)))
    return b"\x89PNG\r\n\x1a\n" + content + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(5000, 5000), (10_000, 10_000), (60_000, 60_000), (2**31 - 1, 1)])
def test_huge_images(tmp_path: Path, size: tuple[int, int], recwarn: pytest.WarningsRecorder):
    folder = image_folder(tmp_path / "images")
    (folder / "test" / "bee" / "a.png").write_bytes(png(*size))
    refused(folder, "image .*bee/a.png")
    assert not recwarn.list


def test_many_large_images(tmp_path: Path):
    folder = image_folder(tmp_path / "images")
    content = png(4096, 4096)
    for part in ("train", "test"):
        for name in ("ant", "bee"):
            (folder / part / name / "a.png").unlink()
            for i in range(80):
                (folder / part / name / f"{i}.png").write_bytes(content)
    for i in range(160):
        (folder / "train" / "ant" / f"b{i}.png").write_bytes(content)
    refused(folder, "a data set of .* images exceeds the limit of .* bytes")


def test_an_image_of_many_scans(tmp_path: Path):
    """Each scan of a JPEG costs as much as the image, and needs a few bytes."""
    folder = image_folder(tmp_path / "images")
    buffer = io.BytesIO()
    Image.new("L", (6, 4), 50).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()
    last = content.rindex(b"\xff\xda")
    (folder / "test" / "bee" / "a.png").unlink()
    (folder / "test" / "bee" / "a.jpg").write_bytes(
        content[:last] + content[last:-2] * 2000 + content[-2:]
    )
    refused(folder, "image .*bee/a.jpg exceeds the limit of 100 scans")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_called_an_image_and_is_no_file(tmp_path: Path, make):
    folder = image_folder(tmp_path / "images")
    make(folder / "train" / "bee" / "z.png")
    refused(folder, "train/bee/z.png: it is a (pipe|folder), not a file")


def test_an_image_that_a_program_would_have_to_be_started_for(tmp_path: Path):
    folder = image_folder(tmp_path / "images")
    text = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\nshowpage\n%%EOF\n"
    (folder / "train" / "ant" / "a.png").write_text(text)
    refused(folder, "cannot read the image .*ant/a.png")


# --- arrays -------------------------------------------------------------------------------------


def header(shape: str, kind: str = "|u1") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode()


def write_npz(path: Path, **members: bytes) -> Path:
    small = {
        "x_train": header("(4, 2)") + bytes(range(8)),
        "y_train": header("(4,)") + bytes([0, 1, 0, 1]),
        "x_test": header("(4, 2)") + bytes(range(8)),
        "y_test": header("(4,)") + bytes([0, 1, 0, 1]),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**small, **members}.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_the_small_file_of_these_tests_is_a_good_one(tmp_path: Path):
    assert load_dataset(write_npz(tmp_path / "a.npz")).x_train.shape == (4, 2)


@pytest.mark.parametrize(
    "shape",
    ["(4000000000,)", "(2000000000, 2)", "(999999999999999999, 9)", "(-1, 2)", "(2.5, 2)"],
)
def test_arrays_that_are_shorter_than_they_say(tmp_path: Path, shape: str):
    path = write_npz(tmp_path / "a.npz", x_train=header(shape) + bytes(8))
    refused(path, "a.npz is damaged")


def test_arrays_of_gigabytes_in_a_few_megabytes(tmp_path: Path):
    path = write_npz(tmp_path / "a.npz")
    with (
        zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as bomb,
        zipfile.ZipFile(path) as small,
    ):
        for name in small.namelist():
            if name != "x_train.npy":
                bomb.writestr(name, small.read(name))
        with bomb.open("x_train.npy", "w", force_zip64=True) as member:
            member.write(header("(4, 78643200)"))
            for _ in range(300):
                member.write(bytes(1 << 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTROPE_LIMIT_DATA_BYTES", str(1 << 27))
        refused(tmp_path / "b.npz", "b.npz, decompressed, exceeds the limit of 134217728 bytes")


@pytest.mark.parametrize("kind", ["|O", "|S0", "|V0", "<U9", "[('a', '<f4')]"])
def test_arrays_of_strange_things(tmp_path: Path, kind: str):
    written = header("(999999999999,)", kind).replace(b"'[", b"[").replace(b"]'", b"]")
    refused(write_npz(tmp_path / "a.npz", y_test=written), "a.npz")


@pytest.mark.parametrize("name", ["pipe.npz", "device.npz"])
def test_arrays_that_are_no_file(tmp_path: Path, name: str):
    path = tmp_path / name
    os.mkfifo(path) if name == "pipe.npz" else path.symlink_to("/dev/zero")
    refused(path, "it is a (pipe|device), not a file")


@pytest.mark.parametrize("name", ["a\0b.npz", "a\0b"])
def test_names_with_a_nul_byte(name: str):
    refused(Path(name), "a.x00b")


# --- CIFAR-10 -----------------------------------------------------------------------------------


def cifar_folder(root: Path) -> Path:
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*TRAIN_BATCHES, TEST_BATCH):
        (folder / name).write_bytes(pickle.dumps(batch))
    return folder


BATCHES = {
    # Sixty million lists of sixty bytes each.
    "lists": b"\x80\x02(" + b"]" * 60_000_000 + b"t.",
    "nested": b"\x80\x02" + b"]" * 20_000_000 + b"a" * 19_999_999 + b".",
    "dictionaries": b"\x80\x02(" + b"}" * 30_000_000 + b"l.",
    # Room for four billion objects that are not there.
    "places": b"\x80\x02}r\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",
    "string": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"}.",
}


@pytest.mark.parametrize("kind", BATCHES)
def test_hostile_batches(tmp_path: Path, kind: str):
    folder = cifar_folder(tmp_path)
    (folder / TEST_BATCH).write_bytes(BATCHES[kind])
    refused("cifar10", "test_batch", tmp_path)


def test_labels_that_multiply(tmp_path: Path):
    """Lists that hold each other twice are two to the power of thirty labels."""
    folder = cifar_folder(tmp_path)
    labels: object = [0, 1]
    for _ in range(32):
        labels = [labels, labels]
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": labels}
    (folder / TEST_BATCH).write_bytes(pickle.dumps(batch))
    refused("cifar10", "test_batch is damaged.*'labels' is not a list of whole numbers", tmp_path)


def test_a_batch_beyond_the_limit(tmp_path: Path):
    folder = cifar_folder(tmp_path)
    with (folder / TEST_BATCH).open("wb") as file:
        file.truncate(10**12)  # a hole: it needs no room on the disk
    refused("cifar10", "test_batch exceeds the limit of 67108864 bytes", tmp_path)


@pytest.mark.parametrize("name", ["cifar-10-batches-py/test_batch", "cifar-10-python.tar.gz"])
def test_pipes_in_place_of_batches(tmp_path: Path, name: str):
    if "/" in name:
        cifar_folder(tmp_path)
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    refused("cifar10", "it is a pipe, not a file", tmp_path)


def write_archive(path: Path, member: tarfile.TarInfo, megabytes: int) -> None:
    """Write an archive of one member whose content is that long, and compresses well."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(megabytes):
            file.write(b"\1" * (1 << 20))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"S", tarfile.REGTYPE])
def test_archives_of_strange_members(tmp_path: Path, kind: bytes):
    member = tarfile.TarInfo("cifar-10-batches-py/test_batch")
    member.type, member.size = kind, 700 << 20
    path = tmp_path / "cifar-10-python.tar.gz"
    write_archive(path, member, 700)
    refused("cifar10", "cifar-10-python.tar.gz", tmp_path)


def test_an_archive_beyond_the_limit(tmp_path: Path):
    member = tarfile.TarInfo("other")
    member.size = 5 << 30
    write_archive(tmp_path / "cifar-10-python.tar.gz", member, 1)
    refused("cifar10", "decompressed, exceeds the limit of 1073741824 bytes", tmp_path)


# --- TinyImageNet -------------------------------------------------------------------------------


def test_lists_beyond_the_limit(tmp_path: Path):
    folder = tmp_path / "tiny-imagenet-200"
    folder.mkdir()
    with (folder / "wnids.txt").open("wb") as file:
        file.truncate(10**12)
    refused("tinyimagenet", "wnids.txt exceeds the limit", tmp_path)
    (folder / "wnids.txt").unlink()
    os.mkfifo(folder / "wnids.txt")
    refused("tinyimagenet", "wnids.txt: it is a pipe", tmp_path)
