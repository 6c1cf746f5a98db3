"""The loader of TinyImageNet, on a tree of the official layout made here."""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from tightrope.data import load_dataset
from tightrope.errors import UserError

WNIDS = [f"n{(k * 7919) % 100000:08d}" for k in range(200)]  # not in alphabetical order
CACHE = "tiny-imagenet-200.npz"


def save(path, shade, mode="RGB", size=64):
    path.parent.mkdir(parents=True, exist_ok=True)
    color = shade if mode == "L" else (shade, 255 - shade, 10)
    Image.new(mode, (size, size), color).save(path, quality=95)


@pytest.fixture(scope="session")
def official(tmp_path_factory):
    """One training image per class (one of them grey, as in the original) and 20 for testing."""
    folder = tmp_path_factory.mktemp("tin") / "tiny-imagenet-200"
    for k, wnid in enumerate(WNIDS):
        save(folder / "train" / wnid / "images" / f"{wnid}_0.JPEG", k, "L" if k == 3 else "RGB")
    annotations = ""
    for k in range(20):
        save(folder / "val" / "images" / f"val_{k}.JPEG", 5 * k)
        annotations += f"val_{k}.JPEG\t{WNIDS[5 * k]}\t0\t0\t62\t62\n"
    (folder / "val" / "val_annotations.txt").write_text(annotations)
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (folder / "words.txt").write_text(f"{WNIDS[0]}\tgoldfish, Carassius auratus\n")
    return folder


@pytest.fixture
def tree(official, tmp_path):
    shutil.copytree(official, tmp_path / official.name)
    return tmp_path / official.name


def test_images_and_labels_belong_together(tree):
    data = load_dataset("tinyimagenet", tree.parent)
    assert data.x_train.shape == (200, 3, 64, 64) and data.x_test.shape == (20, 3, 64, 64)
    assert data.num_classes == 200
    order = sorted(WNIDS)
    for x, label in zip(data.x_train, data.y_train.tolist(), strict=True):
        shade = WNIDS.index(order[label])
        green = shade if shade == 3 else 255 - shade
        assert abs(int(x[0, 30, 30]) - shade) <= 3 and abs(int(x[1, 30, 30]) - green) <= 3
    for k, label in enumerate(data.y_test.tolist()):
        assert order[label] == WNIDS[5 * k]
        assert abs(int(data.x_test[k, 0, 0, 0]) - 5 * k) <= 3
    assert data.classes[order.index(WNIDS[0])] == "goldfish"
    assert data.classes[order.index(WNIDS[1])] == WNIDS[1]


def test_two_crops(tree):
    small, full = (load_dataset(name, tree.parent) for name in ("tinyimagenet", "tinyimagenet-64"))
    assert small.input_shape == (3, 56, 56) and full.input_shape == (3, 64, 64)
    assert (small.augment.flip, small.augment.padding) == (True, 0)
    assert (full.augment.flip, full.augment.crop, full.augment.padding) == (True, 64, 4)
    x, _ = next(iter(small.test_batches(4)))
    assert torch.equal(x, small.x_test[:4, :, 4:60, 4:60] / 255)
    x, _ = next(iter(full.test_batches(4)))
    assert torch.equal(x, full.x_test[:4] / 255)


def test_decoded_images_are_kept(tree):
    first = load_dataset("tinyimagenet", tree.parent)
    assert sorted(entry.name for entry in tree.parent.iterdir()) == [tree.name, CACHE]
    shutil.rmtree(tree)
    again = load_dataset("tinyimagenet", tree.parent)
    assert torch.equal(first.x_train, again.x_train) and torch.equal(first.y_test, again.y_test)
    assert first.classes == again.classes


@pytest.mark.parametrize("damage", ["truncated", "lacking", "older"])
def test_a_useless_cache_is_replaced(tree, damage):
    first = load_dataset("tinyimagenet", tree.parent)
    cache = tree.parent / CACHE
    if damage == "truncated":
        cache.write_bytes(cache.read_bytes()[:5000])
    elif damage == "lacking":
        np.savez(cache, x_train=np.zeros(3))
    else:
        old = {key: np.zeros(1) for key in ("x_train", "y_train", "x_test", "y_test", "classes")}
        np.savez(cache, **old)
        os.utime(cache, (1, 1))
    again = load_dataset("tinyimagenet", tree.parent)
    assert torch.equal(first.x_test, again.x_test)
    assert cache.stat().st_size > 200 * 3 * 64 * 64


def test_a_cache_that_cannot_be_written_is_no_error(tree, monkeypatch):
    def refuse(path, write):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tightrope.data.tinyimagenet.write_atomically", refuse)
    assert len(load_dataset("tinyimagenet", tree.parent).x_train) == 200
    assert not (tree.parent / CACHE).exists()


def test_missing_data(tmp_path):
    with pytest.raises(UserError, match=r"tiny-imagenet-200; run `tightrope data fetch tinyim"):
        load_dataset("tinyimagenet-64", tmp_path)


def break_image(tree):
    (tree / "val" / "images" / "val_3.JPEG").write_bytes(b"nothing")


def drop_image(tree):
    (tree / "val" / "images" / "val_3.JPEG").unlink()


def resize_image(tree):
    save(tree / "val" / "images" / "val_3.JPEG", 9, size=63)


def empty_class(tree):
    (tree / "train" / WNIDS[4] / "images" / f"{WNIDS[4]}_0.JPEG").unlink()


def unknown_class(tree):
    (tree / "val" / "val_annotations.txt").write_text("val_3.JPEG\tn99\t0\t0\t1\t1\n")


def too_few_classes(tree):
    (tree / "wnids.txt").write_text("\n".join(WNIDS[:199]))


def no_list(tree):
    (tree / "wnids.txt").unlink()


def empty_list(tree):
    (tree / "val" / "val_annotations.txt").write_text("\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_image, "cannot read the image .*val_3.JPEG"),
        (drop_image, "cannot read the image .*val_3.JPEG"),
        (resize_image, "val_3.JPEG has 63×63 pixels, expected 64×64"),
        (empty_class, f"{WNIDS[4]}/images holds no"),
        (unknown_class, "'val_3.JPEG' has the unknown class 'n99'"),
        (too_few_classes, "lists 199 classes, not 200"),
        (no_list, "cannot read .*wnids.txt"),
        (empty_list, "val_annotations.txt is empty"),
    ],
)
def test_damaged_trees(tree, damage, message):
    damage(tree)
    with pytest.raises(UserError, match=message):
        load_dataset("tinyimagenet", tree.parent)
    assert not (tree.parent / CACHE).exists()
