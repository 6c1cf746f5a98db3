"""Splits, subsets and shapes of a data set."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightrope.data import Augmentation, Dataset
from tightrope.errors import UserError


def small(train=100, test=20, size=8, **changes):
    generator = torch.Generator().manual_seed(0)

    def images(count):
        return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)

    made = Dataset(
        "small",
        images(train),
        torch.arange(train) % 4,
        images(test),
        torch.arange(test) % 4,
        ("a", "b", "c", "d"),
        (0.5,) * 3,
        (0.25,) * 3,
    )
    return dataclasses.replace(made, **changes)


SMALL = small()


@given(st.one_of(st.integers(0, 99), st.floats(0.01, 0.99)), st.integers(0, 2**40))
def test_split_is_a_partition(validation, seed):
    split = SMALL.split(validation, seed)
    assert torch.equal(torch.cat([split.train, split.validation]).sort().values, torch.arange(100))
    expected = validation if isinstance(validation, int) else round(validation * 100)
    assert len(split.validation) == expected


def test_split_depends_on_the_seed_only():
    torch.manual_seed(0)
    first = SMALL.split(0.2, seed=1)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    again, other = SMALL.split(20, seed=1), SMALL.split(0.2, seed=2)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.validation, again.validation)
    assert not torch.equal(first.validation, other.validation)


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (1.0, r"in \[0, 1\)"),
        (-0.1, r"in \[0, 1\)"),
        (float("nan"), r"in \[0, 1\)"),
        (0.999, "cannot hold out 100"),
        (0.001, "is none"),
        (100, "cannot hold out 100"),
        (-1, "cannot hold out -1"),
        (True, "fraction or a count"),
        ("0.1", "fraction or a count"),
    ],
)
def test_bad_splits(validation, message):
    with pytest.raises(UserError, match=message):
        SMALL.split(validation, seed=0)


def test_validation_batches_are_the_held_out_samples_unaugmented():
    data = small(augment=Augmentation(flip=True, crop=6))
    split = data.split(30, seed=4)
    batches = list(data.validation_batches(8, split.validation))
    x = torch.cat([x for x, _ in batches])
    assert torch.equal(x, data.x_train[split.validation][:, :, 1:7, 1:7].float() / 255)
    assert torch.equal(torch.cat([y for _, y in batches]), data.y_train[split.validation])


def test_training_batches_stay_in_their_part():
    split = SMALL.split(30, seed=4)
    x = torch.cat([x for x, _ in SMALL.training_batches(8, indices=split.train)])
    training = {one.numpy().tobytes() for one in SMALL.x_train[split.train].float() / 255}
    assert len(x) == 70
    assert {one.numpy().tobytes() for one in x} == training


def test_subset_takes_the_first_samples():
    subset = SMALL.subset(n_train=10, n_test=3)
    assert torch.equal(subset.x_train, SMALL.x_train[:10])
    assert torch.equal(subset.y_test, SMALL.y_test[:3])
    assert subset.classes == SMALL.classes and len(SMALL.x_train) == 100
    assert len(SMALL.subset(n_test=3).x_train) == 100
    with pytest.raises(UserError, match="cannot take 101 small training samples: there are 100"):
        SMALL.subset(n_train=101)
    with pytest.raises(UserError, match="cannot take 0"):
        SMALL.subset(n_test=0)


def test_input_shape_is_what_the_network_sees():
    assert SMALL.input_shape == (3, 8, 8)
    cropped = small(augment=Augmentation(crop=6))
    assert cropped.input_shape == (3, 6, 6)
    assert next(iter(cropped.test_batches(2)))[0].shape == (2, 3, 6, 6)
    assert next(iter(cropped.training_batches(2)))[0].shape == (2, 3, 6, 6)
    assert cropped.num_classes == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": torch.zeros(99).long()}, "100 training samples but 99 labels"),
        ({"y_test": torch.zeros(20)}, "labels int64"),
        ({"x_test": torch.zeros(20, 3, 8, 8).double()}, "uint8 or float32"),
        ({"x_test": torch.zeros(20, 3, 8, 7)}, "shape"),
    ],
)
def test_parts_must_fit_together(changes, message):
    with pytest.raises(UserError, match=message):
        small(**changes)
