"""Images to train small networks on."""

import pytest

from tightrope.data import Batches, load_dataset


@pytest.fixture(scope="module")
def digits():
    """512 training and 100 validation images."""
    data = load_dataset("mnist")
    training = Batches(data.x_train[:512], data.y_train[:512], 64, training=True, drop_last=True)
    return training, Batches(data.x_train[600:700], data.y_train[600:700], 60)


@pytest.fixture(scope="module")
def few(digits):
    """A quarter of the training images, where any will do."""
    whole, validation = digits
    return Batches(whole.images[:128], whole.labels[:128], 32, training=True), validation
