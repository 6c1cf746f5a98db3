"""Batched augmentation against an obvious per-sample reference."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tightrope.data import Augmentation
from tightrope.data.augmentation import _gather
from tightrope.errors import UserError


def reference(image, top, left, flipped, out, padding):
    """One image: mirror it, pad it, cut it."""
    if flipped:
        image = image.flip(-1)
    padded = F.pad(image.double(), (padding,) * 4, mode="replicate").to(image.dtype)
    return padded[:, top : top + out[0], left : left + out[1]]


@st.composite
def crops(draw):
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    padding = draw(st.integers(0, 4))
    out = draw(st.integers(1, height + 2 * padding)), draw(st.integers(1, width + 2 * padding))
    return (height, width), padding, out


@settings(deadline=None, max_examples=60)
@given(crops(), st.integers(1, 5), st.sampled_from([1, 3]), st.integers(0, 10**6), st.booleans())
def test_gather_equals_per_sample_reference(geometry, size, channels, seed, floating):
    (height, width), padding, out = geometry
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, channels, height, width), generator=generator)
    images = images / 255 if floating else images.to(torch.uint8)
    tops = torch.randint(0, height + 2 * padding - out[0] + 1, (size,), generator=generator)
    lefts = torch.randint(0, width + 2 * padding - out[1] + 1, (size,), generator=generator)
    flipped = torch.rand(size, generator=generator) < 0.5
    expected = torch.stack(
        [
            reference(image, top, left, flip, out, padding)
            for image, top, left, flip in zip(images, tops, lefts, flipped, strict=True)
        ]
    )
    result = _gather(images, tops, lefts, flipped, out, padding)
    assert result.dtype == images.dtype
    assert torch.equal(result, expected)


def possible(image, augment):
    """All outcomes of the augmentation of one image, as a set of byte strings."""
    _, height, width = image.shape
    out = (augment.crop or height, augment.crop or width)
    return {
        reference(image, top, left, flip, out, augment.padding).numpy().tobytes()
        for top in range(height + 2 * augment.padding - out[0] + 1)
        for left in range(width + 2 * augment.padding - out[1] + 1)
        for flip in ([False, True] if augment.flip else [False])
    }


@pytest.mark.parametrize(
    "augment",
    [
        Augmentation(flip=True),
        Augmentation(crop=3),
        Augmentation(flip=True, crop=4, padding=1),
        Augmentation(crop=4, padding=2),
    ],
)
def test_every_outcome_occurs_and_no_other(augment):
    image = torch.arange(16, dtype=torch.uint8).view(1, 4, 4)
    torch.manual_seed(0)
    images = augment.randomize(image.expand(2000, 1, 4, 4))
    assert {one.numpy().tobytes() for one in images} == possible(image, augment)


def test_flips_half_of_the_samples_independently():
    image = torch.tensor([[[[0, 1]]]], dtype=torch.uint8).expand(4000, 1, 1, 2)
    torch.manual_seed(1)
    flipped = Augmentation(flip=True).randomize(image)[:, 0, 0, 0].double()
    assert 0.45 < flipped.mean() < 0.55


def test_generator_decides_and_global_state_is_untouched():
    images = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8)
    augment = Augmentation(flip=True, crop=8, padding=2)
    before = torch.get_rng_state()
    first = augment.randomize(images, torch.Generator().manual_seed(3))
    again = augment.randomize(images, torch.Generator().manual_seed(3))
    other = augment.randomize(images, torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_centre_crop():
    images = torch.arange(2 * 36, dtype=torch.uint8).view(2, 1, 6, 6)
    assert torch.equal(Augmentation(crop=4).centre_crop(images), images[:, :, 1:5, 1:5])
    assert torch.equal(Augmentation(flip=True, crop=6, padding=2).centre_crop(images), images)
    assert Augmentation(flip=True).centre_crop(images) is images


def test_nothing_to_do_leaves_flat_data_alone():
    flat = torch.rand(5, 7)
    assert Augmentation().randomize(flat) is flat
    assert Augmentation().centre_crop(flat) is flat


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"padding": 2}, "needs a crop"),
        ({"crop": 4, "padding": -1}, "negative"),
        ({"crop": 0}, "at least 1"),
    ],
)
def test_nonsense_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Augmentation(**settings)


def test_images_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="larger than the images"):
        Augmentation(crop=9, padding=4).randomize(torch.zeros(1, 1, 8, 12))
    with pytest.raises(UserError, match="needs images"):
        Augmentation(flip=True).randomize(torch.zeros(3, 8))
