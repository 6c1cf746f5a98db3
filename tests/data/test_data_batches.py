"""Batches: order, shuffling, conversion, sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightrope.data import Augmentation, Batches, as_float
from tightrope.errors import UserError


def numbered(count):
    """Images whose pixels and labels are their index."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    return images.contiguous(), torch.arange(count)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 40), st.integers(1, 12), st.booleans(), st.booleans(), st.booleans())
def test_each_sample_comes_once_with_its_label(count, size, training, drop_last, restricted):
    images, labels = numbered(40)
    indices = torch.arange(40).flip(0)[:count] if restricted else None
    if not restricted:
        images, labels = images[:count], labels[:count]
    if drop_last and 0 < count < size:
        return
    batches = Batches(images, labels, size, training=training, drop_last=drop_last, indices=indices)
    got = list(batches)
    assert len(got) == len(batches)
    assert all(len(y) == size for _, y in got[:-1])
    for x, y in got:
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert torch.equal(x[:, 0, 0, 0], y.float() / 255)
    seen = [int(label) for _, y in got for label in y]
    expected = (indices if restricted else labels).tolist()
    assert len(seen) == (count // size * size if drop_last else count)
    assert len(set(seen)) == len(seen) and set(seen) <= set(expected)
    if not training:
        assert seen == expected[: len(seen)]


def test_shuffling_follows_the_global_generator_and_changes_each_pass():
    images, labels = numbered(50)
    batches = Batches(images, labels, 50, training=True)

    def order():
        return next(iter(batches))[1].tolist()

    torch.manual_seed(5)
    first, second = order(), order()
    torch.manual_seed(5)
    assert [order(), order()] == [first, second]
    assert first != second


def test_a_given_generator_decides_alone():
    images = torch.randint(0, 256, (30, 3, 6, 6), dtype=torch.uint8)
    augment = Augmentation(flip=True, crop=6, padding=2)

    def once(global_seed):
        torch.manual_seed(global_seed)
        generator = torch.Generator().manual_seed(9)
        batches = Batches(
            images, torch.arange(30), 7, training=True, augment=augment, generator=generator
        )
        return list(batches)

    for (x, y), (other_x, other_y) in zip(once(0), once(1), strict=True):
        assert torch.equal(x, other_x) and torch.equal(y, other_y)


def test_only_training_batches_are_augmented():
    images = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6)
    augment = Augmentation(flip=True, crop=4)
    ((x, _),) = Batches(images, torch.zeros(1, dtype=torch.int64), 1, augment=augment)
    assert torch.equal(x, images[:, :, 1:5, 1:5].float() / 255)
    torch.manual_seed(0)
    batches = Batches(
        images.expand(64, 1, 6, 6), torch.zeros(64).long(), 64, training=True, augment=augment
    )
    ((x, _),) = batches
    assert x.shape == (64, 1, 4, 4)
    assert len(torch.unique(x, dim=0)) > 5


def test_images_in_memory_stay_as_they_are():
    images, labels = numbered(9)
    copy = images.clone()
    for x, _ in Batches(images, labels, 4):
        x.zero_()
    assert images.dtype == torch.uint8 and torch.equal(images, copy)


def test_as_float():
    values = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(as_float(values), torch.arange(256) / 255)
    assert torch.equal(values, torch.arange(256, dtype=torch.uint8))
    floats = torch.rand(3)
    assert as_float(floats) is floats
    with pytest.raises(TypeError, match="int64"):
        as_float(torch.arange(3))


def test_bad_arguments():
    images, labels = numbered(5)
    with pytest.raises(UserError, match="at least 1"):
        Batches(images, labels, 0)
    with pytest.raises(UserError, match="5 images but 4 labels"):
        Batches(images, labels[:4], 2)
    with pytest.raises(UserError, match="larger than the 5 samples"):
        Batches(images, labels, 6, drop_last=True)
