"""Data of the user's: `.npz` files, image folders, and all that can be wrong with them."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tightrope.data import dataset_from_arrays, load_dataset
from tightrope.data.checks import statistics
from tightrope.errors import UserError


def arrays(shape=(3, 5, 5), floating=False, train=12, test=6):
    rng = np.random.default_rng(0)

    def images(count):
        if floating:
            return rng.random((count, *shape))
        return rng.integers(0, 256, (count, *shape), dtype=np.uint8)

    return {
        "x_train": images(train),
        "y_train": np.arange(train) % 3,
        "x_test": images(test),
        "y_test": np.arange(test) % 3,
    }


def write(path, **changes):
    content = {**arrays(), **changes}
    np.savez(path, **{key: value for key, value in content.items() if value is not None})
    return str(path)


@pytest.mark.parametrize("shape", [(3, 5, 5), (1, 4, 6), (7,)])
@pytest.mark.parametrize("floating", [False, True])
def test_npz(tmp_path, shape, floating):
    content = arrays(shape, floating)
    data = load_dataset(write(tmp_path / "mine.npz", **content))
    assert data.name == "mine.npz" and data.input_shape == shape and data.num_classes == 3
    assert data.x_train.dtype == (torch.float32 if floating else torch.uint8)
    assert np.array_equal(
        data.x_train.numpy(), content["x_train"].astype(data.x_train.numpy().dtype)
    )
    assert data.y_test.tolist() == content["y_test"].tolist()
    assert not data.augment.active
    x, _ = next(iter(data.training_batches(4)))
    assert x.shape == (4, *shape) and float(x.max()) <= 1
    pixels = content["x_train"] / (1 if floating else 255)
    axes = (0, 2, 3) if len(shape) == 3 else None
    assert data.mean == pytest.approx(np.atleast_1d(pixels.mean(axes)).tolist(), abs=1e-6)
    assert data.std == pytest.approx(np.atleast_1d(pixels.std(axes)).tolist(), abs=1e-6)


def test_grey_images_without_channel_axis_get_one(tmp_path):
    data = load_dataset(write(tmp_path / "a.npz", **arrays((5, 5))))
    assert data.input_shape == (1, 5, 5)


@pytest.mark.parametrize("dtype", ["int64", ">i2", "uint32"])
def test_integer_pixels_of_any_width(tmp_path, dtype):
    content = arrays()
    data = load_dataset(write(tmp_path / "a.npz", x_train=content["x_train"].astype(dtype)))
    assert data.x_train.dtype == torch.uint8
    assert np.array_equal(data.x_train.numpy(), content["x_train"])


def test_a_constant_channel_has_deviation_one():
    x = torch.full((9, 2, 3, 3), 0.3)
    x[:4, 1] = 0.7
    mean, std = statistics(x)
    assert std[0] == 1.0 and mean[0] == pytest.approx(0.3)
    assert std[1] == pytest.approx(float(x[:, 1].double().std(correction=0)))


def test_statistics_do_not_depend_on_chunks():
    x = torch.randint(0, 256, (2500, 2, 3, 3), dtype=torch.uint8)
    mean, std = statistics(x)
    pixels = x.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())


def with_value(array, value):
    array = array.copy()
    array.reshape(-1)[5] = value
    return array


FLOAT = arrays(floating=True)["x_train"]
WHOLE = arrays()["x_train"].astype("int64")
LABELS = arrays()["y_train"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": with_value(FLOAT, np.nan)}, r"x_train has pixels that are not a number"),
        ({"x_train": with_value(FLOAT, np.inf)}, "x_train has infinite pixels"),
        ({"x_train": with_value(FLOAT, -np.inf)}, "x_train has infinite pixels"),
        ({"x_train": with_value(FLOAT, -0.01)}, r"float pixels outside \[0, 1\] \(from -0.01"),
        ({"x_train": FLOAT * 255}, "divide by 255"),
        ({"x_train": with_value(WHOLE, 256)}, r"outside 0\.\.255 \(from 0 to 256\)"),
        ({"x_train": with_value(WHOLE, -1)}, r"outside 0\.\.255 \(from -1"),
        ({"x_train": WHOLE % 2}, "only the integer pixels 0 and 1"),
        ({"x_train": FLOAT > 0.5}, "must hold numbers, found bool"),
        ({"x_train": FLOAT.astype(complex)}, "must hold numbers, found complex"),
        ({"x_train": np.array("text")}, "x_train must be images"),
        ({"x_train": FLOAT[:, :, :, :, None]}, "x_train must be images"),
        ({"x_train": FLOAT.transpose(0, 2, 3, 1)}, "channels last"),
        ({"x_train": FLOAT[:0], "y_train": LABELS[:0]}, "x_train is empty"),
        ({"x_test": FLOAT[:0], "y_test": LABELS[:0]}, "x_test is empty"),
        ({"x_test": FLOAT[:6, :, :4]}, "shape"),
        ({"y_train": LABELS[:-1]}, "training set has 12 samples but 11 labels"),
        ({"y_test": LABELS}, "test set has 6 samples but 12 labels"),
        ({"y_train": LABELS[:0]}, "y_train is empty"),
        ({"y_train": LABELS - 1}, "y_train has the negative label -1"),
        ({"y_train": LABELS.astype(float)}, "y_train must be integers, found float64"),
        ({"y_train": LABELS[:, None]}, r"one integer per sample, found shape \(12, 1\)"),
        ({"y_train": LABELS.astype("uint64") + np.uint64(2**63)}, "far too large"),
        ({"y_train": LABELS * 2}, "no training sample with label 1, but labels up to 4"),
        ({"y_train": LABELS * 0}, "only the class 0"),
        ({"y_test": np.array([0, 1, 2, 0, 7, 8])}, "test label 7, which is not among the 3"),
        ({"y_train": None}, r"lacks y_train \(it holds: x_train, x_test, y_test\)"),
        ({"x_train": None, "y_test": None}, "lacks x_train, y_test"),
    ],
)
def test_bad_arrays(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        load_dataset(write(tmp_path / "mine.npz", **changes))
    assert "mine.npz" in str(caught.value) and "\n" not in str(caught.value)


class Explosive:
    def __reduce__(self):
        return print, ("executed",)


def test_pickled_objects_are_never_loaded(tmp_path, capsys):
    path = write(tmp_path / "a.npz", y_train=np.array([Explosive()] * 12, dtype=object))
    with pytest.raises(UserError, match=r"damaged or not an \.npz file"):
        load_dataset(path)
    assert "executed" not in capsys.readouterr().out


def test_files_that_are_no_npz(tmp_path):
    path = tmp_path / "a.npz"
    with pytest.raises(UserError, match=r"a\.npz does not exist"):
        load_dataset(str(path))
    for content in (b"", b"text", b"\x80\x04K\x01."):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.npz is damaged or not an .npz"):
            load_dataset(str(path))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="is a single array"):
        load_dataset(str(path))


def packed(compressed):
    buffer = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(buffer, **arrays())
    return buffer.getvalue()


PACKED = {compressed: packed(compressed) for compressed in (False, True)}


@settings(deadline=None, max_examples=150)
@given(st.booleans(), st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_damage_is_a_user_error_or_harmless(tmp_path_factory, compressed, place, mask, cut):
    content = bytearray(PACKED[compressed])
    position = int(place * len(content))
    content[position] ^= mask
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content[:position] if cut else content)
    try:
        data = load_dataset(str(path))
    except UserError as error:
        assert "damaged.npz" in str(error) and "\n" not in str(error)
        return
    assert not cut
    assert np.array_equal(data.x_train.numpy(), arrays()["x_train"]), "CRC must have noticed"


def test_named_classes_from_arrays():
    content = arrays()
    data = dataset_from_arrays("mine", **content, classes=("a", "b", "c", "unused"))
    assert data.num_classes == 4
    with pytest.raises(UserError, match="label 2, but there are 2 classes"):
        dataset_from_arrays("mine", **content, classes=("a", "b"))


def folder_of_images(root, modes=("RGB",), size=(6, 4), suffix="png"):
    """Three classes, two training images and one test image each; the shade is the class."""
    modes = list(modes)
    for part, count in (("train", 2), ("test", 1)):
        for k, name in enumerate(("ant", "bee", "cat")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                mode = modes[(k + i) % len(modes)]
                image = Image.new("L", size, 40 * (k + 1)).convert(mode)
                image.save(root / part / name / f"{i}.{suffix}")
    return root


@pytest.mark.parametrize(
    ("modes", "suffix", "channels"),
    [
        (["RGB"], "png", 3),
        (["L"], "png", 1),
        (["L", "LA"], "png", 1),
        (["L", "RGB"], "png", 3),
        (["RGBA", "P"], "png", 3),
        (["RGB"], "JPG", 3),
        (["L"], "jpeg", 1),
    ],
)
def test_image_folder(tmp_path, modes, suffix, channels):
    root = folder_of_images(tmp_path / "insects", modes, suffix=suffix)
    (root / "train" / "ant" / "notes.txt").write_text("not an image")
    (root / "train" / ".hidden").mkdir()
    data = load_dataset(str(root))
    assert data.name == "insects" and data.classes == ("ant", "bee", "cat")
    assert data.input_shape == (channels, 4, 6) and data.x_train.dtype == torch.uint8
    assert data.y_train.tolist() == [0, 0, 1, 1, 2, 2] and data.y_test.tolist() == [0, 1, 2]
    for x, label in zip(data.x_train, data.y_train.tolist(), strict=True):
        assert (x.int() - 40 * (label + 1)).abs().max() <= 2


@pytest.mark.parametrize("shape", [(4, 6, 3), (4, 6)])
def test_every_pixel_is_where_it_was(tmp_path, shape):
    root = folder_of_images(tmp_path / "a", ["RGB" if len(shape) == 3 else "L"])
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(root / "train" / "ant" / "0.png")
    expected = pixels.reshape(4, 6, -1).transpose(2, 0, 1)
    assert np.array_equal(load_dataset(str(root)).x_train[0].numpy(), expected)


def test_black_and_white_images_are_zero_and_one(tmp_path):
    data = load_dataset(str(folder_of_images(tmp_path / "a", ["1"])))
    assert set(data.x_train.unique().tolist()) <= {0, 255}


def test_a_class_without_test_images_is_fine(tmp_path):
    root = folder_of_images(tmp_path / "a")
    (root / "test" / "bee" / "0.png").unlink()
    (root / "test" / "bee").rmdir()
    assert load_dataset(str(root)).y_test.tolist() == [0, 2]


def damage_size(root):
    Image.new("RGB", (6, 5)).save(root / "test" / "bee" / "0.png")


def damage_content(root):
    (root / "test" / "bee" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")


def damage_tail(root):
    path = root / "train" / "bee" / "1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-60])


def damage_depth(root):
    Image.fromarray(np.full((4, 6), 40000, np.uint16)).save(root / "train" / "cat" / "0.png")


def damage_empty_class(root):
    for path in (root / "train" / "bee").iterdir():
        path.unlink()


def damage_no_test(root):
    (root / "test").rename(root / "validation")


def damage_no_classes(root):
    (root / "train").rename(root / "other")
    (root / "train").mkdir()


def damage_new_class(root):
    (root / "test" / "bee").rename(root / "test" / "wasp")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_size, r"test/bee/0.png has 5×6 pixels but .*train/ant/0.png has 4×6"),
        (damage_content, r"cannot read the image .*test/bee/0.png"),
        (damage_tail, r"cannot read the image .*train/bee/1.png"),
        (damage_depth, r"train/cat/0.png has more than 8 bits"),
        (damage_empty_class, r"class folder .*train/bee holds no"),
        (damage_no_test, r"/test is missing"),
        (damage_no_classes, r"train holds no class folders"),
        (damage_new_class, r"test/wasp is a class that is not in train"),
    ],
)
def test_bad_folders(tmp_path, damage, message):
    root = folder_of_images(tmp_path / "images")
    damage(root)
    with pytest.raises(UserError, match=message) as caught:
        load_dataset(str(root))
    assert "\n" not in str(caught.value)


def test_one_class_is_not_enough(tmp_path):
    root = tmp_path / "a"
    for part in ("train", "test"):
        (root / part / "only").mkdir(parents=True)
        Image.new("L", (4, 4)).save(root / part / "only" / "0.png")
    with pytest.raises(UserError, match="only the class 'only'"):
        load_dataset(str(root))
